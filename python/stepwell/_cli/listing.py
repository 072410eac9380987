"""``stepwell ls``: the steps of a root, and the entries beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from . import leftovers
from .command import command
from .leftovers import Leftover, Leftovers
from .output import FINE, PROBLEMS, Output, columns, count, iso, local, metric, number, safe, size
from .targets import report_of, root_at

#: The most metrics and metadata keys in a step's line.
_SHOWN = 4


@command("ls")
@click.argument("root")
@click.option("-n", "--last", type=click.IntRange(min=1), metavar="N", help="The newest N steps only.")
def ls(out: Output, root: str, last: int | None) -> int:
    """The steps of ROOT: number, time, size, items, metrics; what is damaged, in flight, or set
    aside.

    Exits with 1 where a step is damaged, something has a step's name and is none, or there is no
    step.
    """
    path = root_at(root)
    rows = report_of(path)
    beside = leftovers.scan(path)
    steps = [row for row in rows if row["step"] is not None]
    quarantined = [row for row in rows if row["step"] is None]
    whole = [row["step"] for row in steps if row["damage"] is None]
    shown = steps if last is None else steps[-last:]
    if out.as_json:
        out.document(
            {
                "root": path,
                "latest_step": max(whole, default=None),
                "number_of_steps": len(steps),
                "bytes": sum(row["bytes"] for row in steps),
                "writer": beside.writer,
                "steps": [step_document(row) for row in shown],
                "quarantined": [{"name": row["name"], "reason": row["damage"]} for row in quarantined],
                **beside_document(beside),
            }
        )
    else:
        out.lines(_lines(out, path, steps, shown, quarantined, beside))
    return FINE if steps and len(whole) == len(steps) and not quarantined else PROBLEMS


def step_document(row: dict[str, Any]) -> dict[str, Any]:
    """A step of the engine's report, as JSON for others."""
    return {
        "step": row["step"],
        "name": row["name"],
        "started": iso(row["started_unix_ns"]),
        "committed": iso(row["committed_unix_ns"]),
        "bytes": row["bytes"],
        "items": row["items"],
        "dropped": row["dropped"],
        "metrics": {name: number(float(value)) for name, value in row["metrics"].items()},
        "metadata_keys": row["metadata_keys"],
        "damage": row["damage"],
    }


def beside_document(beside: Leftovers) -> dict[str, Any]:
    """The entries beside the steps, as JSON."""

    def plain(one: Leftover) -> dict[str, Any]:
        return {"name": one.name, "label": one.label, "bytes": one.nbytes}

    return {
        "temporaries": [{**plain(one), "live": one.live} for one in beside.temporaries],
        "trash": [{**plain(one), "read": one.live} for one in beside.trash],
        "set_aside": [plain(one) for one in beside.aside],
        "branches": [
            {"branch": branch, "steps": [plain(one) for one in steps]}
            for branch, steps in beside.branches.items()
        ],
    }


def _lines(
    out: Output,
    path: str,
    steps: list[dict[str, Any]],
    shown: list[dict[str, Any]],
    quarantined: list[dict[str, Any]],
    beside: Leftovers,
) -> Iterator[str]:
    total = size(sum(row["bytes"] for row in steps))
    held = {True: ", held by a writer", False: "", None: ", and nobody can tell whether a writer holds it"}
    yield f"{safe(path)}: {count(len(steps), 'step')}, {total}{held[beside.writer]}"
    if len(shown) < len(steps):
        yield out.dim(f"  the newest {len(shown)} of {len(steps)}:")
    table = [_cells(row) for row in shown]
    if table:
        heads = ("step", "committed", "size", "items", "metrics", "metadata")
        lines = columns([heads, *table], "rlrlll")
        yield out.dim("  " + lines[0])
        for line, row in zip(lines[1:], shown, strict=True):
            yield "  " + line
            if row["damage"] is not None:
                yield "    " + out.bad("damaged: ") + safe(row["damage"])
    for row in quarantined:
        yield f"  {out.bad('no step:')} {safe(row['name'])}: {safe(row['damage'])}"
    state = {True: "in flight", False: "dead; gc deletes it", None: "nobody can tell whether its owner lives"}
    for one in beside.temporaries:
        yield f"  temporary: {safe(one.name)} ({size(one.nbytes)}, {state[one.live]})"
    for one in beside.trash:
        read = "a reader has it; gc deletes it later" if one.live else "retired; gc deletes it"
        yield f"  trash: {safe(one.name)} ({size(one.nbytes)}, {read})"
    for one in beside.aside:
        yield f"  set aside: {safe(one.name)} ({size(one.nbytes)}): it stood where a step was saved"
    for branch, of_branch in beside.branches.items():
        names = ", ".join(safe(one.label) for one in of_branch)
        nbytes = size(sum(one.nbytes for one in of_branch))
        yield f"  branch {safe(branch)}: {names} ({nbytes}, kept by a rewind)"


def _cells(row: dict[str, Any]) -> list[str]:
    items = [safe(item["name"]) for item in row["items"]]
    items += [f"-{safe(item)}" for item in row["dropped"]]
    metrics = [f"{safe(name)}={metric(float(value))}" for name, value in row["metrics"].items()]
    return [
        str(row["step"]),
        local(row["committed_unix_ns"]),
        size(row["bytes"]),
        " ".join(items),
        _few(metrics),
        _few([safe(key) for key in row["metadata_keys"]]),
    ]


def _few(texts: list[str]) -> str:
    rest = f" … {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return " ".join(texts[:_SHOWN]) + rest
