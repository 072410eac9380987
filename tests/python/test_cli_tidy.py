"""Commands that clean up, and dry runs: plan, prune, rm, gc, rewind, cp."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import document, flip_a_bit, make_root, process, run, state

UNIQUE = "0123456789abcdef" * 2


def steps(root: Path) -> list[int]:
    """Those that are there."""
    return [step["step"] for step in document("ls", root, code=None)["steps"]]


def decided(found: dict[str, Any]) -> dict[int, str]:
    """Returns the decisions by step."""
    return {row["step"]: row["decision"] for row in found["decisions"]}


def test_prune_keeps_what_any_option_says_and_deletes_the_rest(root: Path) -> None:
    make_root(root, steps=6)
    sw.add_metrics(root, 10, {"score": 0.9})
    options = [
        "--keep-latest",
        1,
        "--keep-every",
        20,
        "--items",
        "params",
        "--keep-best",
        "score",
        "--mode",
        "max",
    ]
    planned = document("prune", root, *options, "--dry-run")
    assert decided(planned) == {0: "thin", 10: "keep", 20: "thin", 30: "delete", 40: "thin", 50: "keep"}
    assert steps(root) == [0, 10, 20, 30, 40, 50]
    done = document("prune", root, "-y", *options)
    assert decided(done) == decided(planned)
    assert done["deleted"] == [30]
    assert done["thinned"] == [0, 20, 40]
    assert done["bytes_freed"] == planned["bytes_freed"] > 0
    assert steps(root) == [0, 10, 20, 40, 50]
    assert [item["name"] for item in document("ls", root)["steps"][0]["items"]] == ["params"]
    assert not list(root.glob(".trash-*"))
    with sw.open(root, 20) as checkpoint:
        assert np.array_equal(checkpoint["params"]["w"][...], state(20)["params"]["w"])


def test_prune_deletes_by_age(root: Path) -> None:
    make_root(root)
    assert document("prune", root, "-y", "--keep-newer-than", "1d")["deleted"] == []
    assert document("prune", root, "-y", "--keep-newer-than", "0s")["deleted"] == [0, 10]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "say what stays"),
        (["--items", "params"], "--keep-every"),
        (["--keep-best", "loss"], "--mode"),
        (["--mode", "min"], "--keep-best"),
        (["--keep-latest", "-1"], "-1"),
        (["--keep-latest", "0"], "0"),
        (["--keep-best", "los", "--mode", "min"], "the steps have `loss`"),
        (["--keep-every", "0"], "0"),
        (["--keep-newer-than", "soon"], "is no length of time"),
    ],
)
def test_options_that_cannot_be_meant_delete_nothing(root: Path, options: list[str], word: str) -> None:
    make_root(root)
    result = run("prune", root, "-y", *options)
    assert result.exit_code == 2
    assert word in result.stderr
    assert steps(root) == [0, 10, 20]


def test_prune_refuses_a_step_that_does_not_exist(root: Path) -> None:
    make_root(root)
    for options in (["-y"], ["--dry-run"]):
        result = run("prune", root, *options, "--keep-step", 77, "--keep-step", 10)
        assert result.exit_code == 1
        assert "has no step 77; `stepwell ls` lists the steps" in result.stderr
        assert steps(root) == [0, 10, 20]


def test_prune_neither_counts_nor_deletes_a_damaged_step(root: Path) -> None:
    make_root(root)
    (root / "step_00000010" / "i0" / "00000.data").unlink()
    found = document("prune", root, "-y", "--keep-latest", 1)
    assert found["damaged"] == [10]
    assert decided(found) == {0: "delete", 20: "keep"}
    assert (root / "step_00000010").is_dir()


def test_prune_keeps_a_step_until_its_reader_is_done(root: Path) -> None:
    make_root(root)
    with sw.open(root, 0) as checkpoint:
        found = document("prune", root, "-y", "--keep-latest", 1)
        assert (found["deleted"], found["held"]) == ([10], [0])
        assert np.array_equal(checkpoint["params"]["w"][...], state(0)["params"]["w"])
        assert steps(root) == [0, 20]
    assert document("prune", root, "-y", "--keep-latest", 1)["deleted"] == [0]
    assert steps(root) == [20]
    assert not list(root.glob(".trash-*"))


def test_a_step_that_is_read_is_not_thinned_and_that_is_said(root: Path) -> None:
    make_root(root)
    with sw.open(root, 10):
        found = document("prune", root, "-y", "--keep-every", 10, "--items", "params")
    assert found["thinned"] == [0]
    assert found["held"] == [10]


def test_gc_deletes_what_dead_writers_left_and_nothing_else(root: Path) -> None:
    make_root(root, steps=4)
    with sw.CheckpointManager(root) as manager:
        manager.rewind(20, "old")
    dead = [f".tmp-00000040-{UNIQUE}-3", f".trash-00000000-{UNIQUE}"]
    for name in (*dead, ".trash-of-somebody-else", f".quarantine-step_00000001-{UNIQUE}"):
        (root / name).mkdir()
        (root / name / "file").write_bytes(b"x" * 100)
    planned = document("gc", root, "--dry-run")
    assert sorted(one["name"] for one in planned["deleted"]) == sorted(dead)
    assert planned["bytes_freed"] == 200
    assert all((root / name).exists() for name in dead)
    found = document("gc", root)
    assert sorted(one["name"] for one in found["deleted"]) == sorted(dead)
    assert found["bytes_freed"] == 200
    assert not any((root / name).exists() for name in dead)
    assert {one["name"] for one in found["kept"]} == {
        ".branch-old.step_00000030",
        f".quarantine-step_00000001-{UNIQUE}",
    }
    assert (root / ".trash-of-somebody-else" / "file").exists()
    assert steps(root) == [0, 10, 20]
    assert document("gc", root)["bytes_freed"] == 0


def test_rewind_sets_the_newer_steps_aside_and_keeps_them(root: Path) -> None:
    make_root(root)
    assert document("rewind", root, 0, "--dry-run")["moved"] == [10, 20]
    assert steps(root) == [0, 10, 20]
    found = document("rewind", root, 0, "--branch", "old", "-y")
    assert found["moved"] == [10, 20]
    assert found["branch"] == "old"
    assert steps(root) == [0]
    assert (root / ".branch-old.step_00000020" / "manifest.json").is_file()
    again = document("rewind", root, 0, "-y")
    assert again["moved"] == []
    assert again["branch"] is None


def test_rewind_to_what_is_not_there_or_not_whole_moves_nothing(root: Path) -> None:
    make_root(root)
    (root / "step_00000010" / "i0" / "00000.data").unlink()
    for more in (["--yes"], ["--dry-run"]):
        assert document("rewind", root, 5, *more, code=1)["error"]["kind"] == "step_not_found"
        assert document("rewind", root, 10, *more, code=1)["error"]["kind"] == "corrupt_checkpoint"
    assert run("rewind", root, 0, "-y", "--branch", "a/b").exit_code == 2
    assert steps(root) == [0, 10, 20]


def test_a_plan_says_what_a_restore_would_read(root: Path) -> None:
    make_root(root)
    found = document("plan", f"{root}@10", "--include", "params/**", "--cast", "params/w=float64")
    assert found["fits"]
    assert found["restore"]["step"] == 10
    assert [item["name"] for item in found["restore"]["items"]] == ["params"]
    assert {"path": "params/w", "stored": "float32", "wanted": "float64"} in found["report"]["cast"]
    assert "optimizer/m" in found["report"]["left_out"]


def test_a_plan_of_another_checkpoint_lists_every_difference(root: Path, tmp_path: Path) -> None:
    make_root(root)
    sw.save(tmp_path / "other", {"params": {"weight": np.zeros((3, 4), np.float32), "b": np.zeros(5)}})
    found = document("plan", root, "--like", tmp_path / "other", code=1)
    assert not found["fits"]
    assert found["restore"] is None
    assert [row["path"] for row in found["report"]["missing"]] == ["params/weight"]
    assert [row["path"] for row in found["report"]["wrong_shape"]] == ["params/b"]
    options = [
        "--like",
        tmp_path / "other",
        "--rename",
        "params/w=params/weight",
        "--unexpected",
        "ignore",
        "--resize",
        "pad",
    ]
    found = document("plan", root, *options)
    assert found["report"]["renamed"] == [{"stored": "params/w", "wanted": "params/weight"}]
    assert found["report"]["resized"][0]["path"] == "params/b"


@pytest.mark.parametrize(
    "options",
    [
        ["--rename", "a=b"],
        ["--cast", "lossy", "--cast", "params/**=float16"],
        ["--cast", "params/**=no_dtype"],
    ],
)
def test_a_plan_that_cannot_be_meant_is_wrong_use(root: Path, options: list[str]) -> None:
    make_root(root)
    assert run("plan", root, *options).exit_code == 2


def test_a_pattern_that_matches_nothing_is_told_with_a_near_one(root: Path) -> None:
    make_root(root)
    result = run("plan", root, "--include", "parms/**")
    assert result.exit_code == 1
    assert "near it is `params`" in result.stdout


CHANGES = [["prune", "--keep-latest", 1], ["rewind", 0], ["rm", 0, 10]]


@pytest.mark.parametrize("arguments", CHANGES, ids=lambda one: one[0])
def test_a_change_asks_with_what_goes_and_how_many_bytes(
    arguments: list[Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_root(root)
    asked: list[str] = []

    def answer(question: str, **_: Any) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr("stepwell._cli.command.is_interactive", lambda: True)
    monkeypatch.setattr("click.confirm", answer)
    result = run(arguments[0], root, *arguments[1:])
    assert result.exit_code == 1
    assert "nothing was changed" in result.stderr
    (question,) = asked
    assert " B" in question or "KiB" in question
    assert steps(root) == [0, 10, 20]


@pytest.mark.parametrize("arguments", CHANGES, ids=lambda one: one[0])
def test_a_change_without_a_terminal_needs_yes(arguments: list[Any], root: Path) -> None:
    make_root(root)
    done = process(arguments[0], root, *arguments[1:])
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert steps(root) == [0, 10, 20]
    assert process(arguments[0], root, *arguments[1:], "--yes").returncode == 0
    assert steps(root) != [0, 10, 20]


def test_rm_deletes_steps_and_reports_what_a_reader_holds(root: Path) -> None:
    make_root(root, steps=4)
    assert document("rm", root, 10, 30, "--dry-run")["bytes_freed"] > 0
    assert steps(root) == [0, 10, 20, 30]
    with sw.open(root, 10):
        found = document("rm", root, 10, 30, "-y", code=1)
    assert found["deleted"] == [30]
    assert [one["step"] for one in found["held"]] == [10]
    assert steps(root) == [0, 10, 20]
    assert document("rm", root, 5, "-y", code=1)["error"]["kind"] == "step_not_found"
    assert run("rm", root, "-y").exit_code == 2
    assert not list(root.glob(".trash-*"))


def test_rm_deletes_a_branch_and_no_other(root: Path) -> None:
    make_root(root, steps=4)
    document("rewind", root, 20, "--branch", "one", "-y")
    document("rewind", root, 0, "--branch", "two", "-y")
    assert document("rm", root, "--branch", "three", "-y", code=1)["error"]["kind"] == "step_not_found"
    found = document("rm", root, "--branch", "two", "-y")
    assert sorted(found["deleted_of_branch"]) == ["step_00000010", "step_00000020"]
    assert found["bytes_freed"] > 0
    assert [one["branch"] for one in document("ls", root)["branches"]] == ["one"]
    assert steps(root) == [0]
    assert not list(root.glob(".trash-*"))


def test_a_branch_that_is_read_keeps_its_files_until_then(root: Path) -> None:
    make_root(root)
    document("rewind", root, 0, "--branch", "old", "-y")
    with sw.open(root / ".branch-old.step_00000010") as checkpoint:
        document("rm", root, "--branch", "old", "-y")
        assert np.array_equal(checkpoint["params"]["w"][...], state(10)["params"]["w"])
        assert [one["live"] for one in document("ls", root)["trash"]] == [True]
        kept = document("gc", root)
        assert len(kept["left"]) == 1
        assert kept["bytes_freed"] == 0
    document("gc", root)
    assert not list(root.glob(".trash-*"))


def files(directory: Path) -> dict[str, bytes]:
    """Returns the files below a directory."""
    return {
        str(one.relative_to(directory)): one.read_bytes() for one in directory.rglob("*") if one.is_file()
    }


def test_cp_copies_every_byte_to_a_path_or_a_root(root: Path, tmp_path: Path) -> None:
    make_root(root)
    found = document("cp", f"{root}@10", tmp_path / "deep" / "copy")
    assert found["destination"] == str(tmp_path / "deep" / "copy")
    assert files(tmp_path / "deep" / "copy") == files(root / "step_00000010")
    assert document("verify", tmp_path / "deep" / "copy")["ok"]
    assert not document("diff", f"{root}@10", tmp_path / "deep" / "copy")["changed"]
    other = tmp_path / "other"
    make_root(other, steps=1)
    assert document("cp", f"{root}@20", other)["step"] == 20
    document("cp", tmp_path / "deep" / "copy", other)
    assert steps(other) == [0, 10, 20]
    assert files(other / "step_00000020") == files(root / "step_00000020")
    assert not list(tmp_path.rglob(".tmp-*"))


def test_cp_takes_later_metrics_and_chosen_items(root: Path, tmp_path: Path) -> None:
    state = {"params": {"w": np.arange(6.0)}, "optimizer": {"m": np.ones(6)}, "step": 3}
    with sw.CheckpointManager(root) as manager:
        manager.save(3, state, metrics={"loss": 1.0})
    sw.add_metrics(root, 3, {"accuracy": 0.5, "loss": 0.25})
    whole = document("cp", root, tmp_path / "whole")
    assert sw.metadata(tmp_path / "whole").metrics == {"accuracy": 0.5, "loss": 0.25}
    found = document("cp", root, tmp_path / "weights", "--include", "params/**")
    assert tuple(found["items"]) == sw.metadata(tmp_path / "weights").items == ("params",)
    assert found["bytes"] < whole["bytes"]
    assert list(sw.restore(tmp_path / "weights")) == ["params"]
    with pytest.raises(KeyError, match="dropped"):
        sw.open(tmp_path / "weights")["optimizer"]
    assert sw.verify(tmp_path / "weights").ok
    document("cp", root, tmp_path / "lean", "--exclude", "optimizer")
    assert set(sw.restore(tmp_path / "lean")) == {"params", "step"}
    assert document("cp", root, tmp_path / "none", "--include", "model", code=2)["error"]["kind"] == "invalid"
    other = tmp_path / "other"
    make_root(other, steps=1)
    document("cp", root, other, "--include", "params")
    with sw.CheckpointManager(other, read_only=True) as manager:
        assert manager.metrics(3)["accuracy"] == 0.5
        assert list(manager.restore(3)) == ["params"]


def test_cp_refuses_an_existing_target(root: Path, tmp_path: Path) -> None:
    make_root(root)
    (tmp_path / "there").mkdir()
    assert run("cp", root, tmp_path / "there").exit_code == 2
    assert document("cp", f"{root}@10", root, code=1)["error"]["kind"] == "step_exists"
    with sw.open(root) as checkpoint, pytest.raises(sw.MisuseError):
        checkpoint.copy(root / "step_00000030")
    assert steps(root) == [0, 10, 20]
    assert list((tmp_path / "there").iterdir()) == []


def test_cp_of_a_damaged_step_makes_no_copy(root: Path, tmp_path: Path) -> None:
    make_root(root, steps=1)
    flip_a_bit(root / "step_00000000" / "i0" / "00000.data", 4100)
    found = document("cp", root, tmp_path / "copy", code=1)
    assert found["error"]["kind"] == "corrupt_checkpoint"
    assert sorted(one.name for one in tmp_path.iterdir()) == [root.name]


def test_an_interrupted_copy_leaves_nothing(root: Path, tmp_path: Path) -> None:
    make_root(root, steps=1)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with sw.open(root) as checkpoint, pytest.raises(KeyboardInterrupt):
        checkpoint.copy(tmp_path / "copy", progress=stop)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".tmp")] == []


def test_a_copy_onto_a_step_names_options_of_the_command(root: Path) -> None:
    make_root(root)
    other = make_root(root.parent / "other")
    result = run("cp", f"{root}@10", other)
    assert result.exit_code == 1
    assert "has a step 10 already: delete it with `stepwell rm`" in result.stderr
    assert "exists=" not in result.stderr


def test_one_step_is_not_called_steps(root: Path) -> None:
    make_root(root)
    assert run("rm", root, 10, "--dry-run").stdout.startswith("would delete step 10 of")
    assert run("rm", root, 10, 20, "--dry-run").stdout.startswith("would delete steps 10, 20 of")


def test_a_command_that_deletes_nothing_shows_no_bar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_root(root)
    with monkeypatch.context() as patched:
        patched.setattr("stepwell._cli.writing.progress", None)
        patched.setattr("stepwell._cli.rm.agreed", lambda *_: False)
        assert run("rm", root, 10, "-y").exit_code == 1
    assert steps(root) == [0, 10, 20]


def test_a_full_disk_points_to_the_page_about_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_root(root)

    def full(*_: Any, **options: Any) -> Any:
        raise sw.errors.from_engine("io", "writing .epoch.new failed", {"errno": errno.ENOSPC})

    monkeypatch.setattr("stepwell._cli.writing.manager_of", full)
    result = run("rm", root, 10, "-y")
    assert result.exit_code == 1
    heading = "When a manager or a checkpoint is opened"
    assert heading in result.stderr
    page = Path(__file__).resolve().parents[2] / "docs" / "guide" / "troubleshooting.md"
    assert f"## {heading}" in page.read_text()


@pytest.mark.parametrize("step", ["x", "-1", ""])
def test_a_target_without_a_number_is_refused(root: Path, step: str) -> None:
    make_root(root)
    result = run("show", f"{root}@{step}")
    assert result.exit_code == 2
    assert "is no step number" in result.stderr
    assert "no root" not in result.stderr


def test_a_list_of_roots_that_goes_on_says_so(tmp_path: Path) -> None:
    for number in range(7):
        sw.CheckpointManager(tmp_path / f"run{number}").close()
    assert "run0, run1, run2, run3, run4, …: pass that path" in run("ls", tmp_path).stderr


def test_a_missing_leaf_is_not_near_itself(tmp_path: Path) -> None:
    sw.save(tmp_path / "one", {"params": {"embed": np.ones(3), "head": np.ones(3)}})
    result = run("plan", tmp_path / "one", "--like", tmp_path / "one", "--rename", "params/embed=params/head")
    assert result.exit_code == 1
    assert "near it is stored `params/embed`" not in result.stdout
