"""``sw.repair`` and ``stepwell repair``: a lost or damaged index comes back from the footers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from command_line import document, documented, flip_a_bit, keys, make_root, run
from test_node_files import check, save

DAMAGES = ("deleted", "cut", "flipped")


def indexes(step: Path) -> dict[Path, bytes]:
    found = {file: file.read_bytes() for file in sorted(step.glob("*/index"))}
    assert found
    return found


def damage(step: Path, how: str) -> None:
    for file in indexes(step):
        if how == "deleted":
            file.unlink()
        elif how == "cut":
            file.write_bytes(file.read_bytes()[:-100])
        else:
            flip_a_bit(file, 200)


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_of_one_rank_comes_back(tmp_path: Path, how: str) -> None:
    state = {"params": {"w": np.arange(5000.0), "e": np.zeros((0, 3))}, "opt": [np.arange(3)], "lr": 0.5}
    state["params"]["tied"] = state["params"]["w"]
    sw.save(tmp_path / "one", state)
    before = indexes(tmp_path / "one")
    damage(tmp_path / "one", how)
    with pytest.raises(sw.CorruptCheckpoint):
        sw.restore(tmp_path / "one")
    dry = sw.repair(tmp_path / "one", dry_run=True)
    assert [index.damage is None for index in dry.indexes] == [False] * len(before)
    assert dry.verification is None
    assert not [one for one in tmp_path.rglob(".index*")]
    report = sw.repair(tmp_path / "one")
    assert report.ok
    assert report.verification is not None
    assert report.indexes == dry.indexes
    assert not any(index.recorded for index in report.indexes)
    assert indexes(tmp_path / "one") == before
    assert not [one for one in tmp_path.rglob(".index*")]
    again = sw.restore(tmp_path / "one")
    assert np.array_equal(again["params"]["w"], state["params"]["w"])
    assert again["params"]["tied"] is again["params"]["w"]
    assert again["lr"] == 0.5
    assert not sw.repair(tmp_path / "one").rebuilt


@pytest.mark.parametrize("files_per", ["rank", "node"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_of_four_ranks_comes_back(tmp_path: Path, how: str, files_per: str) -> None:
    root = tmp_path / "run"
    save(root, 4, range(2), files_per=files_per)
    before = indexes(root / "step_00000001")
    damage(root / "step_00000001", how)
    report = sw.repair(root)
    assert report.ok
    assert len(report.rebuilt) == len(before)
    assert indexes(root / "step_00000001") == before
    check(root, 1)
    check(root, 0)


def test_a_damaged_footer_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    step = make_root(tmp_path / "run") / "step_00000020"
    damage(step, "deleted")
    data = sorted(step.glob("*/*.data"))[0]
    flip_a_bit(data, data.stat().st_size - 50)
    with pytest.raises(sw.CorruptCheckpoint) as failure:
        sw.repair(tmp_path / "run")
    assert failure.value.file == str(data)
    assert not list(step.glob("*/index")) + list(step.glob("*/.index*"))


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    step = make_root(tmp_path / "run") / "step_00000010"
    damage(step, "flipped")
    data = sorted(step.glob("*/*.data"))[0]
    data.unlink()
    with pytest.raises(sw.CorruptCheckpoint, match="missing") as failure:
        sw.repair(tmp_path / "run", step=10)
    assert failure.value.file == str(data)


def test_a_damaged_block_is_reported_and_the_old_index_kept(tmp_path: Path) -> None:
    step = make_root(tmp_path / "run") / "step_00000020"
    damage(step, "flipped")
    flip_a_bit(sorted(step.glob("*/*.data"))[0])
    report = sw.repair(tmp_path / "run")
    assert report.rebuilt
    assert not report.ok
    assert report.verification is not None
    assert report.verification.damages[0].block is not None
    assert list(step.glob("*/.index.damaged"))


def test_a_step_without_its_manifest_is_refused_with_the_reason(tmp_path: Path) -> None:
    step = make_root(tmp_path / "run") / "step_00000020"
    flip_a_bit(step / "manifest.json", 40)
    with pytest.raises(sw.CorruptCheckpoint, match="Only the manifest says"):
        sw.repair(step)
    (step / "manifest.json").unlink()
    with pytest.raises(sw.StepNotFound, match="Only a manifest says"):
        sw.repair(tmp_path / "run", step=20)
    assert Path(sw.repair(tmp_path / "run").path).name == "step_00000010"


def test_an_index_in_another_order_is_recorded_in_the_manifest(tmp_path: Path) -> None:
    step = make_root(tmp_path / "run") / "step_00000020"
    # As a leader would have written it that put the parts together otherwise.
    text = (step / "manifest.json").read_text()
    body = re.sub(r'("crc32c": )"\w{8}"', r'\1"00000000"', text[:-23], count=1)
    assert body != text[:-23]
    line = json.dumps({"crc32c": f"{crc32c(body.encode()):08x}"}) + "\n"
    (step / "manifest.json").write_text(body + line)
    with pytest.raises(sw.CorruptCheckpoint):
        sw.restore(step)
    report = sw.repair(step)
    assert report.ok
    assert [index.recorded for index in report.rebuilt] == [True]
    assert (step / "manifest.json").read_text() == text
    assert np.array_equal(sw.restore(step)["params"]["b"], np.zeros(4))


def test_the_command_says_what_it_does_and_exits_by_it(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run")
    assert "every index is intact" in run("repair", root).output, "nothing is asked"
    damage(root / "step_00000010", "cut")
    found = document("repair", root, "--step", "10", "--dry-run")
    assert keys(found) == documented("repair")
    assert found["indexes"][0]["damage"]
    assert run("verify", f"{root}@10").exit_code == 1
    assert run("repair", f"{root}@10").exit_code == 2
    done = run("repair", f"{root}@10", "--yes")
    assert done.exit_code == 0
    assert "rebuilt" in done.output
    assert run("verify", f"{root}@10").exit_code == 0
    damage(root / "step_00000020", "deleted")
    data = sorted((root / "step_00000020").glob("*/*.data"))[0]
    flip_a_bit(data, data.stat().st_size - 50)
    failed = run("repair", root, "--yes")
    assert failed.exit_code == 1
    assert data.name in failed.output


def test_a_newer_step_without_a_manifest_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run")
    (root / "step_00000020" / "manifest.json").write_text("{")
    for options in (["--dry-run"], ["-y"]):
        found = document("repair", root, *options, code=1)
        assert found["path"].endswith("step_00000010")
        assert [row["name"] for row in found["passed_over"]] == ["step_00000020"]
        assert run("repair", root, *options).stderr.count("passing over step_00000020") == 1
    (root / "step_00000000" / "manifest.json").write_text("{")
    report = sw.repair(root)
    assert report.ok
    assert [name for name, _ in report.passed_over] == ["step_00000020"]
    assert document("repair", f"{root}@10", "-y")["passed_over"] == []
