"""Orbax, measured by the same disk: saves steps as its own guide does, and says which of them a
disk still has.

``orbax_writer.py save ROOT STEPS DEVICE`` says ``committed N`` when Orbax has said that step N is
finished, with a mark for each line in the log of ``DEVICE``. ``orbax_writer.py check`` reads roots
from standard input, and answers each with a line: the steps that Orbax lists, and ``bad N`` for
each of them that is not restored to the bit.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import numpy as np
import orbax.checkpoint as ocp


def state_of(step: int) -> dict[str, Any]:
    drawn = np.random.default_rng(step)
    return {"w": drawn.standard_normal((64, 256)), "b": drawn.standard_normal(1024), "step": np.array(step)}


def save(root: str, steps: int, device: str) -> None:
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(create=True)) as manager:
        for step in range(1, steps + 1):
            manager.save(step, args=ocp.args.StandardSave(state_of(step)))
            manager.wait_until_finished()
            manager.check_for_errors()
            print(f"committed {step}", flush=True)
            subprocess.run(["dmsetup", "message", device, "0", "mark", str(step)], check=True)


def is_whole(manager: Any, step: int) -> bool:
    wanted = state_of(step)
    try:
        found = manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return all(np.array_equal(found[name], value) for name, value in wanted.items())
    except Exception:
        return False


def check(root: str) -> str:
    try:
        with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
            steps = sorted(manager.all_steps())
            bad = [step for step in steps if not is_whole(manager, step)]
    except Exception as error:
        return f"unreadable {type(error).__name__}"
    return " ".join(["listed", *map(str, steps), *(f"bad {step}" for step in bad)])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if sys.argv[1] == "save":
        save(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        for line in sys.stdin:
            print(check(line.strip()), flush=True)
