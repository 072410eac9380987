"""Roots in an S3 bucket, served by moto: real requests, signatures and XML."""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

pytest.importorskip("moto")
sys.path.append(str(Path(__file__).parent))
from command_line import process
from longer import longer
from ranks import run
from stepwell import _core
from stepwell._store import url_of


def state(step: int) -> dict[str, np.ndarray]:
    """One leaf of several parts of an upload, and a small one."""
    return {"w": np.arange(5 << 20, dtype=np.float32) + step, "b": np.full(7, step)}


def test_steps_are_saved_listed_and_restored(url: str) -> None:
    with sw.CheckpointManager(url, retention=2) as mgr:
        assert mgr.latest_step() is None
        for step in range(3):
            mgr.save(step, state(step)).result()
        assert mgr.all_steps() == [1, 2]
    with sw.CheckpointManager(url, read_only=True) as reader:
        assert reader.latest_step() == 2
        for step in (1, 2):
            found = reader.restore(step)
            for name, value in state(step).items():
                np.testing.assert_array_equal(found[name], value)
    with sw.CheckpointManager(url) as mgr:
        resumed, step = mgr.resume({name: np.zeros_like(value) for name, value in state(0).items()})
        assert step == 3
        np.testing.assert_array_equal(resumed["w"], state(2)["w"])


def test_a_killed_writer_is_taken_over(url: str) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import stepwell as sw
from test_object_store import state
mgr = sw.CheckpointManager({url!r}, options=sw.Options(silence=1.0))
mgr.save(1, state(1)).result()
mgr.save(2, state(2))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with sw.CheckpointManager(url, options=sw.Options(silence=1.0)) as mgr:
        assert mgr.latest_step() in (1, 2)  # the second save is rarely faster than the kill
        mgr.save(3, state(5)).result()
        np.testing.assert_array_equal(mgr.restore()["b"], state(5)["b"])


def test_a_second_writer_is_refused(url: str) -> None:
    with sw.CheckpointManager(url, options=sw.Options(silence=0.1)) as first:
        first.save(1, state(1)).result()
        with pytest.raises(sw.LockedError):
            sw.CheckpointManager(url, options=sw.Options(silence=0.1))


def test_steps_are_rewound_deleted_and_judged(url: str) -> None:
    with sw.CheckpointManager(url) as mgr:
        for step in range(4):
            mgr.save(step, {"b": np.full(7, step)}, metrics={"loss": float(step)}).result()
        assert mgr.rewind(2) == [3]
        mgr.delete(0)
        mgr.add_metrics(2, {"score": 0.5})
        assert mgr.all_steps() == [1, 2]
        assert mgr.metrics(2) == {"loss": 2.0, "score": 0.5}
        assert mgr.best_step("loss", "min") == 1
        target = {"b": np.zeros(7, np.int64)}
        mgr.restore(1, into=target)
        np.testing.assert_array_equal(target["b"], np.full(7, 1))


def test_a_flipped_bit_is_found(url: str, server: dict[str, str]) -> None:
    import boto3  # moto has it

    with sw.CheckpointManager(url) as mgr:
        mgr.save(1, state(1)).result()
        client = boto3.client("s3", endpoint_url=server["AWS_ENDPOINT_URL"])
        keys = [
            one["Key"]
            for one in client.list_objects_v2(Bucket="bucket", Prefix=url[len("s3://bucket/") :])["Contents"]
        ]
        key = next(key for key in keys if key.endswith(".data"))
        data = bytearray(client.get_object(Bucket="bucket", Key=key)["Body"].read())
        data[9 << 20] ^= 1
        client.put_object(Bucket="bucket", Key=key, Body=bytes(data))
        with pytest.raises(sw.CorruptCheckpoint, match="leaf `w`"):
            mgr.restore(1)
        data[9 << 20] ^= 1
        data[100] ^= 1  # in the header, which a restore does not need
        client.put_object(Bucket="bucket", Key=key, Body=bytes(data))
        assert "header" in str(sw.verify(url).damages[0].what)


