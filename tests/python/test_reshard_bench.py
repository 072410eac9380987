"""The bench of resharding, with a state that is small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "bench"

SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import numpy as np
from crew import Crew
from reshard import CASES
from workloads import _llama, _train_state

state = _train_state(_llama(hidden=64, inner=176, layers=1, vocabulary=40), np.random.default_rng(1))
ranks = Crew("reshard_numpy", state)
for number, (saved, wanted, _) in enumerate(CASES.values()):
    root = Path(sys.argv[2]) / saved.cut
    if not root.exists():
        ranks.run("stepwell_save", saved.world, root, f"save-{number}", saved)
    fresh = number % 2 == 1
    done = ranks.run("stepwell_restore", wanted.world, root, f"restore-{number}", wanted, fresh, True)
    assert [len(rank) for rank in done] == [2] * wanted.world, done
ranks.end()
"""


def test_ranks_restore_what_others_saved_in_every_bench_case(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(BENCH), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
