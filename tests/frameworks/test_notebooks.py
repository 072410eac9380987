"""The notebooks of the documentation run twice, as their readers are told to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("optax")
pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")
sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from test_notebook import kernel_session

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


@pytest.mark.parametrize(("name", "second"), [("torch", 61), ("jax", 81)])
def test_a_notebook_goes_on_after_a_restart(
    name: str, second: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    for first in (0, second):
        with kernel_session() as run:
            printed = [run("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
        assert not any("Traceback" in one for one in printed), "\n".join(printed)
        assert any(f"steps {first} to {first + 99}" in one for one in printed), printed