def test_errors_show_no_secrets(url: str) -> None:
    with pytest.raises(sw.StorageError, match="s3://nothing") as caught:
        sw.CheckpointManager("s3://nothing/run")
    assert "wonderful-secret" not in str(caught.value)


def test_a_single_checkpoint_is_saved_replaced_and_copied(url: str, tmp_path: Path) -> None:
    sw.save(url, state(1), metrics={"loss": 0.5})
    assert sw.metadata(url).metrics == {"loss": 0.5}
    np.testing.assert_array_equal(sw.restore(url)["w"], state(1)["w"])
    with pytest.raises(sw.StepExists, match="exists already"):
        sw.save(url, state(2))
    sw.save(url, {"b": np.arange(3)}, exists="replace")
    assert list(sw.restore(url)) == ["b"]
    with pytest.raises(sw.MisuseError, match="single checkpoint"):
        sw.CheckpointManager(url)
    with sw.open(url) as checkpoint:
        assert checkpoint.path == url
        assert checkpoint.copy(tmp_path / "copy") == str(tmp_path / "copy")
    with sw.open(tmp_path / "copy") as checkpoint:
        assert checkpoint.copy(f"{url}-copy") == f"{url}-copy"
    np.testing.assert_array_equal(sw.restore(f"{url}-copy")["b"], np.arange(3))
    assert sw.verify(f"{url}-copy").ok


def test_the_root_of_a_run_is_not_replaced_by_a_checkpoint(url: str) -> None:
    with sw.CheckpointManager(url) as mgr:
        mgr.save(1, state(1)).result()
    with pytest.raises(sw.MisuseError, match="root of a run"):
        sw.save(url, state(2), exists="replace")
    assert sw.inspect(url)[0].step == 1


def test_functions_of_a_path_take_the_url_of_a_root(url: str) -> None:
    with sw.CheckpointManager(url) as mgr:
        for step in (1, 2):
            mgr.save(step, state(step), metrics={"loss": step}).result()
    sw.add_metrics(url, 1, {"score": 0.25})
    with sw.open(f"{url}/step_00000001") as checkpoint:
        assert (checkpoint.step, checkpoint.path) == (1, f"{url}/step_00000001")
    assert [one.step for one in sw.watch(url, timeout=0, which="all")] == [1, 2]
    assert [one.metrics.get("score") for one in sw.inspect(url)] == [0.25, None]
    assert sw.verify(url).path == f"{url}/step_00000002"
    np.testing.assert_array_equal(sw.restore(sw.Store(url), 1, fallback=False)["w"], state(1)["w"])
    np.testing.assert_array_equal(sw.restore(url, fallback=True)["w"], state(2)["w"])


def test_a_path_in_a_root_is_no_checkpoint(url: str) -> None:
    with sw.CheckpointManager(url) as mgr:
        mgr.save(1, {"x": 1}).result()
    for name in ("step_00000001", "new"):
        with pytest.raises(sw.MisuseError, match="is in a root"):
            sw.save(f"{url}/{name}", {"x": 2}, exists="replace")
    assert sw.restore(url) == {"x": 1}


def test_deleted_objects_are_reported(url: str, server: dict[str, str]) -> None:
    import boto3  # moto has it

    with sw.CheckpointManager(url) as mgr:
        for step in (1, 2):
            mgr.save(step, {"x": step}).result()
    client = boto3.client("s3", endpoint_url=server["AWS_ENDPOINT_URL"])
    prefix = url[len("s3://bucket/") :]

    def delete(part: str) -> None:
        found = client.list_objects_v2(Bucket="bucket", Prefix=prefix)["Contents"]
        for key in [one["Key"] for one in found if part in one["Key"]]:
            client.delete_object(Bucket="bucket", Key=key)

    delete("/00000002.")
    assert [(one.number, one.step) for one in sw.inspect(url)] == [(1, 1), (2, None)]
    assert sw.restore(url) == {"x": 1}
    delete("/ledger/")
    for call in (sw.CheckpointManager, sw.restore, sw.inspect):
        with pytest.raises(sw.CorruptCheckpoint, match="ledger of this root was deleted"):
            call(url)


