"""Draws docs/_static/terminal.svg: four commands on a root that this script makes, and what they
print.

    python docs/pictures/terminal.py

A test compares the picture with what the commands print now, except for times and rates.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import numpy as np
import stepwell as sw

PICTURE = Path(__file__).resolve().parents[1] / "_static" / "terminal.svg"
COMMANDS = [
    "ls runs/demo",
    "show runs/demo@400",
    "verify runs/demo",
    "diff runs/demo@300 runs/demo@400",
]
LOSSES = (2.1, 1.2, 1.4, 1.3, 1.25)
#: Pixels: of a character, a line, the margin, and the title bar.
CHARACTER, LINE, MARGIN, TOP = 7.85, 18, 18, 34

_ESCAPE = re.compile(r"\x1b\[([\d;]*)m")
#: Times and rates, which differ from run to run.
_CHANGING = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[\d.e-]+ s after|[\d.]+ \w+/s|(?:width|viewBox)=\"[^\"]*\""
)


def make(folder: Path) -> None:
    """Makes the root."""
    rng = np.random.default_rng(0)
    embed = rng.standard_normal((4096, 256), dtype=np.float32)
    state = {
        "params": {"embed": embed, "head": embed[:512].copy()},
        "optimizer": {"m": np.zeros_like(embed), "count": 0},
    }
    retention = sw.keep_latest(2) | sw.keep_best(1, "loss", "min")
    with sw.CheckpointManager(folder / "runs" / "demo", retention=retention) as mgr:
        for number, loss in enumerate(LOSSES):
            state["params"]["head"] += 0.01
            state["optimizer"]["count"] = 100 * number
            mgr.save(100 * number, state, metrics={"loss": loss}).result()


def printed(command: str, folder: Path) -> str:
    """Returns the output of a command to a terminal."""
    reader, writer = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [sys.executable, "-m", "stepwell", *command.split()],
        cwd=folder,
        stdout=writer,
        stderr=subprocess.DEVNULL,
        env=environment | {"TERM": "xterm-256color", "COLUMNS": "100", "TZ": "UTC"},
    ):
        os.close(writer)
        parts = []
        try:
            while part := os.read(reader, 1 << 16):
                parts.append(part)
        except OSError:  # the other end is closed
            pass
        os.close(reader)
    text = b"".join(parts).decode().replace("\r\n", "\n").replace(str(folder), "/home/you")
    return text.rstrip("\n")


def steady(text: str) -> str:
    """A picture without times and rates."""
    return _CHANGING.sub("…", text)


def spans(line: str) -> str:
    """A line as parts of an SVG text, with the colours that its escapes name."""
    parts, style = [], ""
    for number, piece in enumerate(_ESCAPE.split(line)):
        if number % 2:
            style = {"2": "d", "32": "g", "31": "r", "1": style}.get(piece, "")
        elif piece:
            parts.append(f'<tspan class="{style}">{escape(piece)}</tspan>' if style else escape(piece))
    return "".join(parts)


def picture() -> str:
    """The picture as SVG."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        make(folder)
        for command in COMMANDS:
            lines += ["", f"\x1b[32m$\x1b[0m stepwell {command}", *printed(command, folder).split("\n")]
    columns = max(len(_ESCAPE.sub("", line)) for line in lines)
    width = round(columns * CHARACTER + 2 * MARGIN)
    height = TOP + LINE * len(lines) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13" role="img" aria-label="stepwell ls, show, verify and diff in a terminal">',
            "<style>",
            ".bg{fill:#15191e;stroke:#3e4750}.x{fill:#e4e7eb;white-space:pre}",
            ".d{fill:#9aa5b1}.g{fill:#66bb74}.r{fill:#f07178;font-weight:bold}",
            "</style>",
            f'<rect class="bg" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *(
                f'<circle cx="{18 + 20 * n}" cy="18" r="6" fill="{colour}"/>'
                for n, colour in enumerate(("#f07178", "#d8ab3d", "#66bb74"))
            ),
            *(
                f'<text class="x" xml:space="preserve" x="{MARGIN}" y="{TOP + LINE * n + 8}">{spans(line)}</text>'
                for n, line in enumerate(lines)
                if line
            ),
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE)
