"""``stepwell plan``: dry runs of a restore (reads, casts, left-out leaves) and of ``prune`` (kept
steps, with reasons)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from .._restore.plan import RestorePlan
from .._restore.report import RestoreReport
from ..errors import MismatchError
from .command import command
from .output import FINE, PROBLEMS, Output, safe
from .retention_options import NAMES, retention_of, retention_options
from .retention_plan import plan_lines, planned, summary
from .targets import Target, root_at, target

_CHOICES = {
    "unexpected": ("error", "ignore"),
    "resize": ("pad", "truncate", "both"),
}


@command("plan")
@click.argument("path", type=target)
@click.option(
    "--like", type=target, metavar="PATH", help="The state that is wanted: that of this checkpoint."
)
@click.option(
    "--include", multiple=True, metavar="GLOB", help="Stored leaves that are looked at. Repeatable."
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Stored leaves that are not. Repeatable.")
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    help="Stored paths to wanted ones; needs --like. Repeatable.",
)
@click.option(
    "--cast",
    multiple=True,
    metavar="[GLOB=]HOW",
    help="Allowed changes of dtype: exact, lossless (the default), lossy; for a glob also a dtype. Repeatable.",
)
@click.option(
    "--unexpected",
    type=click.Choice(_CHOICES["unexpected"]),
    help="What a stored leaf that is not wanted is.",
)
@click.option("--resize", type=click.Choice(_CHOICES["resize"]), help="Allowed changes of shape.")
@retention_options
def plan(out: Output, path: Target, like: Target | None, **options: Any) -> int:
    """Show what a restore of PATH (or ROOT@STEP) with these options would read and do. Reads no
    array.

    With options that say which steps stay (--keep-latest and its like), PATH is a root, and the
    plan is that of `stepwell prune`. Exits with 1 where a restore would refuse.
    """
    kept = {name: options.pop(name) for name in NAMES}
    retention = retention_of(kept)
    if retention is not None:
        if like is not None or any(options.values()) or path.step is not None:
            raise click.UsageError(
                "a plan is one of a restore, or one of a root's retention: leave the options of one of the two out"
            )
        return _of_retention(out, root_at(path.path), retention)
    keywords = _keywords(options)
    if keywords.get("rename") and like is None:
        raise click.UsageError(
            "--rename says which wanted leaves stored ones become: --like says what is wanted"
        )
    with path.open() as checkpoint:
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
    out.document({"restore": _document(found), "fits": True, "report": _report(found.report)})
    out.lines(safe(line) for line in str(found).split("\n"))
    return FINE


def _of_retention(out: Output, root: str, retention: Any) -> int:
    rows = planned(root, retention)
    out.document({"root": root, "decisions": rows})
    out.lines(plan_lines(out, rows))
    out.line("would be: " + summary(rows))
    return FINE


def _keywords(options: dict[str, Any]) -> dict[str, Any]:
    """The options as keywords of a restore."""
    keywords: dict[str, Any] = {
        name: options[name] for name in ("unexpected", "resize") if options[name] is not None
    }
    for name in ("include", "exclude"):
        if options[name]:
            keywords[name] = list(options[name])
    if options["rename"]:
        keywords["rename"] = [_pair(one, "--rename takes OLD=NEW") for one in options["rename"]]
    if casts := options["cast"]:
        whole = [one for one in casts if "=" not in one]
        if whole and len(casts) > 1:
            raise click.UsageError(
                "--cast HOW is said of all leaves, once; --cast GLOB=HOW of those that a glob matches"
            )
        keywords["cast"] = whole[0] if whole else dict(_pair(one, "") for one in casts)
    return keywords


def _pair(text: str, wanted: str) -> tuple[str, str]:
    left, equals, right = text.rpartition("=")
    if not (equals and left and right):
        raise click.UsageError(f"{wanted}, not {text!r}")
    return left, right


def _document(found: RestorePlan) -> dict[str, Any]:
    return {
        "path": found.path,
        "step": found.step,
        "bytes": found.nbytes,
        "read_bytes": found.read_bytes,
        "blocks": found.blocks,
        "reads": found.reads,
        "items": [
            {
                "name": item.name,
                "leaves": item.leaves,
                "bytes": item.nbytes,
                "read_bytes": item.read_bytes,
                "blocks": item.blocks,
                "reads": item.reads,
                "files": item.files,
            }
            for item in found.items.values()
        ],
    }


def _report(report: RestoreReport) -> dict[str, Any]:
    """A restore's report, every row with its parts by name."""

    def rows(found: Sequence[Sequence[Any]], *names: str) -> list[dict[str, Any]]:
        return [dict(zip(names, row, strict=True)) for row in found]

    return {
        "restored": report.restored,
        "kept": report.kept,
        "ignored": report.ignored,
        "left_out": report.left_out,
        "cast": rows(report.cast, "path", "stored", "wanted"),
        "resized": rows(report.resized, "path", "stored", "wanted"),
        "renamed": rows(report.renamed, "stored", "wanted"),
        "missing": rows(report.missing, "path", "why", "near"),
        "unexpected": rows(report.unexpected, "path", "wanted", "near"),
        "wrong_shape": rows(report.wrong_shape, "path", "stored", "wanted"),
        "wrong_dtype": rows(report.wrong_dtype, "path", "stored", "wanted", "why"),
        "wrong_kind": rows(report.wrong_kind, "path", "stored", "wanted"),
        "collisions": rows(report.collisions, "path", "stored"),
        "unmatched": rows(report.unmatched, "option", "pattern", "near", "fails"),
    }
