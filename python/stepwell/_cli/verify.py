"""``stepwell verify``: read every byte and compare every checksum."""

from __future__ import annotations

import time

import click

import stepwell as sw

from ..errors import MisuseError
from .command import command
from .output import FINE, PROBLEMS, Output, count, fields_of, safe, size
from .progress import progress
from .targets import TARGET, Target, manager_of, root_of_another

#: Leaves of a damaged block that are shown in its line.
_SHOWN = 4


@command("verify")
@click.argument("path", type=TARGET)
@click.option("--all", "every", is_flag=True, help="Verify every step of the root PATH.")
def verify(out: Output, path: Target, every: bool) -> int:
    """Read every byte of the checkpoint PATH (or ROOT@STEP) and compare every checksum.

    For a root, verifies the newest step, damaged or not. Exits with 1 if anything is damaged.
    """
    if every and path.step is not None:
        raise MisuseError(f"--all is for a root, and {path} is one step of it; leave one of the two out")
    steps: list[int | None] = [path.step]
    others: list[tuple[str, str | None]] = []
    if every:
        steps, others = _steps(path.path)
    reports = []
    for number, step in enumerate(steps):
        label = "verifying" if len(steps) == 1 else f"verifying step {step} ({number + 1} of {len(steps)})"
        begun = time.monotonic()
        with progress(label) as tell:
            reports.append(sw.verify(path.path, step, progress=tell))
        _print(out, reports[-1], time.monotonic() - begun)
    for name, reason in others:
        out.line(f"{out.bad('no step')}: {safe(name)}: {safe(reason)}")
    ok = all(reports) and not others and bool(reports)
    if not reports:
        out.line("there is no step")
    out.document(
        {
            "ok": ok,
            "checkpoints": [{**fields_of(report), "ok": report.ok} for report in reports],
            "quarantined": [{"name": name, "reason": reason} for name, reason in others],
        }
    )
    return FINE if ok else PROBLEMS


def _steps(path: str) -> tuple[list[int | None], list[tuple[str, str | None]]]:
    """Returns the numbers of the steps of a root, and name and reason of what is passed over."""
    if (other := root_of_another(path)) is not None:
        whole = [step.number for step in other.steps if step.incomplete is None]
        return list(dict.fromkeys(whole)), [
            (step.name, step.incomplete) for step in other.steps if step.incomplete is not None
        ]
    with manager_of(path) as manager:
        rows = manager.inspect()
    others = [(row.name, row.damage) for row in rows if row.step is None]
    return [row.step for row in rows if row.step is not None], others


def _print(out: Output, report: sw.results.VerifyReport, seconds: float) -> None:
    name = safe(report.path) if report.step is None else f"step {report.step}: {safe(report.path)}"
    if report.ok:
        rate = f", {size(int(report.nbytes / seconds))}/s" if seconds > 0 else ""
        read = f"{count(report.files, 'file')}, {size(report.nbytes)} read{rate}"
        if report.unguarded_nbytes:
            out.line(f"readable: {name}: {read}; no checksum is known for {size(report.unguarded_nbytes)}")
        else:
            out.line(f"{out.good('whole')}: {name}: {read}")
        return
    out.line(f"{out.bad('damaged')}: {name}: {count(len(report.damages), 'damaged part')} found")
    for damage in report.damages:
        block = "" if damage.block is None else f", block {damage.block}"
        more = f" and {len(damage.leaves) - _SHOWN} more" if len(damage.leaves) > _SHOWN else ""
        leaves = f" (leaves {', '.join(damage.leaves[:_SHOWN])}{more})" if damage.leaves else ""
        out.line(f"  {safe(damage.file + block)}: {safe(damage.what + leaves)}")
