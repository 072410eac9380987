"""The global random generators of a process of torch, as an entry of a state."""

from __future__ import annotations

import random
import re

import numpy as np
import torch

from .._opening import open as open_checkpoint
from .._restore.options import Missing, Unexpected
from .._state.specs import PerRank

#: The generators of CUDA devices in ``{"random": random_numbers()}``, by glob and by path.
_CUDA = "random/*/cuda"
_CUDA_PATH = re.compile(r"random/[^/]+/cuda\b.*")


def random_numbers() -> PerRank[dict[str, object]]:
    """Returns the generators of Python, numpy and torch, also of its CUDA devices."""
    generators: dict[str, object] = {"python": random, "numpy": np.random, "torch": torch.default_generator}
    if torch.cuda.is_available():
        generators["cuda"] = list(torch.cuda.default_generators)
    return PerRank(generators)


def on_other_devices(
    wanted: PerRank[dict[str, object]], root: str
) -> tuple[dict[str, Missing], dict[str, Unexpected]]:
    """Returns ``missing=`` and ``unexpected=`` of a restore of ``{"random": wanted}``. A machine
    with other CUDA devices keeps generators that were not saved, and ignores those without a
    device. A restore logs patterns that match nothing. So both are empty without generators."""
    with open_checkpoint(root) as checkpoint:
        is_stored = any(_CUDA_PATH.fullmatch(path) for path in checkpoint.paths())
    return {_CUDA: "keep"} if "cuda" in wanted.value else {}, {_CUDA: "ignore"} if is_stored else {}
