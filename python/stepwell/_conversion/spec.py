"""The output of a conversion, and its result."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from .. import _core
from .._checks import flag, one_of, shown
from ..errors import MisuseError
from ..formats.description import MAX_SIZE
from ..formats.writers import WRITERS, FileOptions

#: A format to write.
Target: TypeAlias = Literal["safetensors", "torch", "npz", "dcp", "megatron", "orbax", "stepwell"]
#: Called with the bytes done and in all.
Progress: TypeAlias = Callable[[int, int], object]

#: The most seconds without progress of another rank.
STALL_SECONDS = 600

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


@final
@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The result of a conversion."""

    #: The destination, and its format.
    path: str
    format: str
    #: Bytes of each file, by name.
    files: Mapping[str, int]
    #: Bytes of all files, and of them those that an earlier, interrupted call had written.
    nbytes: int
    resumed_nbytes: int
    #: Names of tied tensors, and the names that hold their bytes.
    tied: Mapping[str, str]
    #: Paths of objects that the format cannot hold, and that were left out.
    skipped: tuple[str, ...]
    #: Duration.
    seconds: float
    #: True if the destination was read back and compared with the source.
    verified: bool = False
    #: True if nothing was written.
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Conversion:
    """The output of a conversion; see :func:`convert`."""

    to: Target
    choice: _core._Choice
    subtree: str = ""
    objects: Literal["error", "skip"] = "error"
    shard_size: int | str | None = None
    #: Paths of files to copy into the destination, by name.
    files: Mapping[str, str] = field(default_factory=dict)
    stored_files: str | None = None
    verify: bool = True
    dry_run: bool = False

    def __post_init__(self) -> None:
        one_of(self.to, "to", (*WRITERS, "stepwell"))
        one_of(self.objects, "objects", ("error", "skip"))
        for value, name in ((self.verify, "verify"), (self.dry_run, "dry_run")):
            flag(value, name)
        if self.to == "stepwell":
            self._refuse_files("is for the formats of other libraries")

    def file_options(self, path: str) -> FileOptions:
        """How the files of an output are made: as one file, or in a directory."""
        name = os.path.basename(path)
        if is_directory(self.to, path):
            return FileOptions(name, _bytes("5GB" if self.shard_size is None else self.shard_size))
        self._refuse_files(f"is for a directory, and {name} is one file")
        return FileOptions(name, None)

    def _refuse_files(self, why: str) -> None:
        given = {
            "shard_size": self.shard_size is not None,
            "files": bool(self.files),
            "stored_files": self.stored_files is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise MisuseError(f"{name}= {why}. Leave it out")


def is_directory(to: Target, path: str) -> bool:
    """True if an output in that format is a directory. The end of its name decides."""
    suffix = WRITERS[to].suffix
    return suffix is None or not path.endswith(suffix)


def digest(core: _core.Checkpoint, plan: Iterable[object], ranks: int) -> bytes:
    """Names a plan and its source. All ranks of a conversion have the same."""
    source = (core.directory(), core.manifest(), core.fingerprint())
    whole = hashlib.sha256(repr((ranks, *source)).encode())
    for part in plan:
        whole.update(repr(part).encode())
    return whole.digest()


def _bytes(size: object) -> int:
    """A number of bytes, as a number or such as ``"5GB"`` or ``"512MiB"``."""
    given, found = size, _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is not None:
        unit = (
            1024 ** "KMGT".index(found[2].upper()) * 1024
            if found[3] and found[2]
            else _UNITS[found[2].upper()]
        )
        # A number that no disk has may be too large for an integer.
        size = int(min(float(found[1]) * unit, MAX_SIZE))
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < MAX_SIZE:
        raise MisuseError(
            f'shard_size is a number of bytes, or text such as "5GB" or "512MiB", not {shown(given)}'
        )
    return size
