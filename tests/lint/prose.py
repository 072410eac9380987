"""Checks the prose of this repository: comments and docstrings of .rs and .py files, and .md pages.

    python tests/lint/prose.py             # the figures, and an error if one is above its limit
    python tests/lint/prose.py --list      # the lines, each with the rule that it breaks

Part of ``make lint``. It checks only what a program can: see CONTRIBUTING.md for the rules.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

#: The most lines per thousand lines of prose that may break a rule.
LIMITS = {"inverted": 3.0, "private": 2.0, "long line": 0.0, "long sentence": 3.0}
#: Places that may break a rule, each with its reason: (file, rule).
EXCEPTIONS = {
    ("tests/lint/prose.py", "private"): "names the words",
}
#: The longest line of a comment, and the longest sentence.
COLUMNS, WORDS = 100, 32
#: The longest name of a test.
NAME = 60

#: Openings of an inverted sentence.
_INVERTED = re.compile(
    r"^(Who|Whose|Whom|What|Whatever|Whoever|Whichever|Of which|Of what|Of a|Of the|Where|Wherever|Whether|"
    r"That which|Nothing of|Nothing but|No more|Not but|By which|To whom|From whom)\b(?![^.]*\?)"
)
#: Words that other projects do not use.
_PRIVATE = re.compile(
    r"\b(whereof|thereof|therein|wherein|hereby|thereby|anew|for ever|aforesaid|usurper|forestall\w*|nought|"
    r"whither|hither|lest|albeit|shall|stands? (?:in|on|at|under|there|beside)|lies? (?:in|on|at|beside|behind)|"
    r"is no (?:step|more|checkpoint|value|file|tensor|directory|name)|there is none|makes? up for|patience|"
    r"whoever|be it)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\[(*])")
_QUOTED = re.compile(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)|<[^>]*>|https?://\S+")
_PRAGMA = re.compile(r"(type: ignore|noqa|fmt: (?:off|on|skip))")
_RUST = re.compile(r"(?://[/!]?|\*)\s?(.*)")
_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
_RUST_TEST = re.compile(r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*(?:pub )?fn (\w+)")


def prose_of_markdown(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields number, line and prose. Code, tables and headings are left out."""
    fenced = False
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if line.startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and line and not line.startswith(("|", "#", "<", "{", ":::")):
            yield number, "", re.sub(r"^([-*>]|\d+\.)\s+", "", line)


def prose_of_rust(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yields number, line and prose of comments. Code and drawings in them are left out."""
    fenced = False
    for number, raw in enumerate(lines, 1):
        found = _RUST.match(raw.strip())
        if found is None:
            continue
        if found[1].startswith("```"):
            fenced = not fenced
        elif not fenced and not re.match(r"[|├│┌└─▶◀ ]", found[1]):
            yield number, raw, found[1]


def prose_of_python(lines: list[str], text: str) -> Iterator[tuple[int, str, str]]:
    """Yields number, line and prose of comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {
        token.start[0]: token.string.lstrip("#: ")
        for token in tokens
        if token.type == tokenize.COMMENT and not _PRAGMA.search(token.string)
    }
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            if not isinstance(statement, ast.Expr) or not isinstance(value, ast.Constant):
                continue
            if isinstance(value.value, str) and statement.end_lineno is not None:
                for number in range(statement.lineno, statement.end_lineno + 1):
                    line = lines[number - 1].strip().removeprefix("r").strip('"')
                    found[number] = "" if line.startswith((">>>", "|")) else line
    for number in sorted(found):
        yield number, lines[number - 1], found[number]


def prose(path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yields number, line (empty if its length does not matter) and prose of a file."""
    lines = text.split("\n")
    if path.endswith(".md"):
        yield from prose_of_markdown(lines)
    elif path.endswith(".rs"):
        yield from prose_of_rust(lines)
    else:
        yield from prose_of_python(lines, text)


def findings(path: str, text: str) -> tuple[int, list[tuple[int, str, str]]]:
    """Returns the number of prose lines, and each broken rule: line number, rule, prose."""
    count, found, opens = 0, [], True
    for number, raw, line in prose(path, text):
        count += 1
        plain = _QUOTED.sub(lambda match: match[1] or "x", line)
        rules = set()
        for place, part in enumerate(_SENTENCE.split(plain)):
            if (place or opens) and _INVERTED.match(part.strip("* ")):
                rules.add("inverted")
            if len(part.split()) > WORDS:
                rules.add("long sentence")
        if _PRIVATE.search(plain):
            rules.add("private")
        if len(raw.rstrip()) > COLUMNS:
            rules.add("long line")
        opens = not plain.strip() or plain.rstrip().endswith((".", ":", "!", "?", "|"))
        found += [(number, rule, line) for rule in sorted(rules) if (path, rule) not in EXCEPTIONS]
    return count, found


def long_names(path: str, text: str) -> list[str]:
    """Returns the names of tests that are too long."""
    pattern = _RUST_TEST if path.endswith(".rs") else _TEST
    return [name for name in pattern.findall(text) if len(name) > NAME]


def main(arguments: list[str]) -> int:
    """Prints the figures or the lines. Returns 1 if a figure is above its limit."""
    listed = subprocess.run(
        ["git", "ls-files", "*.rs", "*.py", "*.md"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    lines, names, totals = 0, 0, dict.fromkeys(LIMITS, 0)
    for path in listed.stdout.split():
        file = PROJECT / path
        if not file.is_file():
            continue
        text = file.read_text()
        count, found = findings(path, text)
        lines += count
        names += len(long_names(path, text))
        for number, rule, line in found:
            totals[rule] += 1
            if "--list" in arguments:
                print(f"{path}:{number}: {rule}: {line[:150]}")
    failed = False
    for rule, total in totals.items():
        share = 1000 * total / max(lines, 1)
        failed |= share > LIMITS[rule]
        print(f"{rule:14} {total:5} of {lines} lines: {share:.2f} per thousand, at most {LIMITS[rule]}")
    failed |= names > 0
    print(f"test names over {NAME} characters: {names}, at most 0")
    if failed:
        print("prose: a figure is above its limit; --list names the lines")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
