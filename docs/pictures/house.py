"""Draws docs/_static/house.svg: the crates and their modules, and who calls whom.

    python docs/pictures/house.py

A test compares the picture with this file, and the names of the modules with the sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "_static" / "house.svg"
WIDTH, LEFT, COLUMN, BOX = 1120, 120, 250, 222
#: Between two storeys, inside a storey, and between its rows.
GAP, PAD, ROW = 34, 10, 8
COLUMNS = ["saves", "restores and reads", "files of other libraries", "ranks, machines, tiers"]

STYLE = """
.bg{fill:#ffffff}.t,.s,.h,.lane,.title{fill:#1f2933;font-family:sans-serif}.c{font-family:sans-serif}
.s{font-size:11px}.h{font-size:12px;font-weight:bold}.lane{font-size:12px;font-style:italic}.title{font-size:14px;font-weight:bold}.c{font-size:11px;font-weight:bold;fill:#0b5c8a}
.band{fill:#f4f6f8;stroke:#c4ccd4}
.b0{fill:#fdf3dc;stroke:#b98a1d}.b1{fill:#e3f0f8;stroke:#0b5c8a}.b2{fill:#e6f4e8;stroke:#2f7d3b}.b3{fill:#eeeeee;stroke:#777777}
.a{fill:none;stroke:#52606d;stroke-width:1.2}.m{fill:#52606d}
@media (prefers-color-scheme: dark){.bg{fill:#15191e}.t,.s,.h,.lane,.title{fill:#e4e7eb}.c{fill:#7cc4ee}
.band{fill:#1c2127;stroke:#3e4750}
.b0{fill:#3a3016;stroke:#d8ab3d}.b1{fill:#12303f;stroke:#5db0de}.b2{fill:#173220;stroke:#66bb74}.b3{fill:#2a2f35;stroke:#8b949e}
.a{stroke:#9aa5b1}.m{fill:#9aa5b1}}
"""


@dataclass(frozen=True)
class Module:
    """A box: the modules, and what they do."""

    names: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Storey:
    """A crate or the package: where its modules are, and the calls to the storey below."""

    title: tuple[str, ...]
    #: The directory of the modules; empty: they are not ours.
    folder: str
    style: str
    modules: tuple[Module, ...]
    #: A row of modules below the first one, which they all use.
    ground: tuple[Module, ...] = ()
    #: The label of the arrow down from each column. One that begins with ``^`` points up.
    calls: tuple[str, ...] = ()
    #: The same for arrows that pass the next storey.
    passing: tuple[str, ...] = ()


STOREYS = [
    Storey(
        ("callers",),
        "",
        "b3",
        (
            Module("your training loop, a trainer", ("by integrations/ of the package",)),
            Module("a restart, an evaluator", ("or the command line: _cli/",)),
            Module("conversions, exports", ("also while training",)),
            Module("torch, JAX, MPI, a directory", ("carry the messages of the ranks",)),
        ),
        calls=("save", "restore, open, verify", "convert, restore", "^ messages"),
    ),
    Storey(
        ("package", "stepwell"),
        "python/stepwell",
        "b0",
        (
            Module("_manager, _state/, _adapters/", ("checks; values become leaves",)),
            Module("_checkpoint, _restore/", ("target, match, casts, report",)),
            Module("formats/, maps/, _conversion/", ("what the bytes mean; other models",)),
            Module("coordinators, _distributed/", ("exchange between ranks",)),
        ),
        calls=("decide, Ticket.save", "choose, match, read", "headers; plans of outputs", "^ messages"),
    ),
    Storey(
        ("crate", "python"),
        "python/src",
        "b1",
        (
            Module("manager/, flatten/, ingest/", ("bindings; arrays become providers",)),
            Module("checkpoint/, matching", ("open checkpoints; wanted leaves",)),
            Module("foreign, pickle, convert", ("parsed bytes as Python values",)),
            Module("board, location, credentials", ("a Python coordinator as a board",)),
        ),
        calls=("plan, begin", "checkpoint, read", "read_foreign, convert", "^ sends, receives"),
    ),
    Storey(
        ("crate", "manager"),
        "manager/src",
        "b2",
        (
            Module(
                "manager/, save/, commit/",
                ("runs saves in order; one save;", "the protocol and every rename"),
            ),
            Module("checkpoint, reader/, lease", ("one step under a lease;", "files opened for reading")),
            Module(
                "convert/, foreign_reading", ("windows read and written;", "files of a foreign checkpoint")
            ),
            Module("coordination/, machines/", ("board, heartbeats, votes;", "a root on several machines")),
        ),
        (
            Module("retention/, save_policy/", ("steps in, decisions out",)),
            Module("root, discovery, recovery", ("a directory of steps",)),
            Module("repair, copy, adopted_step", ("steps made from other files",)),
            Module("ledger/, carry_queue", ("object stores; further tiers",)),
        ),
        calls=("plan", "plan", "plan", ""),
        passing=("capture, flush", "read, verify, scatter", "read, parse", "its files"),
    ),
    Storey(
        ("crate", "reshard"),
        "reshard/src",
        "b2",
        (
            Module("layout/, partition", ("who holds and writes what",)),
            Module("matching/, read_plan/", ("what is read, where it goes",)),
            Module("mapping/, computed/", ("leaves of other models",)),
        ),
    ),
    Storey(
        ("crate", "core"),
        "core/src",
        "b2",
        (
            Module("provider/, staging/, save/", ("arrays → slots → blocks",)),
            Module("load/", ("blocks → verified → arrays",)),
            Module("foreign/, compression", ("parsers of other libraries' bytes",)),
            Module("served/, remote/", ("files of other machines and stores",)),
        ),
        (
            Module("format/, limits", ("the bytes on disk, and every", "bound; no I/O")),
            Module("io/", ("Disk, Dir, File, Queue; engines;", "the simulated disk of the tests")),
            Module("sys/", ("the only unsafe code: memory,", "io_uring, locks, CUDA driver")),
        ),
        calls=("", "reads, writes, fsync", "copies and fences", "requests"),
    ),
    Storey(
        ("outside",),
        "",
        "b3",
        (
            Module("", ()),
            Module("disk, page cache", ("step_N/, .tmp-…",)),
            Module("CUDA devices", ("tensors, streams, events",)),
            Module("stores, other machines", ("HTTP; TCP",)),
        ),
    ),
]


def text(style: str, x: float, y: float, words: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def arrow(x: float, top: float, bottom: float, label: str, is_passing: bool = False) -> list[str]:
    """An arrow between two storeys, and its label beside its end."""
    if not label:
        return []
    begin, end = (bottom, top + 1) if label.startswith("^") else (top, bottom - 1)
    words = text("c", x + 7, bottom - PAD - GAP / 2 + 4, label.lstrip("^ "))
    if is_passing:
        words = words.replace(f'x="{x + 7:g}"', f'x="{x - 7:g}" text-anchor="end"')
    return [f'<path class="a" d="M{x:g} {begin:g} V{end:g}" marker-end="url(#m)"/>', words]


def row(modules: tuple[Module, ...], style: str, top: float, width: float) -> tuple[list[str], float]:
    """The boxes of a row, and the height of the row."""
    height = max(26 + 14 * len(module.lines) for module in modules)
    parts: list[str] = []
    for column, module in enumerate(modules):
        if not module.names:
            continue
        x = LEFT + column * COLUMN
        parts.append(
            f'<rect class="{style}" x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="4"/>'
        )
        parts.append(text("h", x + 8, top + 16, module.names))
        parts += [text("s", x + 8, top + 31 + 14 * n, line) for n, line in enumerate(module.lines)]
    return parts, height


def picture() -> str:
    """The picture as SVG."""
    bands: list[str] = []
    parts = [text("lane", LEFT + COLUMN * n + 8, 24, name) for n, name in enumerate(COLUMNS)]
    y = 34.0
    #: Arrows that pass a storey: where they begin, and their labels.
    passing: tuple[float, tuple[str, ...]] | None = None
    for storey in STOREYS:
        # Boxes leave room for the arrows that pass.
        boxes, height = row(storey.modules, storey.style, y + PAD, BOX - 40 if passing else BOX)
        ends = [y + PAD + height] * len(COLUMNS)
        if storey.ground:
            more, below = row(storey.ground, storey.style, y + PAD + height + ROW, BOX)
            boxes += more
            height += below + ROW
            ends[: len(storey.ground)] = [y + PAD + height] * len(storey.ground)
        bottom = y + height + 2 * PAD
        target = bottom + GAP + PAD
        if storey.folder:
            bands.append(
                f'<rect class="band" x="8" y="{y:g}" width="{WIDTH - 16}" height="{bottom - y:g}" rx="6"/>'
            )
        parts += [text("title", 18, y + 27 + 18 * n, line) for n, line in enumerate(storey.title)]
        parts += boxes
        if passing:
            for n, label in enumerate(passing[1]):
                parts += arrow(LEFT + n * COLUMN + BOX - 20, passing[0], target, label, is_passing=True)
            passing = None
        for n, label in enumerate(storey.calls):
            parts += arrow(LEFT + n * COLUMN + 20, ends[n], target, label)
        if storey.passing:
            passing = (bottom - PAD, storey.passing)
        y = bottom + GAP
    total = y - GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:g}" width="{WIDTH}" height="{total:g}" role="img" aria-label="The crates and their modules, and who calls whom">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="m" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect class="bg" width="{WIDTH}" height="{total:g}"/>',
            *bands,
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE)
