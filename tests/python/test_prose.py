"""The lint of prose (tests/lint/prose.py) finds each kind of line, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lint"))

import prose


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("a.rs", "/// What it holds.\n", [(1, "inverted")]),
        ("a.rs", "/// Returns it. Whoever calls it waits.\n", [(1, "inverted"), (1, "private")]),
        ("a.rs", f"// {'x' * 100}\n", [(1, "long line")]),
        ("a.rs", "/// Does so\n/// what it can.\n", []),
        ("a.rs", "/// ```\n/// What\n/// ```\nlet s = 1; // What\n", []),
        ("a.py", '"""Where it is."""\n', [(1, "inverted")]),
        ("a.py", 'def f():\n    """Returns it.\n\n    Of the others, none.\n    """\n', [(4, "inverted")]),
        ("a.py", "x = 'What it is for ever.'\n", []),
        ("a.py", f"x = 1  # type: ignore[{'a' * 100}]\n", []),
        ("a.md", f"It is {'very ' * 40}long.\n", [(1, "long sentence")]),
        ("a.md", "| What | it |\n\n```\nWhat\n```\n\nWhat is it?\n", []),
    ],
)
def test_each_rule_finds_its_lines(path: str, text: str, expected: list[tuple[int, str]]) -> None:
    assert [(number, rule) for number, rule, _ in prose.findings(path, text)[1]] == expected


def test_long_names_of_tests_are_counted() -> None:
    name = "test_" + "x" * 60
    assert prose.long_names("a.py", f"def {name}():\n    pass\n") == [name]
    assert prose.long_names("a.rs", f"#[test]\nfn {name}() {{}}\n#[test]\nfn short() {{}}\n") == [name]
