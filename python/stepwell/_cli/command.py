"""The common part of all commands: ``--json``, ``--traceback``, and errors as one sentence and an
exit code."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from ..errors import MisuseError, StepwellError
from .output import FINE, INTERRUPTED, MISUSE, PROBLEMS, Output, safe


def command(name: str) -> Callable[[Callable[..., int]], click.Command]:
    """Makes a command of a function that takes an :class:`Output` and the options, and gives the
    exit code."""

    def made(function: Callable[..., int]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, traceback: bool, **arguments: Any) -> NoReturn:
            out = Output(name, as_json)
            _listen_to_the_engine()
            try:
                code = function(out, **arguments)
                sys.stdout.flush()
            except BrokenPipeError:
                _leave_quietly()
            except KeyboardInterrupt:
                out.note("interrupted")
                code = INTERRUPTED
            except click.ClickException:
                raise
            except Exception as error:
                if traceback:
                    raise
                code = _tell(out, error)
            raise SystemExit(code)

        run = click.option("--traceback", is_flag=True, help="Show where an error comes from.")(run)
        run = click.option(
            "--json", "as_json", is_flag=True, help="One JSON document on standard output, and nothing else."
        )(run)
        return click.command(name)(run)

    return made


def _tell(out: Output, error: Exception) -> int:
    """One sentence on standard error; with ``--json`` the same as a document."""
    known = isinstance(error, (StepwellError, OSError))
    text = " ".join(str(error).split("\n")) if isinstance(error, StepwellError) else str(error)
    if not known:
        text = f"{type(error).__name__}: {text} (a defect of stepwell, or of this machine: --traceback shows where)"
    out.note(f"stepwell {out.command}: {safe(text)}")
    kind = error.kind if isinstance(error, StepwellError) else "io" if known else "internal"
    found = {name: getattr(error, name, None) for name in ("leaf", "file", "block")}
    out.document({"error": {"kind": kind, "message": text, **found}})
    return MISUSE if isinstance(error, MisuseError) else PROBLEMS


def _leave_quietly() -> NoReturn:
    """Ends quietly after the reader of the output has closed it (``| head``), also at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(FINE)


class _Warnings(logging.Handler):
    """Prints the engine's log as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"warning: {safe(record.getMessage())}", err=True)


def _listen_to_the_engine() -> None:
    logger = logging.getLogger("stepwell")
    logger.propagate = False
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))
