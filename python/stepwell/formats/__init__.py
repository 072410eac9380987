"""Checkpoints of other libraries, opened as if they were ours.

A format module describes the files of one family: a tree of containers, tensors with the places of
their bytes, and objects. The engine reads the tensors from there. So a restore in
part, resharded or cast, ``sw.open`` and the command line work as with our own files. No other
library is imported, and no pickle is executed.

A format is recognised by its files. Nothing vouches for the bytes of most formats; ``verify``
says how many these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from .._restore import collector as collecting
from ..errors import StepwellError, from_system
from . import dcp, flax, npz, orbax, safetensors, torch_save
from .description import Description
from .refused import refuse

__all__ = ["Description", "find"]

#: Describes the files at a path; ``None``: another format.
Format: TypeAlias = Callable[[str], Description | None]

_FORMATS: Sequence[Format] = (
    dcp.describe,
    orbax.describe,
    safetensors.describe,
    torch_save.describe,
    npz.describe,
    flax.describe,
)


# Metadata become many small objects, which are all there until it returns.
@collecting.paused()
def find(path: str) -> Description | None:
    """Returns the description of what another library wrote at a path, if there is any. A known
    format that is not read is refused by its name."""
    try:
        for describe in _FORMATS:
            found = describe(path)
            if found is not None:
                return found
        refuse(path)
    except OSError as error:
        if isinstance(error, StepwellError):
            raise
        raise from_system(f"{path} cannot be read", error, path) from error
    return None
