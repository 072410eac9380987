"""A writer that is killed at each of its requests: no step is lost, and none comes back.

``STEPWELL_LONG=1`` kills it at every request. ``make test`` tries some of them.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import stepwell as sw

sys.path.append(str(Path(__file__).parent))
from fake_store import control
from longer import LONG

_QUICK = sw.Options(silence=0.2, grace=0.01)
#: The kills of the ordinary tests.
_KILLS = 30

_PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store_kills import save_third
save_third(sys.argv[1])
"""


def state(step: int) -> dict[str, np.ndarray]:
    """One leaf of two parts of an upload, and a small one."""
    return {"w": np.arange(9 << 18, dtype=np.float32) + np.float32(step), "b": np.full(7, step)}


def save_third(url: str) -> None:
    """Saves a step to a root with two. Retention then deletes the first one."""
    with sw.CheckpointManager(url, retention=2, options=_QUICK) as mgr:
        mgr.save(3, state(3)).result()
        print("saved", flush=True)
        mgr.wait_until_finished()


def _prepare(url: str) -> None:
    with sw.CheckpointManager(url, retention=2, options=_QUICK) as mgr:
        for step in (1, 2):
            mgr.save(step, state(step)).result()


def _start(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROGRAM, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _asked(variables: Mapping[str, str]) -> int:
    counts = control(variables, "requests")
    return sum(counts[name] for name in counts if name not in ("bytes_in", "bytes_out", "faults"))


def _killed(variables: Mapping[str, str], url: str, after: int, applied: bool) -> bool:
    """Kills a save at the request after so many. True if the save was reported as committed."""
    control(variables, "halt", {"after": after, "applied": applied})
    process = _start(url)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and not control(variables, "halted"):
            assert time.monotonic() < deadline, "the save makes no request"
            time.sleep(0.01)
    finally:
        process.kill()
        out, err = process.communicate(timeout=10)
        control(variables, "halt")
    assert process.returncode in (0, -signal.SIGKILL), err
    return "saved" in out


def _steps(url: str) -> list[int]:
    """The steps that a reader sees. Each is restored and compared."""
    with sw.CheckpointManager(url, read_only=True) as reader:
        steps = reader.all_steps()
        for step in steps:
            found = reader.restore(step)
            for name, value in state(step).items():
                assert np.array_equal(found[name], value), f"{name} of step {step} is wrong"
    return steps


def _prefixes(variables: Mapping[str, str], url: str) -> set[str]:
    """The prefixes of saves below a root."""
    below = url.removeprefix("s3://bucket/") + "/"
    address = f"{variables['AWS_ENDPOINT_URL']}/bucket?list-type=2&prefix={below}"
    asked = urllib.request.Request(address, headers={"Authorization": "x"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        keys = re.findall("<Key>(.*?)</Key>", answer.read().decode())
    return {key.removeprefix(below).split("/")[0] for key in keys} - {".stepwell"}


def _check(variables: Mapping[str, str], url: str, saved: bool) -> None:
    seen = _steps(url)
    assert seen in ([1, 2], [1, 2, 3], [2, 3]), seen
    assert 3 in seen or not saved, "a committed step is lost"
    with sw.CheckpointManager(url, retention=2, options=_QUICK) as mgr:
        resumed = mgr.all_steps()
        assert max(resumed) == max(seen), (seen, resumed)
        assert set(resumed) <= set(seen), "a step has come back"
        mgr.save(4, state(4)).result()
        kept = [3 if 3 in seen else 2, 4]
        assert _steps(url) == kept
        # The next writer deletes what the killed one has left.
        deadline = time.monotonic() + 20
        while len(_prefixes(variables, url)) > len(kept) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert len(_prefixes(variables, url)) == len(kept), "objects of a killed save are left"
    assert _steps(url) == kept
    assert sw.verify(url).ok


def test_a_kill_at_each_request_loses_no_step(store: dict[str, str], bucket: str) -> None:
    _prepare(f"{bucket}/whole")
    control(store, "reset")
    whole = _start(f"{bucket}/whole")
    out, err = whole.communicate(timeout=60)
    assert (whole.returncode, out) == (0, "saved\n"), err
    requests = _asked(store)
    assert requests >= 20
    kills = [(after, applied) for after in range(requests) for applied in (False, True)]
    for after, applied in kills if LONG else kills[:: len(kills) // _KILLS | 1]:
        url = f"{bucket}/killed-{after}-{applied}"
        _prepare(url)
        saved = _killed(store, url, after, applied)
        try:
            _check(store, url, saved)
        except Exception as error:
            error.add_note(f"the kill was {'after' if applied else 'before'} request {after}")
            raise
