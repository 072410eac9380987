"""The data of the HTML report as one JSON value, with columns for long tables. Names are escaped
here for display; the page inserts them as text, never as markup."""

from __future__ import annotations

import json
import math

import stepwell as sw

from .leftovers import scan
from .output import Json, fields_of, plain, safe
from .retention import decisions, summary
from .show import head_of
from .targets import manager_of

#: Points of the chart of intervals.
_CURVE_POINTS = 120


def of_root(root: str, retention: sw.Retention | None, rule: str) -> dict[str, Json]:
    """A root: its steps, and what retention would do. ``rule`` is the retention in words."""
    with manager_of(root, retention) as manager:
        rows = manager.inspect()
        fates = {} if retention is None else {row.step: row for row in decisions(manager)}
    steps = []
    for row in rows:
        if row.step is None:
            continue
        fate = fates.get(row.step)
        decision, kept = ("", ()) if fate is None else (fate.decision, fate.items)
        why = None if fate is None else "; ".join(fate.reasons)
        steps.append({**fields_of(row), "decision": decision or None, "kept": kept, "why": why})
    return _displayed(
        {
            "steps": steps,
            "quarantined": [{"name": row.name, "reason": row.damage} for row in rows if row.step is None],
            **scan(root).document(),
            "retention": None if retention is None else rule,
            "retention_summary": summary(list(fates.values())),
            "advice": None,
        }
    )


def of_advice(advice: sw.results.Advice) -> Json:
    """Advice, with the lost shares of intervals around the best one and the present one."""
    intervals = [advice.interval_seconds, advice.measured.interval_seconds or advice.interval_seconds]
    low, high = math.log(min(intervals) / 10), math.log(max(intervals) * 10)
    curve = [math.exp(low + (high - low) * i / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)]
    return plain({**fields_of(advice), "curve": [(one, advice.lost_at(one)) for one in curve]})


def of_checkpoint(checkpoint: sw.Checkpoint) -> dict[str, Json]:
    """A checkpoint: its leaves, the places of their chunks, and the containers around them."""
    nodes = checkpoint.contents()
    head = head_of(checkpoint, nodes)
    metadata = head["custom_metadata"]
    leaves = sorted((node for node in nodes if node.leaf is not None), key=lambda node: node.leaf or 0)
    dtypes = sorted({leaf.dtype for leaf in leaves if leaf.dtype is not None})
    leaf_of = {leaf.path: number for number, leaf in enumerate(leaves)}
    item_of = {item["name"]: number for number, item in enumerate(head["items"])}
    dir_of = {item["dir"]: item["name"] for item in head["items"]}
    file_of = {file["path"]: number for number, file in enumerate(head["files"])}
    placed = [(number, chunk) for number, leaf in enumerate(leaves) for chunk in leaf.chunks]
    text = None if metadata is None else json.dumps(metadata, indent=1, ensure_ascii=False)
    return _displayed(
        {
            **head,
            "custom_metadata": text,
            "dtypes": dtypes,
            "files": [
                {**file, "item": dir_of.get(file["path"].split("/", 1)[0], "")} for file in head["files"]
            ],
            "leaf": {
                "path": [leaf.path for leaf in leaves],
                "dtype": [-1 if leaf.dtype is None else dtypes.index(leaf.dtype) for leaf in leaves],
                "shape": [None if leaf.shape is None else list(leaf.shape) for leaf in leaves],
                "bytes": [leaf.nbytes for leaf in leaves],
                "stored": [leaf.stored_bytes for leaf in leaves],
                "tied": [-1 if leaf.tied_to is None else leaf_of[leaf.tied_to] for leaf in leaves],
                "item": [item_of.get(leaf.item or "", 0) for leaf in leaves],
                "chunks": [len(leaf.chunks) for leaf in leaves],
            },
            "node": {
                "parent": [node.parent for node in nodes],
                "name": [node.name for node in nodes],
                "kind": ["" if node.leaf is not None else node.kind for node in nodes],
                "leaf": [-1 if node.leaf is None else node.leaf for node in nodes],
            },
            "chunk": {
                "leaf": [number for number, _ in placed],
                "file": [file_of.get(chunk.file or "", -1) for _, chunk in placed],
                "offset": [chunk.offset for _, chunk in placed],
                "bytes": [chunk.nbytes for _, chunk in placed],
            },
        }
    )


def _displayed(data: dict[str, object]) -> dict[str, Json]:
    return {key: _shown(plain(value)) for key, value in data.items()}


def _shown(value: Json) -> Json:
    """Returns a value with control characters escaped. Line breaks stay."""
    if isinstance(value, str):
        return value if value.isprintable() else "\n".join(safe(line) for line in value.split("\n"))
    if isinstance(value, dict):
        return {str(_shown(key)): _shown(one) for key, one in value.items()}
    return [_shown(one) for one in value] if isinstance(value, list) else value
