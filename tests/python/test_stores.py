"""Roots in the stores of three clouds, and faults of their servers. The server is a fake one."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).parent))
from fake_store import DIALECTS, control, fake_store

_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}


def _token() -> dict[str, str]:
    return {"token": "t"}


@dataclass
class Served:
    """A running server."""

    dialect: str
    variables: dict[str, str]

    def url(self, name: str, bucket: str = "bucket") -> str:
        return f"{_SCHEMES[self.dialect]}://{bucket}/{name}"

    def root(self, name: str, bucket: str = "bucket") -> str | sw.Store:
        """The root, with credentials where a cloud needs them."""
        url = self.url(name, bucket)
        return sw.Store(url, credentials=_token) if self.dialect == "gcs" else url

    def control(self, path: str, body: Any = None) -> Any:
        return control(self.variables, path, body)


@pytest.fixture(scope="module", params=DIALECTS)
def server_of_dialect(request: pytest.FixtureRequest) -> Iterator[Served]:
    with fake_store(request.param) as variables:
        yield Served(request.param, variables)


@pytest.fixture(scope="module")
def server_of_s3() -> Iterator[Served]:
    with fake_store("s3") as variables:
        yield Served("s3", variables)


def _ready(server: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.control("faults")
    server.control("reset")
    return server


@pytest.fixture
def served(server_of_dialect: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server of each dialect, without faults. The variables of the environment lead to it."""
    return _ready(server_of_dialect, monkeypatch)


