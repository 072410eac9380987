"""The examples of the documentation, run in order, each page in an empty directory.

* ``python`` fences share their names, from the first one of a page to the last.
* ``console`` fences: each ``$ stepwell …`` prints what stands below it, but for times and rates. A
  last line of ``...`` leaves the rest open.
* ``diff`` fences are python before and after; both sides run, each for itself, with ``folder`` as a
  place of their own.

Pages that import a framework are run by ``tests/frameworks``.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from command_line import run as run_command

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(python|console|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FRAMEWORK = re.compile(
    r"^[ +-]?(?:import|from) (?:torch|torchtitan|transformers|jax|flax|optax|equinox|orbax|lightning|keras|grain)\b",
    re.MULTILINE,
)


def examples(page: Path) -> list[tuple[str, str]]:
    """Language and text of what is run of a page."""
    return _FENCE.findall(page.read_text())


def needs_framework(page: Path) -> bool:
    """True if an example of the page imports torch, JAX or a library of theirs."""
    return any(_FRAMEWORK.search(text) for _, text in examples(page))


def name(page: Path) -> str:
    """A page's path in the project."""
    return str(page.relative_to(PROJECT))


def run_page(page: Path, folder: Path) -> int:
    """Runs a page's examples in ``folder``, which is the working directory. Returns how many
    commands were compared."""
    names: dict[str, Any] = {"__name__": "__main__"}
    compared = 0
    for number, (language, text) in enumerate(examples(page), 1):
        where = f"{page.name}, example {number}"
        if language == "python":
            exec(compile(text, where, "exec"), names)
        elif language == "diff":
            for side, other in ("-+", "+-"):
                own = folder / f"{number}{side}"
                own.mkdir()
                lines = [line[1:] for line in text.splitlines() if not line.startswith(other)]
                exec(compile("\n".join(lines), f"{where}, {side}", "exec"), {"folder": own})
        else:
            compared += _compare(text, folder)
    return compared


def _compare(text: str, folder: Path) -> int:
    commands = re.split(r"^\$ stepwell ", text, flags=re.MULTILINE)[1:]
    for example in commands:
        command, _, wanted = example.partition("\n")
        result = run_command(*shlex.split(command))
        assert result.exit_code in (0, 1), f"{command}\n{result.output}"
        expected, found = _steady(wanted, Path("/home/you")), _steady(result.stdout, folder)
        if expected[-1] == "...":
            expected, found = expected[:-1], found[: len(expected) - 1]
        assert found == expected, command
    return len(commands)


def _steady(text: str, home: Path) -> list[str]:
    """Lines without what differs from run to run: where it is, when it was, how long it took."""
    text = text.replace(str(home), "/home/you")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"[\d.e-]+ s after", "SOME s after", text)
    text = re.sub(r", [\d.]+ \w+/s$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(report.html) \([\d.]+ KiB\)", r"\1", text)
    return text.rstrip("\n").split("\n")
