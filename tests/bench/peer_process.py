"""One contestant, one workload, one process: what :mod:`peers` starts, once for each contestant in
each round.

Memory comes first: what the parent has just given back is taken while it is still backed by the
host (see :mod:`measure`), and only then are the frameworks imported. A tiny state makes an untimed
round trip, so that nobody's first save pays for imports and thread pools.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measure import Spare, Timing, drop_caches, footprint, measured, resident, settle, warm_cache
from peer import KEPT, Peer, part_of
from workloads import WORKLOADS, State, differences, nbytes

#: The modules of the contestants.
MODULES = ("raw_peer", "torch_peers", "jax_peers")

#: Saves into the root with retention; the last three are counted: at each of them a step has just
#: been deleted.
KEPT_SAVES = KEPT + 4
COUNTED = 3

#: Each restore is made so often, or but twice where a third one would pass so many seconds: one
#: alone is at the mercy of the machine.
RESTORES = 3
LONGEST = 4.0


def chosen(module: str, name: str) -> type[Peer]:
    """A contestant by its name."""
    return next(peer for peer in import_module(module).PEERS if peer.name == name)


def tiny() -> State:
    """A state of a few KiB for the first round trip."""
    return {
        "params": {"w": np.arange(64, dtype=np.float32)},
        "optimizer": {"m": np.ones((8, 8), np.float32)},
    }


def first_round_trip(kind: type[Peer], base: Path) -> None:
    """A state of a few KiB, saved and restored in all ways."""
    base.mkdir()
    peer = kind(base)
    peer.take(tiny())
    peer.prepare()
    peer.save(1)
    peer.save(1, kept=True)
    peer.fresh(1)
    peer.weights(1)
    if peer.fills:
        peer.into(1, peer.empty())
    peer.close()
    shutil.rmtree(base)


class Measuring:
    """The operations of one process, in order, and what they took."""

    def __init__(self, peer: Peer, spare: Spare, verify: bool) -> None:
        self.peer, self.spare, self.verify = peer, spare, verify
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, float] = {}
        self.memory: dict[str, int] = {}

    def saves(self, number: int) -> int:
        """Steps 1 to ``number``: the first of the process, and those after it. Returns the last
        step."""
        for step in range(1, number + 1):
            if step > 1:
                self.peer.step()
            settle()
            self.spare.release()
            before = resident()
            timing = measured(lambda step=step: self.peer.save(step))
            grown = max(0, resident() - before)
            self.spare.hold()
            blocked, durable = timing.result
            suffix = ", first" if step == 1 else ""
            self.seconds["blocked" + suffix].append(blocked)
            self.seconds["durable" + suffix].append(durable)
            if step == 1:
                self.memory["held"] += grown
            else:
                self._keep("save", timing)
        return number

    def kept_saves(self) -> None:
        """Saves one after the other, with retention at work."""
        self.spare.release()
        for step in range(1, KEPT_SAVES + 1):
            self.peer.step()
            blocked, durable = self.peer.save(step, kept=True)
            if not self.peer.has_retention and step > KEPT:
                self.peer.retire(step - KEPT)
            if step > KEPT_SAVES - COUNTED:
                self.seconds["blocked, retaining"].append(blocked)
                self.seconds["durable, retaining"].append(durable)
        self.spare.hold()

    def restores(self, step: int, warm: bool) -> None:
        directory = self.peer.directory(step)
        self._restore("fresh, cold", lambda: self.peer.fresh(step))
        if self.peer.fills:
            target = self.peer.empty()
            self._restore("into, cold", lambda: self.peer.into(step, target))
            del target
        self._restore("weights, cold", lambda: self.peer.weights(step), "params")
        if warm:
            self._restore("fresh, warm", lambda: self.peer.fresh(step), warm=directory)

    def _restore(
        self, name: str, call: Callable[[], Any], part: str | None = None, warm: Path | None = None
    ) -> None:
        for number in range(RESTORES):
            self._restore_once(name, call, part, warm, self.verify and number == 0)
            if number > 0 and sum(self.seconds[name]) * (number + 2) / (number + 1) > LONGEST:
                break

    def _restore_once(
        self, name: str, call: Callable[[], Any], part: str | None, warm: Path | None, verify: bool
    ) -> None:
        self.spare.release()
        if not drop_caches():
            print("caches cannot be dropped here: 'cold' is warm", file=sys.stderr)
        if warm is not None:
            warm_cache(warm)
        else:
            self.spare.hold()
        timing = self.spare.measured(call)
        self.seconds[name].append(timing.seconds)
        self._keep(name, timing)
        if verify and timing.result is not None:
            expected = self.peer.as_numpy(part_of(self.peer.state, part))
            wrong = differences(self.peer.as_numpy(timing.result), expected)
            if wrong:
                raise SystemExit(f"{self.peer.name} restored other bytes ({name}): {wrong[:5]}")

    def _keep(self, name: str, timing: Timing) -> None:
        self.memory[name] = max(self.memory.get(name, 0), timing.extra_peak)
        self.cpu[name] = timing.cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", required=True, choices=MODULES)
    parser.add_argument("--name", required=True)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--saves", type=int, default=3, help="into the root without retention")
    parser.add_argument("--retention", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--verify", action="store_true", help="compare every restore bit for bit")
    options = parser.parse_args()

    state = WORKLOADS[options.workload](np.random.default_rng(1))
    size = nbytes(state)
    spare = Spare(2 * size + (512 << 20))
    spare.hold()
    kind = chosen(options.module, options.name)
    base = Path(tempfile.mkdtemp(dir=options.directory.resolve()))
    try:
        first_round_trip(kind, base / "first")
        peer = kind(base)
        spare.release()
        peer.take(state)
        before = resident()
        begin = time.perf_counter()
        peer.prepare()
        prepared = time.perf_counter() - begin
        measuring = Measuring(peer, spare, options.verify)
        measuring.memory["held"] = max(0, resident() - before)
        spare.hold()
        last = measuring.saves(options.saves)
        files, stored = footprint(peer.directory(last))
        if options.retention:
            measuring.kept_saves()
            settle()
        measuring.restores(last, options.warm)
        peer.close()
    finally:
        spare.release()
        shutil.rmtree(base, ignore_errors=True)
    answer = {
        "seconds": {**measuring.seconds, "prepare": [prepared]},
        "cpu": measuring.cpu,
        "memory": measuring.memory,
        "files": files,
        "bytes": stored,
        "size": size,
    }
    options.result.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
