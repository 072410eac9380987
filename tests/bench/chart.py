"""Draws docs/_static/benchmarks.svg from the first table of docs/benchmarks.md.

    python tests/bench/chart.py

Run it after you change the figures of that table.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, CHART = DOCS / "benchmarks.md", DOCS / "_static" / "benchmarks.svg"
PANELS = ["blocked", "durable", "restore, cold"]
TITLES = ["training is blocked", "step is durable", "restore, cold"]
WIDTH, LABELS, BAR, ROW, TOP = 860, 190, 13, 22, 56
OURS, PEER, DISK = "#0b5c8a", "#9aa7b0", "#d0a050"


def first_table(page: str) -> tuple[str, dict[str, dict[str, float | None]]]:
    """Returns the title of the page's first table, and its values by row and column (``None`` for
    an empty cell)."""
    lines = page.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip(" *") for cell in line.strip("|").split("|")])
    (title, *columns), _, *rows = cells
    values = {
        row[0]: {c: float(v) if v else None for c, v in zip(columns, row[1:], strict=True)} for row in rows
    }
    return title, values


def chart(title: str, values: dict[str, dict[str, float | None]]) -> str:
    """Returns the picture as SVG: a panel for each column of ``PANELS``, a bar for each row."""
    panel = (WIDTH - LABELS) // len(PANELS)
    height = TOP + ROW * len(values) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-weight="bold">{escape(title)}: seconds, shorter is better</text>',
    ]
    for number, (column, heading) in enumerate(zip(PANELS, TITLES, strict=True)):
        left = LABELS + number * panel
        parts.append(f'<text x="{left}" y="42" font-weight="bold">{heading}</text>')
        scale = (panel - 60) / max(row[column] or 0.0 for row in values.values())
        for place, (name, row) in enumerate(values.items()):
            seconds, top = row[column], TOP + place * ROW
            if seconds is None:
                continue
            colour = OURS if name.startswith("stepwell") else DISK if name == "raw disk" else PEER
            width = max(1.0, seconds * scale)
            parts.append(f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{left + width + 4:.1f}" y="{top + 11}">{seconds:.2f}</text>')
    for place, name in enumerate(values):
        bold = ' font-weight="bold"' if name.startswith("stepwell") else ""
        parts.append(f'<text x="8" y="{TOP + place * ROW + 11}"{bold}>{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    CHART.write_text(chart(*first_table(PAGE.read_text())))
    print(CHART)
