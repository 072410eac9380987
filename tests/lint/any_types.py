"""Counts the lines of the package that use ``Any``, which switches type checks off.

    python tests/lint/any_types.py             # the figure, and an error if it is above the limit,
                                               # or a line has no reason
    python tests/lint/any_types.py --list      # the lines

Part of ``make lint``. Each line has its reason in a comment, in that line or the one above. Use
``object`` for a value that is only handed on, a type variable for one that comes back, and a type
alias with a reason for values without a type of their own.
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "stepwell"

#: The most lines with ``Any``. It may only fall.
LIMIT = 55


def lines_with_any(source: str) -> Iterator[int]:
    """Yields the numbers of the lines of code that use ``Any``, without imports."""
    seen = 0
    #: The first word of a statement, which may have several lines.
    first = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        number = token.start[0]
        if token.type == tokenize.NEWLINE:
            first = ""
        elif token.type == tokenize.NAME:
            first = first or token.string
            if token.string == "Any" and number != seen and first not in ("from", "import"):
                seen = number
                yield number


def found() -> list[tuple[Path, int]]:
    """Returns file and number of each line."""
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyi"))
    return [(path, number) for path in files for number in lines_with_any(path.read_text(encoding="utf-8"))]


def unexplained() -> list[tuple[Path, int]]:
    """Returns file and number of each line without a comment in it or directly above it."""
    missing = []
    for path, number in found():
        above, line = ["", *path.read_text(encoding="utf-8").splitlines()][number - 1 : number + 1]
        if "  # " not in line and not above.lstrip().startswith("#"):
            missing.append((path, number))
    return missing


def main() -> int:
    """Prints the figure, and the lines without a reason."""
    lines = found()
    bare = unexplained()
    for path, number in bare:
        print(f"{path.relative_to(PACKAGE.parents[1])}:{number}: Any without a reason")
    if "--list" in sys.argv:
        for path, number in lines:
            text = path.read_text(encoding="utf-8").splitlines()[number - 1].strip()
            print(f"{path.relative_to(PACKAGE.parents[1])}:{number}: {text}")
    print(f"lines with Any: {len(lines)} (at most {LIMIT})")
    return int(len(lines) > LIMIT or bool(bare))


if __name__ == "__main__":
    sys.exit(main())
