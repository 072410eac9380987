"""The documentation: examples run, links have targets, and the first program survives a kill."""

from __future__ import annotations

import inspect
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pages
import pytest
import stepwell as sw
from command_line import DOCUMENT
from s3_server import s3_server

#: Pages with examples for people who look for one: none of them may lose its last one.
WITH_EXAMPLES = {"README.md", "docs/index.md", "docs/start.md", "docs/faq.md", "docs/writing_a_format.md"} | {
    f"docs/guide/{name}.md"
    for name in (
        "converting", "evaluators", "gpu", "jax", "memory", "moving", "preemption", "pytorch", "restoring", "resuming_from_others", "retention", "saving", "states", "tracing",
    )
}  # fmt: skip
DEADLINE = 120.0


def test_the_pages_that_explain_by_examples_have_some() -> None:
    assert {pages.name(page) for page in pages.PAGES if pages.examples(page)} >= WITH_EXAMPLES


#: Pages that readers start from. Exempt are pages that are looked things up in: the reference, the
#: format, figures, decisions.
BEGINNINGS = [
    pages.PROJECT / "README.md",
    pages.PROJECT / "docs" / "start.md",
    pages.PROJECT / "docs" / "faq.md",
    *sorted((pages.PROJECT / "docs" / "guide").glob("*.md")),
]


@pytest.mark.parametrize("page", BEGINNINGS, ids=pages.name)
def test_a_page_begins_with_an_example_that_runs(page: Path) -> None:
    (_, first), *_ = pages.examples(page)
    before = page.read_text().partition(first)[0]
    assert before.count("\n") < 15
    assert "import " in first


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in pages.PAGES
        if page != DOCUMENT and pages.examples(page) and not pages.needs_framework(page)
    ],
    ids=pages.name,
)
def test_the_examples_of_the_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "s3://" not in "".join(text for _, text in pages.examples(page)):
        pages.run_page(page, tmp_path)
        return
    pytest.importorskip("moto")
    with s3_server("bucket") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        pages.run_page(page, tmp_path)


def program(folder: Path) -> list[str]:
    """The first program of the first page, as its reader saves it."""
    folder.mkdir()
    text = next(
        text
        for kind, text in pages.examples(pages.PROJECT / "docs" / "start.md")
        if kind == "python" and "CheckpointManager" in text
    )
    (folder / "train.py").write_text(text)
    return [sys.executable, "train.py"]


def test_the_killed_first_page_program_ends_with_equal_bits(
    tmp_path: Path,
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(program(whole), cwd=whole, timeout=DEADLINE, check=True)
    command = program(killed)
    with subprocess.Popen(command, cwd=killed) as process:
        end = time.monotonic() + DEADLINE
        while not (killed / "runs/start/step_00000010").exists():
            assert process.poll() is None, "it was over before it was killed"
            assert time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    again = subprocess.run(
        command, cwd=killed, timeout=DEADLINE, check=True, capture_output=True, text=True
    ).stdout
    assert re.fullmatch(r"resuming at step [1-6]?[16]\n", again)
    for one in (whole, killed):
        assert sw.verify(one / "runs/start").ok
    first, second = (sw.restore(one / "runs/start")["params"]["w"] for one in (whole, killed))
    assert np.array_equal(first, second)


def test_the_modules_of_the_manager_have_a_row() -> None:
    text = (pages.PROJECT / "docs/decisions/007-modules-of-the-manager.md").read_text()
    described = {name for code in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\w+", code)}
    library = (pages.PROJECT / "manager/src/lib.rs").read_text()
    modules = re.findall(r"^(?:pub )?mod (\w+);", library, re.MULTILINE)
    assert set(modules) - described == {"scale_tests"}


def slug(heading: str) -> str:
    """Returns a heading's name in links, as forges and the site derive it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).strip().replace(" ", "-")


@pytest.mark.parametrize(
    "page", [*pages.PAGES, pages.PROJECT / "CONTRIBUTING.md", pages.PROJECT / "CHANGELOG.md"], ids=pages.name
)
def test_the_links_of_the_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", text):
        if target.startswith("http"):
            continue
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}#{anchor}"


def test_the_page_of_benchmarks_is_short() -> None:
    assert len((pages.PROJECT / "docs" / "benchmarks.md").read_text().split()) <= 2000


def _public(name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    """The public classes and functions of a module, and the methods of the classes."""
    for one in module.__all__:
        found = getattr(module, one)
        if inspect.ismodule(found) or not callable(found):
            continue
        yield f"{name}.{one}", found
        if inspect.isclass(found):
            own = [(key, value) for key, value in vars(found).items() if not key.startswith("_")]
            yield from ((f"{name}.{one}.{key}", value) for key, value in own if inspect.isfunction(value))


def test_the_keywords_of_public_calls_are_described() -> None:
    spaces = ("coordinators", "events", "maps", "providers", "sharding")
    found = []
    for name, module in (("sw", sw), *((name, getattr(sw, name)) for name in spaces)):
        for call, function in _public(name, module):
            try:
                parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
            except ValueError:  # a class without one
                continue
            text = function.__doc__ or ""
            names = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
            if len(parameters) > 2:
                found += [f"{call}: {one}=" for one in names if not re.search(rf"^\s+{one}:", text, re.M)]
    assert not found