@pytest.mark.parametrize("endpoint", ["localhost:1", ""])
def test_an_endpoint_without_a_scheme_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(sw.MisuseError, match="is no URL"):
        sw.restore(url)


def test_commands_take_urls(url: str, tmp_path: Path) -> None:
    with sw.CheckpointManager(url) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, state(step)).result()
        mgr.add_metrics(3, {"score": 0.5})

    def told(*arguments: str, status: int = 0) -> str:
        done = process(*arguments)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "3 steps" in told("ls", url)
    assert "float32 [5242880]" in told("show", f"{url}@2")
    assert told("verify", "--all", url).count("whole: step") == 3
    told("cp", f"{url}@3", str(tmp_path / "copied"))
    assert sw.metadata(tmp_path / "copied").metrics == {"score": 0.5}
    told("cp", str(tmp_path / "copied"), f"{url}-copied")
    assert "no difference" in told("diff", f"{url}@3", f"{url}-copied")
    told("export", f"{url}@1", str(tmp_path / "one.safetensors"))
    told("rm", "--yes", url, "1")
    told("rewind", "--yes", url, "2")
    listed = json.loads(told("ls", "--json", url))
    (branch,) = listed["branches"]
    assert (listed["root"], [one["label"] for one in branch["steps"]]) == (url, ["step_00000003"])
    told("rm", "--yes", "--branch", branch["branch"], url)
    assert not json.loads(told("ls", "--json", url))["branches"]
    assert [one.step for one in sw.inspect(url)] == [2]
    assert "every promise holds" in told("doctor", "--mib", "1", url)


def test_steps_are_exported_to_a_disk(url: str, tmp_path: Path) -> None:
    exports = [sw.Export(tmp_path / "hf-{step}", keep=1)]
    with sw.CheckpointManager(url, exports=exports) as mgr:
        for step in (1, 2):
            mgr.save(step, state(step)).result()
            mgr.wait_until_finished()
    assert [path.name for path in tmp_path.iterdir()] == ["hf-2"]
    np.testing.assert_array_equal(sw.restore(tmp_path / "hf-2")["w"], state(2)["w"])


def test_a_resumed_run_is_compared_with_the_first_one(url: str) -> None:
    def train(first: int, last: int, noise: float = 0.0) -> None:
        with sw.CheckpointManager(url, prove_resume=2) as mgr:
            state, start = mgr.resume({"w": np.zeros(4)})
            assert start == first
            for step in range(start, last):
                state["w"] += 1.0 + noise
                mgr.trace(step, state)
                if step == 2:
                    mgr.save(step, state).result()

    train(0, 6)
    train(3, 6)
    assert sw.compare_traces(url)
    train(3, 6, noise=0.5)
    assert not sw.compare_traces(url)
    assert process("trace", url).returncode == 1


SHARDED = """
rows = np.arange(64, dtype=np.float32).reshape(16, 4)
def mine(step):
    first, end = 16 * RANK // WORLD, 16 * (RANK + 1) // WORLD
    return {"w": sw.sharding.LocalShard(rows[first:end] + step, (16, 4), (first, 0))}
with sw.CheckpointManager(
    sys.argv[5], coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, "job", path=ROOT), retention=2
) as mgr:
    start = mgr.next_step()
    if start:
        found = mgr.restore(like=mine(0))["w"].local
        np.testing.assert_array_equal(found, mine(start - 1)["w"].local)
    for step in range(start, start + 3):
        mgr.save(step, mine(step)).result()
"""


