"""``sw.convert`` and ``sw.export``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from .. import _core, coordinators
from .._checkpoint import Checkpoint
from .._checks import progress_callback
from .._choice import choice_of
from .._locations import Location, is_store, location
from .._opening import opened
from .._public import public
from .._restore.options import Globs
from ..errors import CorruptCheckpoint, MisuseError
from ..formats.writers import check_name
from .files import write
from .passed_along import Files, passed_along
from .save import save
from .spec import STALL_SECONDS, Conversion, ConversionResult, Progress, Target

if TYPE_CHECKING:
    from ..coordinators import Coordinator
    from ..maps import MapLike


@public
def convert(
    source: Location | Checkpoint,
    destination: Location,
    *,
    to: Target,
    step: int | None = None,
    map: MapLike | None = None,
    include: Globs = None,
    exclude: Globs = None,
    subtree: str = "",
    cast: object = None,
    objects: Literal["error", "skip"] = "error",
    shard_size: int | str | None = None,
    files: Files | None = None,
    stored_files: str | None = None,
    verify: bool = False,
    dry_run: bool = False,
    coordinator: Coordinator | Literal["auto"] | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Writes a checkpoint in another format, through host memory of constant size.

    The destination appears whole and durable, or not at all. Until then it has a temporary name
    beside its own: ``model.partial``. If a conversion is interrupted, the same call goes on where
    it was. With ``to="stepwell"`` it begins again.

    An object store cannot rename. There each file appears when it is whole, and those by which
    readers find the others come last. After a failure, what was written is deleted. After a kill,
    delete it before the same call begins again.

    Args:
        source: a checkpoint, a step's directory, a root, files of another library, or an open
            checkpoint.
        destination: a free path, or a free URL.
        to: the format. ``"safetensors"`` makes a directory, or one file if the destination's name
            ends with ``.safetensors``. ``"torch"`` and ``"npz"`` make one file. ``"dcp"``
            makes a directory of ``torch.distributed.checkpoint``, ``"megatron"`` one of
            Megatron-Core, ``"orbax"`` one of an item of Orbax. ``"stepwell"`` makes a checkpoint of
            this library, and begins again after an interrupt.
        step: the step of a root; ``None``: its newest.
        map: a :class:`stepwell.maps.Map`, a TOML file, a recipe or rules: names and shapes of
            another model for what is written. The other arguments see the mapped leaves.
        include: leaves to write, by glob over their paths; default: all.
        exclude: leaves to leave out.
        subtree: path of a container. Only what is below it is written, with names relative to it.
        cast: the dtype of floating-point tensors in the output, as of
            :meth:`CheckpointManager.save`.
        objects: for objects that the format cannot hold: ``"error"``, or ``"skip"`` to leave them
            out. Opaque tensors are objects. A dtype that the format does not have is an error.
        shard_size: the most bytes of a file in a directory, such as ``"5GB"``, the default.
        files: files to copy into the destination, which is a directory: of a model's directory, all
            that are not weights, such as its configuration and its tokenizer.
        stored_files: path of a container of ``bytes`` in the checkpoint, by file name. They are
            written as files into the destination, and are not among the leaves. Weights and empty
            files are left out, as of ``files``.
        verify: read the output back and compare every tensor with the source, before the output
            gets its name. A checkpoint of this library has its name by then. Checksums of the
            source are compared first, if another library wrote it and one process converts.
        dry_run: return what would be written, and write nothing.
        coordinator: shares the work among the processes of a job, as of :class:`CheckpointManager`.
            All of them make this call, and see the same source and destination. A file with
            checksums, as of ``"torch"`` and ``"npz"``, is written by one of them.
        progress: called now and then, and when all is written, with the bytes done and in all.

    Raises:
        MisuseError: the destination exists, its name ends as of another format, or the format
            cannot hold a leaf. Nothing was written.
        CorruptCheckpoint: the source is damaged.
    """
    progress_callback(progress)
    what = Conversion(
        to,
        choice_of(include, exclude, cast),
        subtree,
        objects,
        shard_size,
        passed_along(files),
        stored_files,
        verify,
        dry_run,
    )
    where = location(destination, "the destination")
    check_name(where, to)
    if not is_store(where) and os.path.lexists(where):
        raise MisuseError(f"{where} exists already. Pass a free path, or move what is there away")
    found = coordinators.find(coordinator, what="converts")
    coordinators.check_meets_at_a_path(found, "a conversion")
    sharers = None if dry_run else found
    with (
        _connected(sharers) as ranks,
        # A save by several ranks is a meeting of its own.
        _connected(sharers if to == "stepwell" else None) as saving,
        _meeting(where, ranks) as sharing,
        opened(source, step, map) as checkpoint,
    ):
        if verify and not dry_run and ranks is None:
            _check_source(checkpoint, what, progress)
        if to == "stepwell":
            return save(checkpoint, where, what, sharing, saving, progress)
        return write(checkpoint, where, what, sharing, progress=progress)


