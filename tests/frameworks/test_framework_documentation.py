"""The examples of the pages about frameworks, run with the real frameworks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import pages

FRAMEWORKS = "torch torchtitan jax flax optax equinox orbax.checkpoint megatron transformers accelerate lightning keras grain torchdata ignite ray"
for framework in FRAMEWORKS.split():
    pytest.importorskip(framework)


@pytest.mark.parametrize(
    "page", [page for page in pages.PAGES if pages.needs_framework(page)], ids=pages.name
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_examples_of_the_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages.run_page(page, tmp_path)
