"""``stepwell report``: one file that needs nothing, and in which a name is never markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import document, make_root, run
from safetensors.numpy import save_file
from stepwell._cli.report_page import embedded, page

HOSTILE = (
    "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">&amp;$DATA${x}"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def written(*arguments: Any, to: Path) -> str:
    """The report of a command."""
    assert run("report", *arguments, "-o", to).exit_code == 0
    return to.read_text(encoding="utf-8")


def inside(text: str) -> dict[str, Any]:
    """The data of a report, as the browser finds it: from the element's begin to the first end."""
    start = text.index('<script type="application/json" id="data">')
    body = text[text.index(">", start) + 1 : text.index("</script", start)]
    found: dict[str, Any] = json.loads(body)
    return found


def test_a_report_asks_for_nothing_from_anywhere(root: Path, tmp_path: Path) -> None:
    text = written(make_root(root), to=tmp_path / "report.html")
    data = text[text.index('id="data"') :]
    markup = text.replace(data[: data.index("</script>")], "")
    assert not re.findall(r"https?:|\bsrc=|@import|url\(", markup)
    assert re.findall(r'href="([^"]*)"', markup) == ["data:,"]
    assert "default-src 'none'" in text
    assert "unsafe" not in text


def test_a_report_of_a_root_has_steps_metrics_and_retention(root: Path, tmp_path: Path) -> None:
    make_root(root)
    options = ["--keep-latest", 1, "--keep-best", "loss", "--mode", "max"]
    data = inside(written(root, *options, to=tmp_path / "report.html"))
    assert [(step["step"], step["decision"]) for step in data["root"]["steps"]] == [
        (0, "keep"),
        (10, "delete"),
        (20, "keep"),
    ]
    assert data["root"]["retention"] == "--keep-latest 1 --keep-best loss --mode max"
    assert data["root"]["steps"][0]["metrics"] == {"loss": 1.0}
    checkpoint = data["checkpoint"]
    assert checkpoint["step"] == 20
    leaf, chunk = checkpoint["leaf"], checkpoint["chunk"]
    assert leaf["path"][:3] == ["params/w", "params/b", "params/head"]
    assert leaf["tied"][2] == 0
    assert sum(leaf["stored"]) == sum(chunk["bytes"])
    assert len({len(column) for column in chunk.values()}) == 1
    assert len({len(column) for column in checkpoint["node"].values()}) == 1
    assert inside(written(f"{root}@0", to=tmp_path / "report.html"))["checkpoint"]["step"] == 0


def test_a_report_of_a_single_checkpoint_has_no_root(tmp_path: Path) -> None:
    sw.save(tmp_path / "one", {"a": np.zeros(3)})
    data = inside(written(tmp_path / "one", to=tmp_path / "report.html"))
    assert data["root"] is None
    assert data["checkpoint"]["leaf"]["path"] == ["a"]
    assert run("report", tmp_path / "one", "-o", tmp_path / "r.html", "--keep-latest", 1).exit_code == 2


@pytest.mark.parametrize("value", [np.zeros(3), 5, {}, []], ids=["array", "object", "dict", "list"])
def test_a_state_that_is_one_leaf_or_nothing_has_a_report(tmp_path: Path, value: Any) -> None:
    sw.save(tmp_path / "one", value)
    data = inside(written(tmp_path / "one", to=tmp_path / "report.html"))
    assert len(data["checkpoint"]["leaf"]["path"]) == (0 if isinstance(value, (dict, list)) else 1)
    assert run("show", tmp_path / "one").exit_code == 0


def test_a_root_of_unreadable_steps_has_a_report(root: Path, tmp_path: Path) -> None:
    make_root(root, steps=1)
    (root / "step_00000000" / "i0" / "00000.data").unlink()
    found = document("report", root, "-o", tmp_path / "report.html", code=1)
    assert found["unread"]
    data = inside((tmp_path / "report.html").read_text())
    assert data["checkpoint"] is None
    assert "is missing" in data["root"]["steps"][0]["damage"]


