"""The main job, end to end: train, save every few steps, be killed in the middle of a save, resume,
compare.

Run by ``make demo``. Exits with 0 only if everything that it says is so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stepwell as sw

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "language_model.py"
STEPS = 60
DEADLINE = 600.0


def start(root: Path, losses: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        str(EXAMPLE),
        "--root",
        str(root),
        "--steps",
        str(STEPS),
        "--losses",
        str(losses),
    ]
    return subprocess.Popen(command, start_new_session=True)


def finish(root: Path, losses: Path) -> None:
    process = start(root, losses)
    code = process.wait(timeout=DEADLINE)
    if code != 0:
        sys.exit(f"training ended with exit code {code}")


def in_flight(root: Path) -> set[str]:
    """The saves that are being written: their directories do not have a step's name yet."""
    return {name for name in os.listdir(root) if name.startswith(".tmp-") and has_data(root / name)}


def has_data(save: Path) -> bool:
    """True if the save has a data file by now. A save that is committed meanwhile has moved away,
    and has none here."""
    # os.walk passes over a directory that is gone when it gets there; Path.rglob raises, before
    # Python 3.13.
    return any(name.endswith(".data") for _, _, names in os.walk(save) for name in names)


def kill_in_a_save(root: Path, losses: Path, after_steps: int) -> str:
    """Start training and kill it, with SIGKILL, while a save is half written. Returns the name of
    that save."""
    earlier = in_flight(root)  # what the last kill left; the next manager clears it away
    process = start(root, losses)
    begin = time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - begin < DEADLINE:
            if len(list(root.glob("step_*"))) >= after_steps and in_flight(root) - earlier:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                torn = in_flight(root) - earlier
                if torn:
                    return min(torn)
                print("  (that save had just been committed; once more)")
                return kill_in_a_save(root, losses, after_steps)
            time.sleep(0.0002)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    sys.exit("training ended before it could be killed in the middle of a save")


def read_losses(path: Path) -> tuple[dict[int, str], list[float]]:
    """Loss by step (a step that was repeated after a resume must have the same loss each time) and
    blocked seconds."""
    losses: dict[int, str] = {}
    blocked: list[float] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        step, loss = record["step"], record["loss"]
        if losses.setdefault(step, loss) != loss:
            sys.exit(
                f"step {step}: the loss after the resume is {loss}, before the kill it was {losses[step]}"
            )
        if record["blocked"] is not None:
            blocked.append(record["blocked"])
    return losses, blocked


def main() -> None:
    where = Path(tempfile.mkdtemp(prefix="stepwell-demo-", dir=os.environ.get("STEPWELL_DEMO_DIR", ".")))
    try:
        print("1. training, undisturbed")
        finish(where / "undisturbed", where / "undisturbed.jsonl")

        print("\n2. training again, killed with SIGKILL in the middle of a save, three times")
        root = where / "killed"
        root.mkdir()
        for steps in (2, 3, 3):
            torn = kill_in_a_save(root, where / "killed.jsonl", steps)
            with sw.CheckpointManager(root, read_only=True) as mgr:
                print(f"  killed while {torn} was being written; newest committed step: {mgr.latest_step()}")

        print("\n3. resumed, to the end")
        finish(root, where / "killed.jsonl")

        expected, _ = read_losses(where / "undisturbed.jsonl")
        found, blocked = read_losses(where / "killed.jsonl")
        if found != expected:
            different = sorted(step for step in expected if found.get(step) != expected[step])
            sys.exit(f"the losses of steps {different} differ from the undisturbed run")
        print(f"\n4. the losses of all {len(expected)} steps are bit for bit those of the undisturbed run")

        print("\n5. what is there now")
        with sw.CheckpointManager(root, read_only=True) as mgr:
            for step in mgr.all_steps():
                items = ", ".join(mgr.metadata(step).items)
                print(f"  step {step:4d}  loss {mgr.metrics(step)['loss']:.4f}  holds {items}")
                report = sw.verify(root / f"step_{step:08d}")
                if not report.ok:
                    sys.exit(f"  damaged: {report.damages}")
                print(
                    f"             verified: {report.files} files, {report.nbytes / 1e6:.1f} MB, every checksum holds"
                )
        left = [
            entry.name
            for entry in root.iterdir()
            if entry.name.startswith((".tmp-", ".trash-", ".quarantine-"))
        ]
        if left:
            sys.exit(f"left behind: {left}")

        print(
            f"\n6. training waited {1e3 * statistics.median(blocked):.1f} ms per save "
            f"(median of {len(blocked)}; longest {1e3 * max(blocked):.1f} ms)"
        )
    finally:
        shutil.rmtree(where, ignore_errors=True)


if __name__ == "__main__":
    main()
