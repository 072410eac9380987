"""Exports while training: committed steps, written for other libraries in the background.

One thread of a manager runs its exports, one after the other. The bytes are read and written by
threads of the engine at low priority, which pause for saves. Ranks share each export.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from ._checks import instance, listed, whole
from ._choice import choice_of
from ._conversion.passed_along import Files, passed_along
from ._conversion.spec import Conversion, Target, is_directory
from ._export_places import Places, Template
from ._locations import Location
from ._public import public
from ._restore.options import Globs
from .errors import MisuseError
from .formats.writers import check_name

if TYPE_CHECKING:
    from .maps import MapLike


@public
@final
@dataclass(frozen=True, slots=True)
class Export:
    """An export of committed steps, for ``CheckpointManager(exports=[…])``.

    Args:
        destination: the path or URL of an export, with ``{step}`` in its last part:
            ``"hf/{step}"``, ``"weights/{step:08}.safetensors"`` or ``"s3://bucket/hf/{step}"``. A
            path is relative to the working directory.
        every: the steps to export are multiples of it.
        keep: exports that stay: the newest ones. Older ones of this root are deleted. ``None``:
            all. For directories only.
        to: the format, as of :func:`convert`, except ``"stepwell"``.
        map: as of :func:`convert`; also ``include``, ``exclude``, ``subtree``, ``cast``,
            ``objects``, ``shard_size``, ``files`` and ``stored_files``.

    Raises:
        MisuseError: an argument is invalid.
    """

    destination: Location
    every: int = 1
    keep: int | None = None
    to: Target = "safetensors"
    map: MapLike | None = None
    include: Globs = None
    exclude: Globs = None
    subtree: str = ""
    cast: object = None
    objects: Literal["error", "skip"] = "error"
    shard_size: int | str | None = None
    files: Files | None = None
    stored_files: str | None = None

    def __post_init__(self) -> None:
        if self.to == "stepwell":
            raise MisuseError('to="stepwell" is no format of another library. Use a second manager')
        Template.of(self.destination)
        whole(self.every, "every", 1)
        name = self._conversion().file_options(self._path(0)).name
        check_name(self._path(0), self.to)
        if self.keep is not None:
            whole(self.keep, "keep", 1)
            if not is_directory(self.to, self._path(0)):
                raise MisuseError(f"keep= is for directories, and {name} is one file. Leave it out")
        if self.map is not None:
            from .maps import Map

            object.__setattr__(self, "map", Map.of(self.map))

    def _conversion(self) -> Conversion:
        choice, files = choice_of(self.include, self.exclude, self.cast), passed_along(self.files)
        return Conversion(
            self.to, choice, self.subtree, self.objects, self.shard_size, files, self.stored_files
        )

    def _path(self, step: int) -> str:
        return Template.of(self.destination).path(step)

    def _places(self, root: str) -> Places:
        return Places.of(root, Template.of(self.destination), is_directory(self.to, self._path(0)))


def checked(exports: Sequence[Export], root: str) -> Sequence[Export]:
    """Checks the exports of a manager.

    Raises:
        MisuseError: two write to one path, or one writes where steps are.
    """
    if isinstance(exports, Export):
        raise MisuseError("exports is a list of exports: pass exports=[sw.Export(…)]")
    found = [
        instance(one, Export, "an element of exports", "sw.Export(…)") for one in listed(exports, "exports")
    ]
    paths = [one._path(0) for one in found]
    for path in paths:
        if os.path.dirname(path) == root:
            raise MisuseError(f"the export to {path} would be beside the steps. Pass a directory in between")
        if paths.count(path) > 1:
            raise MisuseError(f"two exports write {path}. Pass different destinations")
    return found
