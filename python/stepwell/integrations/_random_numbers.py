"""The global random generators of a process of torch, as an entry of a state."""

from __future__ import annotations

import random

import numpy as np
import torch

from .._state.specs import PerRank

#: The generators of CUDA devices in ``{"random": random_numbers()}``. Another machine has other
#: devices, so a restore keeps generators that were not saved, and ignores those without a device.
CUDA_GENERATORS = "random/*/cuda"


def random_numbers() -> PerRank[dict[str, object]]:
    """Returns the generators of Python, numpy and torch, also of its CUDA devices."""
    generators: dict[str, object] = {"python": random, "numpy": np.random, "torch": torch.default_generator}
    if torch.cuda.is_available():
        generators["cuda"] = list(torch.cuda.default_generators)
    return PerRank(generators)
