"""Arguments that name a place or a step: URLs, states in place of a step, keywords of others."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pydoc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import process

URLS = ["hdfs://n/x", "weird+thing://x", "https://b/x"]


def entry_points() -> dict[str, Callable[[Any], Any]]:
    return {
        "manager": sw.CheckpointManager,
        "save": lambda at: sw.save(at, {"x": 1}),
        "save_async": lambda at: sw.save_async(at, {"x": 1}),
        "restore": sw.restore,
        "open": sw.open,
        "verify": sw.verify,
        "watch": lambda at: list(sw.watch(at, timeout=0)),
        "metadata": sw.metadata,
        "add_metrics": lambda at: sw.add_metrics(at, 1, {"x": 1.0}),
        "engine_info": sw.engine_info,
        "shared directory": lambda at: sw.coordinators.SharedDirectory(0, 1, "job", path=at),
    }


@pytest.mark.parametrize("name", sorted(entry_points()))
def test_a_url_is_refused_and_nothing_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in [*URLS, Path("s3://b/x"), "dbfs:/x", "s3:b/x", "GS:/b"]:
        with pytest.raises(sw.MisuseError, match="is a URL"):
            entry_points()[name](url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "pass a bucket"),
        ("S3://bucket", "pass a bucket"),
        ("gs://bucket//run", "pass a bucket"),
        ("az://bucket/../run", "pass a bucket"),
        ("s3://key:secret@bucket/run", "may be a password"),
        ("abfss://user:secret@account.dfs.core.windows.net/run", "may be a password"),
    ],
)
def test_a_url_of_a_store_is_checked_without_a_request(url: str, message: str) -> None:
    for call in (sw.CheckpointManager, sw.open, sw.Store):
        with pytest.raises(sw.MisuseError, match=message):
            call(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "a", "anonymous": True}, "takes one of"),
        ({"credentials": {"token": "x"}}, "is a function"),
        ({"part_bytes": 1}, "part_bytes"),
        ({"checksum": "crc32c"}, "checksum"),
    ],
)
def test_settings_of_a_store_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.MisuseError, match=message):
        sw.Store("s3://bucket/run", **options)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    sw.save(f"file://{tmp_path}/a%20b", {"x": 1})
    assert sw.restore(tmp_path / "a b") == {"x": 1}
    with pytest.raises(sw.MisuseError, match="another host"):
        sw.restore("file://elsewhere/x")


def test_a_file_url_has_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("file:runs/x", "file:", "FILE:x", "file://"):
        with pytest.raises(sw.MisuseError, match="without an absolute path"):
            sw.save(url, {"x": 1})
    assert list(tmp_path.iterdir()) == []
    sw.save(f"file:{tmp_path}/one", {"x": 1})
    sw.save("./file:one", {"x": 2})
    assert sw.restore(tmp_path / "one") == {"x": 1}
    assert sw.restore(tmp_path / "file:one") == {"x": 2}


def test_only_names_of_steps_are_refused_in_a_root(root: Path) -> None:
    sw.CheckpointManager(root).close()
    for name in ("step_00000007", "7"):
        with pytest.raises(sw.MisuseError, match="has its steps"):
            sw.save(root / name, {"x": 1})
    sw.save(root / "final", {"x": 1})
    assert sw.restore(root / "final") == {"x": 1}


def test_the_command_line_refuses_urls() -> None:
    result = process("ls", "hdfs://b/x")
    assert result.returncode == 2, result.stderr
    assert "is a URL" in result.stderr


def test_keywords_of_other_libraries_name_ours(tmp_path: Path) -> None:
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: sw.CheckpointManager(tmp_path / "r", max_to_keep=3), "retention=sw.keep_latest"),  # type: ignore[call-arg]
        (lambda: sw.save(tmp_path / "c", {"x": 1}, overwrite=True), 'exists="replace"'),  # type: ignore[call-arg]
        (lambda: sw.restore(tmp_path / "c", abstract_state={}), "like="),  # type: ignore[call-arg]
        (lambda: sw.restore(tmp_path / "c", {"x": 1}), "into="),  # type: ignore[arg-type]
    ]
    for call, ours in calls:
        with pytest.raises(sw.MisuseError, match=re.escape(ours)):
            call()


def test_a_state_in_place_of_a_step_is_told_of_into(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"x": 1}).result()
        with pytest.raises(sw.MisuseError, match="into="):
            manager.restore({"x": 1})  # type: ignore[arg-type]


def test_restore_takes_the_best_step(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        with pytest.raises(sw.StepNotFound):
            manager.restore(best=("loss", "min"))
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            manager.save(step, {"x": step}, metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.restore(best=("loss", "min")) == {"x": 1}
        with pytest.raises(sw.MisuseError, match="no committed step has the metric `los`"):
            manager.restore(best=("los", "min"))
        with pytest.raises(sw.MisuseError, match="not both"):
            manager.restore(1, best=("loss", "min"))


def test_values_with_a_plain_form_are_refused_with_it(tmp_path: Path) -> None:
    for value, advice in [(argparse.Namespace(lr=0.1), "vars(args)"), (tmp_path, "str()")]:
        with pytest.raises(sw.UnsupportedLeaf, match=re.escape(advice)) as caught:
            sw.save(tmp_path / "c", {"args": value})
        assert caught.value.leaf == "args"


def test_a_commit_logs_one_line(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def committed() -> list[str]:
        return [one.getMessage() for one in caplog.records if "committed" in one.getMessage()]

    with caplog.at_level(logging.INFO, "stepwell"):
        with sw.CheckpointManager(root) as manager:
            manager.save(1200, {"x": np.zeros(1000)}).result()
        sw.save(root.parent / "single", {"x": 1})
        end = time.monotonic() + 30
        while len(committed()) < 2 and time.monotonic() < end:  # a thread logs
            time.sleep(0.01)
    took = r"\(\d+\.\d kB in \d+\.\d\d s\)"
    of_the_step, of_the_checkpoint = committed()
    assert re.fullmatch(rf"committed step 1200 {took} to {root}", of_the_step)
    assert re.fullmatch(rf"committed a checkpoint {took} to {root.parent / 'single'}", of_the_checkpoint)


def test_a_symlink_to_a_checkpoint_or_step_is_followed(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(7, {"x": 7}).result()
    sw.save(root.parent / "single", {"x": 1})
    for number, (target, value) in enumerate([(root / "step_00000007", 7), (root.parent / "single", 1)]):
        link = root.parent / f"link{number}"
        link.symlink_to(target)
        assert sw.restore(link) == {"x": value}
        with sw.open(link) as checkpoint:
            assert checkpoint["x"] == value
        assert sw.verify(link).ok
        assert sw.metadata(link).nbytes == 0
        shown = process("show", link)
        assert shown.returncode == 0, shown.stderr
        with pytest.raises(sw.MisuseError, match="symlink"):
            sw.save(link, {"x": 2}, exists="replace")
        assert link.is_symlink()
        assert sw.restore(target) == {"x": value}


def test_the_global_generator_of_numpy_is_a_leaf(tmp_path: Path) -> None:
    np.random.seed(1)
    sw.save(tmp_path / "c", {"rng": np.random, "x": 1})
    drawn = np.random.normal(size=3)
    np.random.seed(2)
    sw.restore(tmp_path / "c", into={"rng": np.random, "x": 0})
    assert (np.random.normal(size=3) == drawn).all()


def test_a_read_only_manager_needs_no_coordinator(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(3, {"x": 1}).result()
    for name in ("SLURM_NTASKS", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
        with pytest.raises(sw.MisuseError, match=name):
            sw.CheckpointManager(root)
        with sw.CheckpointManager(root, read_only=True) as manager:
            assert manager.restore() == {"x": 1}
        monkeypatch.delenv(name)


def test_the_help_of_options_describes_each_of_them() -> None:
    text = pydoc.render_doc(sw.Options)
    for field in dataclasses.fields(sw.Options):
        assert f"{field.name}: " in text.split("Args:")[1].split("Methods defined")[0], field.name
