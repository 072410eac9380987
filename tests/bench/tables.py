"""How figures are shown: tables, ratios within rounds, and whether a target is reached."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence


def table(rows: list[list[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def progress(what: str, seconds: float) -> None:
    """Prints one figure at once, to the error stream: a whole table takes many minutes."""
    print(f"{what}: {seconds:.2f} s", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> str:
    """Median and quartiles; the median alone where there are fewer than three."""
    if not values:
        return ""
    if len(values) < 3:
        return f"{statistics.median(values):.2f}"
    low, middle, high = statistics.quantiles(sorted(values), n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def verdict(measured: float | None, limit: float | None, *, at_least: bool = False) -> str:
    """Compares a figure with its target, which is a maximum or a minimum. Both have two places."""
    if measured is None or limit is None:
        return ""
    shown = round(measured, 2)
    return "reached" if (shown >= limit if at_least else shown <= limit) else "MISSED"
