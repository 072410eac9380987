"""The files of Megatron-Core beside those of DCP, and the errors of a checkpoint that lacks one.

Each version writes common values: the iteration, the arguments of the run, hyperparameters. They
are in a file, or in an object of DCP. ``metadata.json`` is written last.
"""

from __future__ import annotations

import os

from ..errors import CorruptCheckpoint
from .files import corrupt

#: Names the backend.
CONFIG = "metadata.json"
#: Has the common values.
COMMON = "common.pt"
#: The object of DCP with the common values, of versions that do not write ``common.pt``.
COMMON_KEY = "common_state/shard_0_1"


def no_config(path: str) -> CorruptCheckpoint:
    """The error of a checkpoint with common values whose ``metadata.json`` names no backend."""
    return corrupt(
        os.path.join(path, CONFIG),
        "it is missing or damaged, and this is a checkpoint of Megatron. Copy the file again. If it "
        "was never written, the save was not finished",
    )


def no_common(path: str) -> CorruptCheckpoint:
    """The error of a checkpoint without common values."""
    return corrupt(
        os.path.join(path, COMMON),
        "it is missing, and has the iteration and the arguments of the run. Copy the whole directory",
    )
