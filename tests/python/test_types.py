"""The public interface under a type checker, and the lint of ``Any``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mypy import api

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lint"))

import any_types

PACKAGE = any_types.PACKAGE


def checked(tmp_path: Path, source: str) -> list[str]:
    """The errors and revealed types of a program, one a line."""
    program = tmp_path / "program.py"
    program.write_text(f"import numpy as np\nimport stepwell as sw\n\n{source}\n")
    cache = PACKAGE.parents[1] / ".mypy_cache"
    out, errors, _ = api.run(["--strict", f"--cache-dir={cache}", str(program)])
    assert not errors
    return [line.split(": ", 1)[1] for line in out.splitlines() if line.startswith(str(program))]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("sw.keep_lastest(3)", "keep_lastest"),
        ('sw.CheckpointManager("runs/a", retentoin=3)', "retentoin"),
        ("sw.Options(chunk_byte=1)", "chunk_byte"),
        ('sw.Options(engine="urin")', "engine"),
        ('sw.restore("runs/a", includ="params")', "includ"),
        ('sw.CheckpointManager("runs/a").save(0, {}, exist="skip")', "exist"),
        ('sw.CheckpointManager("runs/a").save(0, {}, exists="skipp")', "exists"),
        ('sw.CheckpointManager("runs/a", coordinator="aut")', "coordinator"),
        ('sw.CheckpointManager("runs/a").resume({}, into={})', "into"),
        ('sw.CheckpointManager("runs/a").save(0, {}, metrics={"loss": "low"})', '"str": "str"'),
        ('sw.restore("runs/a", into={}, like={})', "overload"),
        ('sw.CheckpointManager("runs/a").restore_async(into={}, like={})', "overload"),
        ('sw.open("runs/a").restore(into={}, like={})', "overload"),
        ('sw.open("runs/a").plan(cast="lossles")', "cast"),
        ("sw.keep_every(steps=3, seconds=5.0)", "keep_every"),
        ("sw.keep_every()", "keep_every"),
    ],
)
def test_a_misspelt_name_is_a_type_error(tmp_path: Path, source: str, error: str) -> None:
    errors = [line for line in checked(tmp_path, source) if line.startswith("error")]
    assert errors
    assert error in errors[0]


def test_a_restore_has_the_type_of_the_given_state(tmp_path: Path) -> None:
    found = checked(
        tmp_path,
        """
state = {"w": np.zeros(3), "step": 0}
mgr = sw.CheckpointManager("runs/a", retention=sw.keep_latest(3), on_event=print)
reveal_type(sw.restore("runs/a", into=[1.0]))
reveal_type(mgr.restore(into={"a": 1}))
reveal_type(mgr.restore(into=[1.0], return_report=True)[1])
reveal_type(mgr.resume((state, "a"))[1])
reveal_type(mgr.resume([1.0])[0])
reveal_type(mgr.restore_async(into=[1.0]).result())
reveal_type(mgr.restore_async(into=[1.0], return_report=True).result()[1])
mgr.save(1, state, metrics={"loss": np.float32(1), "size": np.zeros(()), "n": 3})
reveal_type(mgr.plan_retention()[0].reasons)
reveal_type(sw.register(sw.Options))
""",
    )
    assert [line.removeprefix('note: Revealed type is "').removesuffix('"') for line in found] == [
        "list[float]",
        "dict[str, int]",
        "stepwell._restore.report.RestoreReport",
        "int",
        "list[float]",
        "list[float]",
        "stepwell._restore.report.RestoreReport",
        "tuple[str, ...]",
        "type[stepwell._options.Options]",
    ]


def test_any_cannot_grow_back() -> None:
    assert len(any_types.found()) <= any_types.LIMIT
    assert any_types.unexplained() == []
    assert list(any_types.lines_with_any("from typing import Any\nx: Any = f(Any)\ny = 'Any'\n")) == [2]
