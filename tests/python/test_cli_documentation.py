"""docs/cli.md: its examples are run, in order, and print what stands there but for times and rates."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import DOCUMENT, run
from stepwell.cli.group import COMMANDS

FENCE = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steady(text: str, home: Path) -> list[str]:
    """Lines without what differs from run to run: where it is, when it was, how long it took."""
    text = text.replace(str(home), "/home/you")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"[\d.e-]+ s after", "SOME s after", text)
    text = re.sub(r", [\d.]+ \w+/s$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(report.html) \([\d.]+ KiB\)", r"\1", text)
    return text.rstrip("\n").split("\n")


def test_the_examples_of_the_page_print_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tried = 0
    for language, body in FENCE.findall(DOCUMENT.read_text()):
        if language == "python":
            exec(compile(body, "docs/cli.md", "exec"), {"__name__": "__main__"})
            continue
        for example in re.split(r"^\$ stepwell ", body, flags=re.MULTILINE)[1:]:
            command, _, wanted = example.partition("\n")
            result = run(*shlex.split(command))
            assert result.exit_code in (0, 1), f"{command}\n{result.output}"
            expected, found = steady(wanted, Path("/home/you")), steady(result.stdout, tmp_path)
            if expected[-1] == "...":
                expected, found = expected[:-1], found[: len(expected) - 1]
            assert found == expected, command
            tried += 1
    assert tried >= len(COMMANDS)


def test_the_page_has_a_section_for_every_command() -> None:
    sections = re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert set(COMMANDS) <= set(sections)
