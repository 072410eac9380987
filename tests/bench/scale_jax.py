"""The cost of `save` of JAX arrays for the training, by size and number of leaves. :mod:`scale`
starts it in a process of its own.

Arrays are captured after `save` has returned. A training step that donates them meanwhile must
leave what is saved as it was: the step is run at once after `save`, what is restored is compared
with what went in, and the time that the step took longer is printed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import stepwell as sw
from measure import Spare, settle
from workloads import GIB, small20k

#: Steps after a save whose extra time counts.
STEPS = 5

State = dict[str, Any]


def even(leaves: int, size: int) -> State:
    """So many float32 arrays of one size."""
    rng = np.random.default_rng(2)
    length = size // leaves // 4
    return {
        "params": {f"leaf_{n}": jnp.asarray(rng.standard_normal(length, np.float32)) for n in range(leaves)}
    }


def owned(state: State) -> State:
    """New arrays with the same values, in memory of JAX's own; nothing is compiled for their
    shapes."""
    leaves, structure = jax.tree.flatten(state)
    made = jax.device_put([np.asarray(leaf) for leaf in leaves], may_alias=False)
    return jax.block_until_ready(jax.tree.unflatten(structure, made))


def many() -> State:
    """20 000 leaves of 1 to 64 KiB."""
    return owned(small20k(np.random.default_rng(2)))


@jax.jit
def copies(state: State) -> State:
    """New arrays with the same values, which nobody else has a view of."""
    return jax.tree.map(jnp.copy, state)


def updated(state: State) -> State:
    return jax.tree.map(lambda x: x * 0.999 + 0.001, state)


#: An update in place, as far as XLA can; and one that never is.
train_step = jax.jit(updated, donate_argnums=0)
step_into_new_memory = jax.jit(updated)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def sums(state: State) -> list[int]:
    """A checksum per leaf. Looking at an array makes a view of it, under which it would not be
    donated any more: never of arrays that are measured afterwards."""
    return [zlib.crc32(np.asarray(leaf).view(np.uint8)) for leaf in jax.tree.leaves(state)]


def saves(state: State, root: Path, rounds: int) -> dict[str, Any]:
    """Seconds that `save` took, each of arrays that are new."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    blocked: list[float] = []
    capsules: list[float] = []
    with sw.CheckpointManager(root, staging_bytes=size + (64 << 20), retention=sw.keep_latest(1)) as manager:
        manager.prepare(state)
        for step in range(rounds + 1):
            state = owned(state)
            settle(0.5)
            seconds, save = timed(lambda step=step, state=state: manager.save(step, state))
            save.result(600)
            blocked.append(seconds)
            leaves = jax.tree.leaves(owned(state))
            capsules.append(timed(lambda leaves=leaves: [leaf.__dlpack__() for leaf in leaves])[0])
    return {"first": blocked[0], "blocked": blocked[1:], "dlpack": capsules[1:]}


def donated(state: State, root: Path) -> dict[str, Any]:
    """Steps that donate what has just been saved: whether it is stored as it was, and what the
    steps took longer. The first of them finds its arrays held, so it is one into new memory: what
    that takes without a save is measured too."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    expected = sums(state)
    state = jax.block_until_ready(copies(state))
    runs = jax.block_until_ready(copies(state))

    def steps(state: State) -> tuple[list[float], State]:
        spent = []
        for _ in range(STEPS):
            seconds, state = timed(lambda state=state: jax.block_until_ready(train_step(state)))
            spent.append(seconds)
        return spent, state

    _, runs = steps(runs)  # compiles
    alone, runs = steps(runs)
    spare = Spare(4 * size)
    jax.block_until_ready(step_into_new_memory(runs))  # compiles
    spare.hold()
    spare.release()
    new_memory, _ = timed(lambda runs=runs: jax.block_until_ready(step_into_new_memory(runs)))
    del runs
    with sw.CheckpointManager(root, staging_bytes=size + (64 << 20)) as manager:
        manager.prepare(state)
        spare.hold()
        spare.release()
        save = manager.save(1, state)
        beside, state = steps(state)
        save.result(600)
        del state
        restored = manager.restore(1)
    return {"intact": sums(restored) == expected, "alone": alone, "new_memory": new_memory, "beside": beside}


def main() -> None:
    directory, answer, quick = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "quick"
    base = Path(tempfile.mkdtemp(prefix="jax-", dir=directory))
    found: dict[str, Any] = {}
    try:
        for name, size in (("1 GiB", GIB), ("3 GiB", 3 * GIB))[: 1 if quick else 2]:
            found[f"300 leaves, {name}"] = saves(even(300, size), base / f"saves-{size}", 9)
            found[f"300 leaves, {name}"]["donated"] = donated(even(300, size), base / f"donated-{size}")
            shutil.rmtree(base / f"saves-{size}")
            shutil.rmtree(base / f"donated-{size}")
        found["20 000 leaves"] = saves(many(), base / "many", 9)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for name, one in found.items():
        print(name, "blocked", f"{1000 * statistics.median(one['blocked']):.1f} ms", file=sys.stderr)
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