@pytest.fixture
def s3(server_of_s3: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server of S3 alone."""
    return _ready(server_of_s3, monkeypatch)


def state(step: int) -> dict[str, np.ndarray]:
    """One leaf of several parts of an upload, and a small one."""
    large = np.arange(5 << 20, dtype=np.float32)
    return {"w": large + np.float32(step), "b": np.full(7, step)}


def assert_is(found: dict[str, Any], step: int) -> None:
    for name, value in state(step).items():
        assert np.array_equal(found[name], value), f"{name} of step {step} is wrong"


def test_steps_are_saved_listed_and_restored(served: Served) -> None:
    root = served.root("saved")
    with sw.CheckpointManager(root, retention=2) as mgr:
        assert mgr.latest_step() is None
        for step in range(4):
            mgr.save(step, state(step)).result()
        assert mgr.all_steps() == [2, 3]
    with sw.CheckpointManager(root, read_only=True) as reader:
        for step in (2, 3):
            assert_is(reader.restore(step), step)
    counts = served.control("requests")
    assert counts["part"] >= 8
    assert counts["create"] > 0
    assert counts["bytes_in"] > 4 * 20 << 20


def test_steps_are_replaced_rewound_and_deleted(served: Served) -> None:
    with sw.CheckpointManager(served.root("changed")) as mgr:
        for step in range(4):
            mgr.save(step, state(step), metrics={"loss": float(step)}).result()
        mgr.save(3, state(30), exists="replace").result()
        assert_is(mgr.restore(3), 30)
        assert mgr.rewind(2) == [3]
        mgr.delete(0)
        assert mgr.all_steps() == [1, 2]
        assert mgr.best_step("loss", "min") == 1
        assert_is(mgr.restore(1), 1)


def test_listings_continue_over_pages(served: Served) -> None:
    root = served.root("pages")
    with sw.CheckpointManager(root, retention=None) as mgr:
        for step in range(9):
            mgr.save(step, {"b": np.full(7, step)}).result()
    served.control("page", {"entries": 2})
    try:
        with sw.CheckpointManager(root, read_only=True) as reader:
            assert reader.all_steps() == list(range(9))
            assert int(reader.restore(4)["b"][0]) == 4
        assert served.control("requests")["list"] > 9
    finally:
        served.control("page")


def test_a_missing_bucket_is_named(served: Served) -> None:
    with pytest.raises(sw.StorageError, match="//nothing") as caught:
        sw.CheckpointManager(served.root("run", "nothing"))
    assert "wonderful-secret" not in str(caught.value)


def test_requests_without_credentials_are_refused(served: Served) -> None:
    anonymous = sw.Store(served.url("run"), anonymous=True)
    with pytest.raises(sw.StorageError):
        sw.CheckpointManager(anonymous)


def test_public_buckets_need_no_credentials(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # A client that asks the machine for credentials finds nobody.
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:1")
    with sw.CheckpointManager(sw.Store(served.url("run", "public"), anonymous=True)) as mgr:
        mgr.save(1, state(1)).result()
        assert_is(mgr.restore(1), 1)


def test_a_wrong_region_is_an_error(s3: Served) -> None:
    s3.control("redirect", {"region": "eu-west-1"})
    try:
        with pytest.raises(sw.StorageError):
            sw.CheckpointManager(s3.root("run"))
    finally:
        s3.control("redirect")


def test_parts_are_checked_by_the_server(s3: Served) -> None:
    root = sw.Store(s3.url("checked"), checksum=True)
    with sw.CheckpointManager(root) as mgr:
        mgr.save(1, state(1)).result()
        assert_is(mgr.restore(1), 1)


@contextmanager
def _faults(served: Served, **faults: Any) -> Iterator[None]:
    served.control("faults", faults)
    try:
        yield
    finally:
        served.control("faults")


_WRITES = ["create", "put", "start_upload", "part", "complete", "delete", "bulk_delete", "abort"]


@dataclass
class Outcomes:
    """The steps by what became of their saves."""

    committed: list[int]
    failed: list[int]
    unknown: list[int]


def _run(served: Served, name: str, faults: dict[str, Any]) -> Outcomes:
    outcomes = Outcomes([], [], [])
    with sw.CheckpointManager(served.root(name), retention=3, options=sw.Options(silence=1.0)) as mgr:
        mgr.save(0, state(0)).result()
        outcomes.committed.append(0)
        with _faults(served, **faults):
            for step in range(1, 12):
                try:
                    mgr.save(step, state(step)).result()
                except sw.SaveFailed:
                    outcomes.failed.append(step)
                except sw.StepwellError:
                    outcomes.unknown.append(step)
                else:
                    outcomes.committed.append(step)
                if step % 4 == 0:
                    _restore_latest(mgr)
    return outcomes


def _restore_latest(mgr: sw.CheckpointManager) -> None:
    """A restore may fail under faults. It never returns a wrong tensor."""
    try:
        found = mgr.restore()
    except (sw.StepwellError, OSError):
        return
    assert_is(found, int(found["b"][0]))


def _check(served: Served, name: str, outcomes: Outcomes) -> None:
    with sw.CheckpointManager(served.root(name), read_only=True) as reader:
        listed = reader.all_steps()
        assert not set(listed) & set(outcomes.failed)
        assert set(listed) <= set(outcomes.committed + outcomes.unknown)
        kept = sorted(set(listed) | set(outcomes.committed))[-3:]
        assert set(kept) <= set(listed), outcomes
        for step in listed:
            assert_is(reader.restore(step), step)


@pytest.mark.parametrize(
    ("seed", "kinds", "rate"),
    [
        (1, ["drop", "unavailable", "conflict", "html", "forget"], 0.1),
        (2, ["drop", "late"], 0.1),
        (3, ["conflict", "slow", "late", "drop"], 0.05),
        (4, ["busy", "reorder"], 0.3),
        (5, ["busy", "reorder", "late", "drop", "login"], 0.1),
    ],
)
def test_commits_are_true_under_faults(s3: Served, seed: int, kinds: list[str], rate: float) -> None:
    name = f"faults-{seed}"
    faults = {"seed": seed, "kinds": kinds, "rate": rate, "only": _WRITES, "limit": 25}
    outcomes = _run(s3, name, faults)
    assert s3.control("requests")["faults"] > 0
    _check(s3, name, outcomes)


def test_wrong_bytes_never_reach_a_tensor(s3: Served) -> None:
    outcomes = []
    with sw.CheckpointManager(s3.root("wrong")) as mgr:
        mgr.save(1, state(1)).result()
        for seed in range(12):
            with _faults(s3, seed=seed, kinds=["wrong"], rate=0.2, only=["range"], limit=9):
                try:
                    found = mgr.restore(1)
                except sw.CorruptCheckpoint:
                    outcomes.append("found")
                else:
                    assert_is(found, 1)
                    outcomes.append("right")
        assert "found" in outcomes
        assert_is(mgr.restore(1), 1)


@pytest.mark.parametrize("kind", ["cut", "drop", "unavailable", "html", "forget", "busy", "reorder"])
def test_reads_are_repeated(served: Served, kind: str) -> None:
    with sw.CheckpointManager(served.root(f"reads-{kind}")) as mgr:
        mgr.save(1, state(1)).result()
        served.control("reset")
        with _faults(served, seed=3, kinds=[kind], rate=0.5, only=["get", "range"], limit=3):
            assert_is(mgr.restore(1), 1)
        assert served.control("requests")["faults"] > 0


def test_a_busy_store_gets_fewer_requests_at_once(s3: Served) -> None:
    s3.control("latency", {"milliseconds": 30})
    s3.control("most", {"requests": 2})
    try:
        state = {"w": np.arange(25 << 20)}
        with sw.CheckpointManager(s3.url("busy")) as mgr:
            mgr.save(1, state).result()
            s3.control("reset")
            mgr.save(2, state).result()
        parts = s3.control("requests")["part"]
        assert 25 <= parts < 50, "without a pace, each part is sent three times"
        found = sw.restore(s3.url("busy"))
        assert np.array_equal(found["w"], state["w"])
    finally:
        s3.control("most")
        s3.control("latency")


def test_credentials_are_renewed_before_they_expire(s3: Served) -> None:
    tokens = ["old-token"]

    def credentials() -> dict[str, Any]:
        expires_at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
        return {
            "access_key_id": "a",
            "secret_access_key": "b",
            "token": tokens[0],
            "expires_at": expires_at,
        }

    with sw.CheckpointManager(sw.Store(s3.url("expired"), credentials=credentials)) as mgr:
        mgr.save(1, state(1)).result()
        tokens[0] = "new-token"
        time.sleep(1)
        s3.control("expire", {"token": "old-token"})
        try:
            assert_is(mgr.restore(1), 1)
        finally:
            s3.control("expire")


def test_expired_credentials_are_an_error(s3: Served) -> None:
    root = sw.Store(s3.url("expired"), credentials=_keys)
    s3.control("expire", {"token": "old-token"})
    try:
        with pytest.raises(sw.StorageError, match="ExpiredToken") as caught:
            sw.CheckpointManager(root)
        assert "wonderful-secret" not in str(caught.value)
    finally:
        s3.control("expire")


def _keys() -> dict[str, str]:
    return {"access_key_id": "a", "secret_access_key": "wonderful-secret", "token": "old-token"}


def asked(counts: dict[str, int]) -> int:
    """The requests beside those that move data."""
    data = ("part", "bytes_in", "bytes_out", "faults")
    return sum(value for name, value in counts.items() if name not in data)


def test_the_requests_of_each_call_are_bounded(s3: Served) -> None:
    with sw.CheckpointManager(s3.root("counted"), retention=3) as mgr:
        for step in range(5):
            mgr.save(step, state(step)).result()
        mgr.wait_until_finished()
        s3.control("reset")
        mgr.save(5, state(5)).result()
        mgr.wait_until_finished()
        counts = s3.control("requests")
        # 20 MiB are three parts. The index, the manifest and two entries of the ledger are one
        # request each.
        assert (counts["part"], counts["start_upload"], counts["complete"]) == (3, 1, 1)
        assert counts["create"] + counts["put"] == 4
        assert asked(counts) <= 20, counts
        s3.control("reset")
        mgr.restore(5)
        assert asked(s3.control("requests")) <= 10
    with sw.CheckpointManager(s3.root("counted"), read_only=True) as reader:
        reader.all_steps()
        s3.control("reset")
        reader.all_steps()
        assert asked(s3.control("requests")) == 1
        s3.control("reset")
        reader.latest_step()
        assert asked(s3.control("requests")) == 2


def test_one_percent_of_a_leaf_is_read_with_few_bytes(s3: Served) -> None:
    rows = np.arange(16 << 20, dtype=np.float32).reshape(4096, 4096)
    sw.save(s3.root("part"), {"w": rows})
    with sw.open(s3.root("part")) as checkpoint:
        s3.control("reset")
        assert np.array_equal(checkpoint["w"][:400], rows[:400])
        assert s3.control("requests")["bytes_out"] <= 1.15 * rows[:400].nbytes


def test_the_doctor_tries_a_store_and_leaves_nothing(served: Served) -> None:
    report = sw.doctor(served.root("tried"), nbytes=1 << 20)
    assert report.ok, report
    assert report["create_race"].detail == "1 of 16 creates of one key won"
    assert sw.doctor(served.root("tried"), nbytes=1 << 20).ok
    with pytest.raises(sw.StepNotFound):
        sw.open(served.root("tried"))
