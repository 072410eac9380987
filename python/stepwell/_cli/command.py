"""The common part of all commands: ``--json``, ``--traceback``, ``--yes``, and errors as one
sentence and an exit code."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TextIO, TypeVar

import click

from ..errors import MisuseError, StepwellError
from .output import FINE, INTERRUPTED, MISUSE, PROBLEMS, Output, safe

_Function = TypeVar("_Function", bound=Callable[..., object])


def command(name: str, of: str = "") -> Callable[[Callable[..., int]], click.Command]:
    """Makes a command of a function that takes an :class:`Output` and the options, and returns the
    exit code. ``of`` is the command that it is a part of."""

    def made(function: Callable[..., int]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, traceback: bool, **arguments: object) -> NoReturn:
            out = Output(f"{of} {name}".strip(), as_json)
            _print_warnings()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("always", UserWarning)
                    warnings.showwarning = _print_warning
                    code = function(out, **arguments)
                sys.stdout.flush()
            except BrokenPipeError:
                # The reader of the output has closed it (`| head`).
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = FINE
            except (KeyboardInterrupt, click.Abort):
                out.note("interrupted")
                code = INTERRUPTED
            except click.ClickException:
                raise
            except Exception as error:
                if traceback:
                    raise
                code = _report(out, error)
            raise SystemExit(code)

        run = click.option("--traceback", is_flag=True, help="Show the origin of an error.")(run)
        run = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(run)
        return click.command(name)(run)

    return made


def changing(function: _Function) -> _Function:
    """Gives a command ``--yes`` and ``--dry-run``."""
    dry = click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
    return dry(click.option("-y", "--yes", is_flag=True, help="Do not ask.")(function))


def is_interactive() -> bool:
    """True if somebody can answer a question."""
    return sys.stdin.isatty()


def check_can_ask(out: Output, yes: bool, dry_run: bool) -> None:
    """Refuses to change anything where nobody can be asked."""
    if not (yes or dry_run or is_interactive()):
        raise click.UsageError(
            f"{out.command} asks first, and standard input is no terminal: pass --yes, or --dry-run"
        )


def agreed(out: Output, yes: bool, question: str) -> bool:
    """True if the user agrees."""
    if yes or click.confirm(f"{question}. Continue?", err=True):
        return True
    out.note("nothing was changed")
    return False


def _report(out: Output, error: Exception) -> int:
    """Prints an error: a sentence on standard error; with ``--json`` also a document."""
    known = isinstance(error, (StepwellError, OSError))
    text = " ".join(str(error).split("\n")) if isinstance(error, StepwellError) else str(error)
    text = _in_options(text)
    if not known:
        text = f"{type(error).__name__}: {text} (a bug in stepwell, or a fault of this machine: --traceback shows where)"
    out.note(f"stepwell {out.command}: {safe(text)}")
    kind = error.kind if isinstance(error, StepwellError) else "io" if known else "internal"
    found = {name: getattr(error, name, None) for name in ("leaf", "file", "block")}
    out.document({"error": {"kind": kind, "message": text, **found}})
    return MISUSE if isinstance(error, MisuseError) else PROBLEMS


def _in_options(text: str) -> str:
    """Returns a message with keywords as the options of the command: ``include=`` is
    ``--include``, and ``objects="skip"`` is ``--objects skip``."""
    context = click.get_current_context(silent=True)
    if context is None:
        return text
    options = [name for one in context.command.params for name in one.opts if name.startswith("--")]
    by_keyword = {name[2:].replace("-", "_"): name for name in options}
    if "param" in by_keyword:
        # Numbers of a map.
        text = re.sub(r"(?<![\w/.-])([A-Za-z_]\w*=(?:N|0|1))(?=[\s,.;:)]|$)", r"--param \1", text)
    keyword = rf"(?<![\w/.-])({'|'.join(by_keyword)})=(?:\"([^\"]*)\"|(?=[\s,.;:)]|$))"
    return re.sub(keyword, lambda found: " ".join(filter(None, (by_keyword[found[1]], found[2]))), text)


class _Warnings(logging.Handler):
    """Prints the engine's warnings on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"warning: {safe(record.getMessage())}", err=True)


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning of Python, such as that of a map, on standard error."""
    click.echo(f"warning: {safe(str(message))}", err=True)


def _print_warnings() -> None:
    logger = logging.getLogger("stepwell")
    logger.propagate = False
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))
