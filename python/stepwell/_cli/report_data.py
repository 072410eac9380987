"""The data of the HTML report, as one JSON value, with columns for long tables. Names are escaped
here for display; the page inserts them as text, never as markup."""

from __future__ import annotations

import json
from typing import Any

from .._paths import extend
from .._retention import Retention
from .leftovers import scan
from .listing import beside_document, step_document
from .output import safe
from .retention_plan import decisions, manager_of, summary
from .targets import report_of
from .tree import Tree


def of_root(root: str, retention: Retention | None, told: str) -> dict[str, Any]:
    """A root: its steps, and what retention would do; ``told`` says that rule in words."""
    rows = report_of(root)
    fates: dict[int, dict[str, Any]] = {}
    if retention is not None:
        with manager_of(root, retention, read_only=True) as manager:
            fates = {row["step"]: row for row in decisions(manager.plan_retention(), rows)}
    steps = []
    for row in rows:
        if row["step"] is None:
            continue
        fate = fates.get(row["step"])
        steps.append(
            {
                **step_document(row),
                "decision": None if fate is None else fate["decision"],
                "kept": [] if fate is None else fate["items"],
                "why": None if fate is None else "; ".join(fate["reasons"]),
            }
        )
    found: dict[str, Any] = _shown(
        {
            "steps": steps,
            "quarantined": [
                {"name": row["name"], "reason": row["damage"]} for row in rows if row["step"] is None
            ],
            **beside_document(scan(root)),
            "retention": None if retention is None else told,
            "retention_summary": summary(list(fates.values())),
        }
    )
    return found


def of_checkpoint(tree: Tree) -> dict[str, Any]:
    """A checkpoint: its leaves, where their chunks lie, and the containers around them."""
    head = tree.head()
    metadata = head.pop("custom_metadata")
    dtypes = sorted({leaf.dtype for leaf in tree.leaves if leaf.dtype is not None})
    number_of = {dtype: number for number, dtype in enumerate(dtypes)}
    leaf_of = {leaf.path: number for number, leaf in enumerate(tree.leaves)}
    dir_of = {item["dir"]: item["name"] for item in head["items"]}
    structure = tree.structure
    placed = [(number, chunk) for number, leaf in enumerate(tree.leaves) for chunk in leaf.chunks]
    text = None if metadata is None else json.dumps(metadata, indent=1, ensure_ascii=False)
    found: dict[str, Any] = _shown(
        {
            **head,
            "custom_metadata": None if text is None else "\n".join(safe(line) for line in text.split("\n")),
            "dtypes": dtypes,
            "files": [
                {**file, "item": dir_of.get(file["path"].split("/", 1)[0], "")} for file in head["files"]
            ],
            "leaf": {
                "path": [leaf.path for leaf in tree.leaves],
                "dtype": [-1 if leaf.dtype is None else number_of[leaf.dtype] for leaf in tree.leaves],
                "shape": [None if leaf.shape is None else list(leaf.shape) for leaf in tree.leaves],
                "bytes": [leaf.nbytes for leaf in tree.leaves],
                "stored": [leaf.stored_bytes for leaf in tree.leaves],
                "tied": [-1 if leaf.tied_to is None else leaf_of[leaf.tied_to] for leaf in tree.leaves],
                "item": [leaf.item for leaf in tree.leaves],
                "chunks": [len(leaf.chunks) for leaf in tree.leaves],
            },
            "node": {
                "parent": [parent for parent, _, _ in structure.nodes],
                "name": [
                    "" if component is None else extend("", component) for _, component, _ in structure.nodes
                ],
                "kind": [tree.container(node) for node in range(len(structure.nodes))],
                "leaf": [kind if isinstance(kind, int) else -1 for _, _, kind in structure.nodes],
            },
            "chunk": {
                "leaf": [number for number, _ in placed],
                "file": [-1 if chunk.file is None else chunk.file for _, chunk in placed],
                "offset": [chunk.offset for _, chunk in placed],
                "bytes": [chunk.nbytes for _, chunk in placed],
            },
        }
    )
    return found


def _shown(value: Any) -> Any:
    """A value with every text in it fit to be shown: line breaks stay, other control characters are
    escaped."""
    if isinstance(value, str):
        return value if value.isprintable() else "\n".join(safe(line) for line in value.split("\n"))
    if isinstance(value, dict):
        return {_shown(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return value