def test_a_name_stays_text_whatever_it_is(root: Path, tmp_path: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        state = {HOSTILE: {HOSTILE: np.zeros(3), "<!--": np.zeros(2), "\u2028\x00": 1}}
        manager.save(0, state, metrics={HOSTILE: 1.0}, custom_metadata={HOSTILE: HOSTILE})
    text = written(root, to=tmp_path / "report.html")
    data = inside(text)
    escaped = HOSTILE.replace("/", "\\/")
    assert f"{escaped}/{escaped}" in data["checkpoint"]["leaf"]["path"]
    assert list(data["root"]["steps"][0]["metrics"]) == [HOSTILE]
    assert "document.title" not in text.replace(text[text.index('id="data"') :].split("</script>")[0], "")
    assert text.count("<script") == text.count("</script>") == 2
    assert "<!--" not in text.split("<body>")[1]


def test_embedded_data_round_trips_and_ends_no_element() -> None:
    for text in (HOSTILE, "<!--<script>", "]]>", "\u2028\u2029", "\ud800", "&lt;", "𝔘"):
        made = embedded({text: [text]})
        assert "<" not in made
        assert "&" not in made
        assert json.loads(made) == {text: [text]}
    title = page(HOSTILE, {}).split("<title>")[1].split("</title>")[0]
    assert "<" not in title


def test_an_older_report_stays_where_a_new_one_cannot_be_made(root: Path, tmp_path: Path) -> None:
    make_root(root, steps=1)
    out = tmp_path / "report.html"
    written(root, to=out)
    before = out.read_text()
    assert run("report", root.parent / "nothing", "-o", out).exit_code == 1
    assert out.read_text() == before
    assert run("report", root, "-o", tmp_path / "no" / "such" / "report.html").exit_code == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["report.html", "run"]


@pytest.mark.parametrize("name", ["model.safetensors", "notes.html"])
def test_a_report_replaces_nothing_but_a_report(root: Path, tmp_path: Path, name: str) -> None:
    make_root(root, steps=1)
    path = tmp_path / name
    save_file({"w": np.ones(2, np.float32)}, path)
    before = path.read_bytes()
    assert run("report", root, "-o", path).exit_code == 2
    assert path.read_bytes() == before
    assert run("report", root, "-o", tmp_path / "report").exit_code == 2
    assert not (tmp_path / "report").exists()


def test_twenty_thousand_leaves_have_a_report_of_a_few_megabytes(root: Path, tmp_path: Path) -> None:
    state = {
        "params": {f"layer{i}": {f"w{j}": np.zeros(j, np.float32) for j in range(100)} for i in range(200)}
    }
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state)
    begun = time.monotonic()
    text = written(root, to=tmp_path / "report.html")
    assert time.monotonic() - begun < 30
    assert len(inside(text)["checkpoint"]["leaf"]["path"]) == 20_000
    assert len(text) < 4_000_000


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run a script of the page")
def test_the_axis_of_the_chart_of_intervals_has_labels() -> None:
    script = (Path(sw.__file__).parent / "_cli" / "assets" / "advice.js").read_text()
    function = script[script.index("function ticks") : script.index("function adviceChart")]
    cases = {1: [0, 20, 40, 60, 80, 100], 0.257: [0, 5, 10, 15, 20, 25], 0.0066: [0, 0.2, 0.4, 0.6]}
    program = f"{function} console.log(JSON.stringify({list(cases)}.map(ticks)))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=60)
    for found, percents in zip(json.loads(done.stdout), cases.values(), strict=True):
        assert [100 * one for one in found] == pytest.approx(percents)


@pytest.mark.skipif(
    BROWSER is None, reason="no browser here (chromium): whether the page draws itself was not tried"
)
def test_a_browser_draws_the_report_and_runs_nothing_of_a_name(root: Path, tmp_path: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(
                step,
                {HOSTILE: {HOSTILE: np.zeros(300)}, "b": [np.ones(9)]},
                metrics={HOSTILE: 1.0 / (1 + step)},
            )
    out = tmp_path / "report.html"
    written(root, "--keep-latest", 1, to=out)
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=3000", "--dump-dom", out.as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert "<title>run: stepwell</title>" in done.stdout
    for heading in (
        "The run",
        "Sizes of the steps",
        "Metrics",
        "Steps",
        "Step 2",
        "Where the bytes are",
        "Leaves",
        "Where each chunk lies",
    ):
        assert f"<h2>{heading}</h2>" in done.stdout
    assert "This file is complete" in done.stdout
    assert "<img" not in done.stdout.replace("&lt;img", "").split('id="data"')[0]