def test_ranks_save_together_and_other_ranks_restore(url: str, tmp_path: Path) -> None:
    for world in (3, 2):
        meeting = tmp_path / f"meeting of {world}"
        meeting.mkdir()
        run(tmp_path, SHARDED, world, meeting, url)
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    np.testing.assert_array_equal(sw.restore(url)["w"], rows + 5)
    assert [one.step for one in sw.inspect(url)] == [4, 5]


def test_ranks_of_a_node_write_files_of_their_own(url: str, tmp_path: Path) -> None:
    script = SHARDED.replace("retention=2", "retention=2, options=sw.Options(files_per='node')")
    run(tmp_path, script, 2, tmp_path, url)
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    np.testing.assert_array_equal(sw.restore(url)["w"], rows + 2)
    names = [name for name, *_ in _core.stored_objects(url_of(url, "the root"))]
    data = [name for name in names if name.startswith("00000002.") and name.endswith(".data")]
    assert len(data) == 2, names


@pytest.mark.parametrize("keys", [24, pytest.param(1000, marks=longer)])
def test_one_of_16_racing_creates_wins_for_each_key(url: str, keys: int) -> None:
    found = {name: (holds, detail) for name, holds, detail in _core.probe_store(url_of(url, "x"), keys)}
    assert found["create_race"] == (True, f"1 of 16 creates of one key won, for each of {keys} keys")
    assert all(holds for holds, _ in found.values()), found


def test_credentials_come_from_a_function(
    url: str, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)

    @dataclass
    class Vault:  # it has no hash
        calls: list[str]

        def __call__(self) -> dict[str, Any]:
            self.calls.append(threading.current_thread().name)
            expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
            return {
                "access_key_id": "someone",
                "secret_access_key": "wonderful-secret",
                "expires_at": expires,
            }

    give = Vault([])
    store = sw.Store(url, endpoint=server["AWS_ENDPOINT_URL"], region="us-east-1", credentials=give)
    with sw.CheckpointManager(store) as mgr:
        mgr.save(1, state(1)).result()
    np.testing.assert_array_equal(sw.restore(store)["b"], state(1)["b"])
    assert give.calls == ["stepwell-credentials"]
    assert "secret" not in repr(store)


def test_a_failed_function_of_credentials_is_told(url: str, server: dict[str, str]) -> None:
    def fail() -> dict[str, Any]:
        raise PermissionError("the token has expired: log in")

    store = sw.Store(url, endpoint=server["AWS_ENDPOINT_URL"], region="us-east-1", credentials=fail)
    with pytest.raises(sw.StorageError, match="the token has expired: log in"):
        sw.restore(store)
    store = sw.Store(
        url, endpoint=server["AWS_ENDPOINT_URL"], region="us-east-1", credentials=lambda: {"token": "hidden"}
    )
    with pytest.raises(sw.StorageError, match="access_key_id and secret_access_key") as caught:
        sw.restore(store)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("by_boto3", [True, False])
def test_keys_come_from_a_profile_of_the_shared_files(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_boto3: bool
) -> None:
    from stepwell import _store

    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = someone\naws_secret_access_key = wonderful-secret\n"
    )
    (tmp_path / "config").write_text("[profile work]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    if not by_boto3:
        monkeypatch.setattr(_store.importlib.util, "find_spec", lambda _: None)
    _store._of_profile.cache_clear()
    sw.save(sw.Store(url, profile="work"), {"x": 1})
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert sw.restore(url) == {"x": 1}
    # Keys in variables count before a profile in one.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wonderful-secret")
    assert _store._default_profile() is None


@pytest.mark.parametrize(
    ("root", "options", "message"),
    [
        ("s3://bucket/run", {"coordinator": sw.coordinators.SharedDirectory(0, 2, "job")}, "pass path="),
    ],
)
def test_what_is_not_there_is_refused(url: str, root: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.MisuseError, match=message):
        sw.CheckpointManager(root, **options)
