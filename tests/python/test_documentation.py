"""The Python examples of the documentation run as they stand there, in order, each file in an empty directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [PROJECT / "README.md", PROJECT / "docs" / "guide.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_the_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = FENCE.findall(page.read_text())
    assert examples, f"{page} has no examples"
    names: dict[str, object] = {"__name__": "__main__"}
    for number, example in enumerate(examples, 1):
        exec(compile(example, f"{page.name}, example {number}", "exec"), names)


@pytest.mark.parametrize(
    "page",
    sorted([PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *PROJECT.glob("docs/**/*.md")]),
    ids=lambda p: p.name,
)
def test_the_links_of_the_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