@public
def export(
    source: Location | Checkpoint,
    destination: Location,
    *,
    to: Target = "safetensors",
    step: int | None = None,
    map: MapLike | None = None,
    include: Globs = None,
    exclude: Globs = None,
    subtree: str = "",
    cast: object = None,
    objects: Literal["error", "skip"] = "error",
    shard_size: int | str | None = None,
    files: Files | None = None,
    stored_files: str | None = None,
    coordinator: Coordinator | Literal["auto"] | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Writes a checkpoint for another library and verifies the result: :func:`convert` with
    ``verify=True``.

    Args:
        source: a checkpoint, a step's directory, a root, files of another library, or an open
            checkpoint.
        destination: a free path, or a free URL.
        to: the format, as of :func:`convert`.
        step: the step of a root; ``None``: its newest.
        map: names and shapes of another model, as of :func:`convert`.
        include: leaves to write, by glob over their paths; default: all.
        exclude: leaves to leave out.
        subtree: path of a container. Only what is below it is written.
        cast: the dtype of floating-point tensors in the output.
        objects: ``"error"``, or ``"skip"`` to leave out objects that the format cannot hold.
        shard_size: the most bytes of a file in a directory, such as ``"5GB"``, the default.
        files: files to copy into the destination, as of :func:`convert`.
        stored_files: path of a container of files in the checkpoint, as of :func:`convert`.
        coordinator: shares the work among the processes of a job, as of :func:`convert`.
        progress: called now and then with the bytes done and in all.
    """
    return convert(
        source,
        destination,
        to=to,
        step=step,
        map=map,
        include=include,
        exclude=exclude,
        subtree=subtree,
        cast=cast,
        objects=objects,
        shard_size=shard_size,
        files=files,
        stored_files=stored_files,
        verify=True,
        coordinator=coordinator,
        progress=progress,
    )


def _check_source(checkpoint: Checkpoint, what: Conversion, progress: Progress | None) -> None:
    """Refuses a checkpoint of another library if a leaf that is written is damaged. Reads of
    stepwell's own files are checked anyway."""
    if checkpoint.manifest["format_version"]:
        return
    include, exclude, _ = what.choice

    def is_written(leaf: str) -> bool:
        below = leaf == what.subtree or leaf.startswith((f"{what.subtree}/", f"{what.subtree}["))
        dropped = _core.first_globs(exclude, [leaf])[0] is not None
        taken = include is None or _core.first_globs(include, [leaf])[0] is not None
        return (below or not what.subtree) and taken and not dropped

    found = checkpoint.verify(progress).damages
    damages = [one for one in found if not one.leaves or any(map(is_written, one.leaves))]
    if not damages:
        return
    first, more = damages[0], len(damages) - 1
    where = f" (leaf `{first.leaves[0]}`)" if first.leaves else ""
    error = CorruptCheckpoint(
        f"{first.file} is damaged{where}: {first.what}"
        f"{f', and {more} more damages' if more else ''}. Nothing was written; convert(verify=False), or `stepwell convert` without --verify, takes what can be read"
    )
    error.file, error.block, error.leaf = first.file, first.block, next(iter(first.leaves), None)
    raise error


@contextlib.contextmanager
def _connected(board: Coordinator | None) -> Iterator[coordinators.Meeting | None]:
    """How the ranks meet, for the engine."""
    ranks, service = coordinators.connected(board)
    try:
        yield ranks
    finally:
        if service is not None:
            service.close()


@contextlib.contextmanager
def _meeting(path: str, ranks: coordinators.Meeting | None) -> Iterator[_core.Sharing]:
    """The session of the ranks that share a conversion to a path. It ends on all ranks if the
    conversion fails on this one: the others wait for it."""
    sharing = _core.Sharing(path, ranks, STALL_SECONDS)
    try:
        yield sharing
    except BaseException as failure:
        sharing.fail(f"{type(failure).__name__}: {failure}")
        raise
    finally:
        sharing.leave()
