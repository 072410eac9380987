"""``stepwell plan``: the dry run of a restore: reads, casts, leaves that are left out."""

from __future__ import annotations

from typing import Any

import click

import stepwell as sw

from ..errors import MismatchError
from .command import command
from .output import FINE, PROBLEMS, Output, safe
from .pairs import casts, pair
from .targets import MAPPED, TARGET, Target

#: The parts of a report that are no figure and no text.
_PARTS = (
    "restored",
    "kept",
    "ignored",
    "left_out",
    "cast",
    "resized",
    "renamed",
    "missing",
    "unexpected",
    "wrong_shape",
    "wrong_dtype",
    "wrong_kind",
    "collisions",
    "unmatched",
)


@command("plan")
@click.argument("path", type=TARGET)
@MAPPED
@click.option("--like", type=TARGET, metavar="PATH", help="Restore into the structure of this checkpoint.")
@click.option("--include", multiple=True, metavar="GLOB", help="Restore only these leaves. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Restore all but these leaves. Repeatable.")
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    help="Map stored paths to wanted ones; needs --like. Repeatable.",
)
@click.option(
    "--cast",
    multiple=True,
    metavar="[GLOB=]HOW",
    help="Allow changes of dtype: exact, lossless (default), lossy; for a glob also a dtype. Repeatable.",
)
@click.option(
    "--unexpected",
    type=click.Choice(["error", "ignore"]),
    help="Refuse stored leaves that are not wanted (default), or ignore them.",
)
@click.option("--resize", type=click.Choice(["pad", "truncate", "both"]), help="Allow changes of shape.")
def plan(out: Output, path: Target, map: sw.maps.Map | None, like: Target | None, **options: object) -> int:
    """Show what a restore of PATH (or ROOT@STEP) with these options would read and do. Reads no
    array.

    Exits with 1 if a restore would refuse. The dry run of retention is `stepwell prune --dry-run`.
    """
    # RestoreKeywords has their types. click has checked them.
    keywords: Any = {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items() if value
    }
    if "rename" in keywords:
        if like is None:
            raise click.UsageError("--rename needs --like, which says what is wanted")
        keywords["rename"] = [pair(one, "--rename takes OLD=NEW") for one in keywords["rename"]]
    if "cast" in keywords:
        keywords["cast"] = casts(keywords["cast"], "HOW")
    with path.open(map) as checkpoint:
        if like is not None:
            with like.open() as other:
                keywords["like"] = other.metadata().tree
        try:
            found = checkpoint.plan(**keywords)
        except MismatchError as error:
            if error.report is None:
                raise
            out.document({"restore": None, "fits": False, "report": _report(error.report)})
            out.lines(safe(line) for line in str(error).split("\n"))
            return PROBLEMS
    restore: dict[str, object] = {
        key: getattr(found, key) for key in ("path", "step", "read_bytes", "blocks", "reads")
    }
    restore.update(bytes=found.nbytes, items=list(found.items.values()))
    out.document({"restore": restore, "fits": True, "report": _report(found.report)})
    out.lines(safe(line) for line in str(found).split("\n"))
    return FINE


def _report(report: sw.RestoreReport) -> dict[str, object]:
    """A restore's report."""
    return {name: getattr(report, name) for name in _PARTS}
