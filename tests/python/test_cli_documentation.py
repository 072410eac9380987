"""docs/cli.md: its examples run in order, and print the documented output except for times and
rates."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from command_line import DOCUMENT
from pages import run_page
from stepwell._cli.group import COMMANDS, stepwell


def test_the_examples_of_the_page_print_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCUMENT, tmp_path) >= len(COMMANDS)


def test_the_page_names_every_option_of_every_command() -> None:
    page = DOCUMENT.read_text()
    missing = [
        f"{name} {option}"
        for name in COMMANDS
        for parameter in stepwell.get_command(click.Context(stepwell), name).params
        for option in [*parameter.opts, *parameter.secondary_opts]
        if option.startswith("--") and not re.search(re.escape(option) + r"\b", page)
    ]
    assert missing == []


def test_the_page_has_a_section_for_every_command() -> None:
    sections = re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert set(COMMANDS) <= set(sections)
