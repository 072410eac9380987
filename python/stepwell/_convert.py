"""``sw.convert`` and ``sw.export``: checkpoints written in another format, in constant memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._checkpoint import Checkpoint
from ._checks import flag, metadata_json, one_of, progress_callback, shown
from ._choice import choice_of
from ._conversion_leaves import SelectedLeaf, held_objects, listed, nested, output_dtypes, selected
from ._locations import Path, absolute
from ._opening import open as open_checkpoint
from ._opening import opened
from ._options import Options, to_json
from ._passed_along import Files, as_output, passed_along
from ._paths import Component, glob_escape, named, render
from ._policies import every_steps
from ._public import public
from ._restore.options import Globs
from ._retention import keep_all
from ._save_result import Save
from ._singular import keep
from ._state.specs import to_dtype
from .errors import CorruptCheckpoint, MisuseError, StepwellError
from .formats import find
from .formats.description import Opaque
from .formats.writers import (
    WRITERS,
    Content,
    FileOptions,
    OutputFile,
    OutputTensor,
    PlainValue,
    Writer,
    check_name,
)

if TYPE_CHECKING:
    from .coordinators import Coordinator
    from .maps import MapLike

#: A format to write.
Target: TypeAlias = Literal["safetensors", "torch", "npz", "dcp", "stepwell"]
_Progress: TypeAlias = Callable[[int, int], object]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

#: Bytes of host memory, of a window, and between two records of the journal.
_BUDGET_BYTES = 256 << 20
_WINDOW_BYTES = 16 << 20
_JOURNAL_BYTES = 512 << 20
#: A save of ours: bytes of the staging ring, threads (two read and one copies what they have
#: read), and seconds between reports of its progress.
_STAGING_BYTES = 64 << 20
_CAPTURE_THREADS = 3
_PROGRESS_SECONDS = 0.05


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


@public
def convert(
    source: Path | Checkpoint,
    destination: Path,
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
    verify: bool = False,
    dry_run: bool = False,
    coordinator: Coordinator | Literal["auto"] | None = None,
    progress: _Progress | None = None,
) -> ConversionResult:
    """Writes a checkpoint in another format, through host memory of constant size.

    The destination appears whole and durable, or not at all. Until then it has a temporary name
    beside its own: ``model.partial``. If a conversion is interrupted, the same call goes on where
    it was. With ``to="stepwell"`` it begins again.

    Args:
        source: a checkpoint, a step's directory, a root, files of another library, or an open
            checkpoint.
        destination: a free path.
        to: the format. ``"safetensors"`` makes a directory, or one file if the destination's name
            ends with ``.safetensors``. ``"torch"`` and ``"npz"`` make one file. ``"dcp"``
            makes a directory of ``torch.distributed.checkpoint``. ``"stepwell"`` makes a
            checkpoint of this library, and begins again after an interrupt.
        step: the step of a root; ``None``: its newest.
        map: a :class:`stepwell.maps.Map`, its TOML file or its rules: names and shapes of another
            model for what is written. The other arguments see the mapped leaves.
        include: leaves to write, by glob over their paths; default: all.
        exclude: leaves to leave out.
        subtree: path of a container. Only what is below it is written, with names relative to it.
        cast: the dtype of floating-point tensors in the output, as of
            :meth:`CheckpointManager.save`.
        objects: for objects that the format cannot hold: ``"error"``, or ``"skip"`` to leave them
            out. A tensor of a dtype that the format does not have is always an error.
        shard_size: the most bytes of a file in a directory, such as ``"5GB"``, the default.
        files: files to copy into the destination, which is a directory: of a model's directory, all
            that are not weights, such as its configuration and its tokenizer.
        verify: read the output back and compare every tensor with the source, before the output
            gets its name. A checkpoint of this library has its name by then.
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
        verify,
        dry_run,
    )
    where = absolute(destination)
    check_name(where, to)
    if os.path.lexists(where):
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
        if to == "stepwell":
            return _save(checkpoint, where, what, sharing, saving, progress)
        return write(checkpoint, where, what, sharing, progress=progress)


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
        given = {"shard_size": self.shard_size is not None, "files": bool(self.files)}
        for name, is_given in given.items():
            if is_given:
                raise MisuseError(f"{name}= {why}. Leave it out")


def is_directory(to: Target, path: str) -> bool:
    """True if an output in that format is a directory. The end of its name decides."""
    suffix = WRITERS[to].suffix
    return suffix is None or not path.endswith(suffix)


def write(
    checkpoint: Checkpoint,
    where: str,
    what: Conversion,
    sharing: _core.Sharing,
    *,
    extra: Iterable[OutputFile] = (),
    progress: _Progress | None = None,
    beside: _core.Manager | None = None,
) -> ConversionResult:
    """Writes a checkpoint in the format of another library, with the ranks of ``sharing``, whose
    session the caller ends if this fails. ``extra``: more files. ``beside``: at low priority,
    beside the saves of a manager."""
    begun = time.monotonic()
    options = what.file_options(where)
    core = checkpoint._open()
    writer = WRITERS[what.to]
    leaves = selected(checkpoint, core, what.choice, what.subtree)
    values, skipped = held_objects(core, leaves, what.to, what.objects, writer.holds, writer.held)
    content = _content(checkpoint, leaves, values, what.choice, writer, what.subtree)
    passed = as_output(what.files)
    files = [*writer.plan(content, options), *passed, *extra]
    sizes = {file.name: file.length for file in files}
    if len(sizes) < len(files):
        twice = next(file.name for file in files if [one.name for one in files].count(file.name) > 1)
        raise MisuseError(f"{twice} of files= has the name of a file that is written. Leave it out")
    result = ConversionResult(
        where, what.to, sizes, sum(sizes.values()), 0, dict(content.ties), skipped, 0.0, dry_run=what.dry_run
    )
    if what.dry_run:
        return result
    rows = [(file.name, file.length, file.pieces) for file in files]
    digest = _digest(core, [_hashed(file) for file in files], sharing.ranks()[1])
    sharing.check_equal(digest.hex(), what.verify)
    # Python and the engine hold what is passed along.
    budget = _BUDGET_BYTES - 2 * sum(file.length for file in passed)
    limits = budget, _WINDOW_BYTES, _JOURNAL_BYTES
    is_in_files = options.shard_bytes is not None
    conversion = _core.Conversion(
        core, where, is_in_files, rows, _resume_digest(core, digest), limits, sharing
    )
    with contextlib.closing(conversion):
        resumed = conversion.resumed_bytes()
        partial = conversion.partial()
        try:
            conversion.write(core, progress, beside)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{partial} has what is done so far; the same call goes on from there")
            raise
        if what.verify:
            _verify(core, conversion, content, sharing, beside)
        conversion.publish()
    seconds = time.monotonic() - begun
    return replace(result, resumed_nbytes=resumed, seconds=seconds, verified=what.verify)


@public
def export(
    source: Path | Checkpoint,
    destination: Path,
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
    coordinator: Coordinator | Literal["auto"] | None = None,
    progress: _Progress | None = None,
) -> ConversionResult:
    """Writes a checkpoint for another library and verifies the result: :func:`convert` with
    ``verify=True``."""
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
        verify=True,
        coordinator=coordinator,
        progress=progress,
    )


def _save(
    checkpoint: Checkpoint,
    path: str,
    what: Conversion,
    sharing: _core.Sharing,
    ranks: coordinators.Meeting | None,
    progress: _Progress | None,
) -> ConversionResult:
    """Saves leaves of a checkpoint as one of ours, with the ranks of ``sharing``. The save reads
    them as it captures them. To it, they are replicated: all ranks write parts of them."""
    choice, subtree = what.choice, what.subtree
    core, begun, stop = checkpoint._open(), time.monotonic(), _core.Stop()
    leaves = selected(checkpoint, core, choice, subtree)
    values, skipped = held_objects(
        core,
        leaves,
        "stepwell",
        what.objects,
        lambda one: not isinstance(one, Opaque),
        "arrays and values of known types",
    )
    arrays = [leaf for leaf in leaves if leaf.dtype is not None]
    rank = sharing.ranks()
    tensors = {leaf.number: _core.StoredTensor(core, leaf.number, stop, rank) for leaf in arrays}
    structure = checkpoint._tree()
    node = checkpoint._find(0, subtree) if subtree else 0
    plain = {number: one.value for number, one in values.items()}
    state = nested(structure, node or 0, {**tensors, **plain})
    dtypes = list(zip(arrays, output_dtypes(arrays, choice), strict=True))
    casts = {glob_escape(leaf.nested_name): dtype for leaf, dtype in dtypes if dtype != leaf.dtype}
    if what.dry_run:
        # Tied leaves are stored once.
        stored = {leaf.holder: prod(leaf.shape) * to_dtype(dtype).itemsize for leaf, dtype in dtypes}
        nbytes = sum(stored.values())
        return ConversionResult(path, "stepwell", {}, nbytes, 0, {}, skipped, 0.0, dry_run=True)
    names = [(leaf.number, leaf.nested_name) for leaf in arrays]
    sharing.check_equal(_digest(core, [*names, *casts.items()], rank[1]).hex(), what.verify)
    save = _begin(path, state, casts, core.metrics(), checkpoint.manifest["custom_metadata"], ranks)
    try:
        while not save.done():
            if progress is not None and (stats := save.stats) is not None:
                # The files are a little longer than the tensors.
                progress(min(stats.written_bytes, stats.nbytes), stats.nbytes)
            with contextlib.suppress(TimeoutError):
                save.result(_PROGRESS_SECONDS)
    except BaseException:
        stop.set()
        with contextlib.suppress(StepwellError):
            save.result()
        raise
    save.result()
    with open_checkpoint(path) as made:
        sizes = {file["path"]: file["length"] for file in made.manifest["files"]}
        written = sum(sizes.values())
        if progress is not None:
            progress(written, written)
        if what.verify:
            _compare(core, made._open(), arrays, choice, path, sharing)
        tied = {one.path: one.tied_to for one in made.contents() if one.tied_to is not None}
    seconds = time.monotonic() - begun
    return ConversionResult(path, "stepwell", sizes, written, 0, tied, skipped, seconds, verified=what.verify)


def _begin(
    path: str,
    state: object,
    casts: Mapping[str, str],
    metrics: dict[str, float],
    metadata: object,
    ranks: coordinators.Meeting | None,
) -> Save:
    """Begins a save whose arrays are stored tensors."""
    # The ranks read one source, so their tensors need no comparison.
    chosen = Options(compare_replicas=False, capture_threads=_CAPTURE_THREADS)
    options = to_json(chosen, every_steps(1), keep_all(), None, _STAGING_BYTES, 1, False, "raise")
    ticket = _core.PathTicket(path, "error", options, ranks)
    try:
        flat = _core.flatten(state, (None, [], list(casts.items())), ranks is None)
        text = metadata_json(metadata)
        handle = ticket.save(flat, metrics, text, "lazy", {}, lifecycle.notifier.events)
    except BaseException as error:
        ticket.fail(f"{type(error).__name__}: {error}")
        raise
    return keep(handle, path)


def _compare(
    core: _core.Checkpoint,
    made: _core.Checkpoint,
    arrays: list[SelectedLeaf],
    choice: _core._Choice,
    path: str,
    sharing: _core.Sharing,
) -> None:
    """Compares a checkpoint of ours with its source."""
    numbers = {one: leaf for leaf, one in enumerate(made.leaf_paths())}
    dtypes = output_dtypes(arrays, choice)
    pairs = [
        (leaf.number, numbers[leaf.nested_name], dtype) for leaf, dtype in zip(arrays, dtypes, strict=True)
    ]
    if wrong := sharing.compare(core, made, pairs):
        raise CorruptCheckpoint(
            f"{listed(tuple(arrays[at].path for at in wrong))} of {path} differ from the source. Verify the disk, remove {path}, and convert again"
        )


def _content(
    checkpoint: Checkpoint,
    leaves: list[SelectedLeaf],
    values: Mapping[int, PlainValue],
    choice: _core._Choice,
    writer: Writer,
    subtree: str,
) -> Content:
    """The tensors by name, ties apart, and the state that they are in."""
    arrays = [leaf for leaf in leaves if leaf.dtype is not None]
    names = {leaf.number: leaf.nested_name if writer.is_nested else leaf.name for leaf in arrays}
    by_name: dict[str, SelectedLeaf] = {}
    for leaf in arrays:
        other = by_name.setdefault(names[leaf.number], leaf)
        if other is not leaf:
            raise MisuseError(
                f"{named(other.path)} and {named(leaf.path)} have the same name in the output, {leaf.name!r}. Leave one out with exclude="
            )
    tensors: dict[int, OutputTensor] = {}
    # Of tied tensors, the first name has the bytes: `transformers` ties the others again.
    first: dict[tuple[int, str], str] = {}
    for leaf, dtype in zip(arrays, output_dtypes(arrays, choice), strict=True):
        name = names[leaf.number]
        places: list[Component] = [("k", name)]
        if writer.has_paths:
            places = [("k", part) if isinstance(part, str) else ("x", part) for part in leaf.places]
        path = name if writer.is_nested else render(places)
        tensors[leaf.number] = OutputTensor(
            name, path, leaf.number, dtype, leaf.shape, leaf.places, leaf.path
        )
        key = leaf.holder, dtype
        first[key] = min(first.get(key, name), name)
    ties = {
        tensor.name: holder
        for leaf in arrays
        if (holder := first[leaf.holder, (tensor := tensors[leaf.number]).dtype]) != tensor.name
    }
    structure = checkpoint._tree()
    node = checkpoint._find(0, subtree) if subtree else 0
    state = nested(structure, node or 0, {**tensors, **values})
    custom = checkpoint.manifest["custom_metadata"]
    texts = custom.items() if isinstance(custom, dict) else ()
    return Content(
        tuple(tensor for tensor in tensors.values() if tensor.name not in ties),
        tuple(tensor for tensor in tensors.values() if tensor.name in ties),
        ties,
        {key: text for key, text in texts if isinstance(text, str)},
        state,
    )


def _bytes(size: object) -> int:
    """A number of bytes, as a number or such as ``"5GB"`` or ``"512MiB"``."""
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is not None:
        unit = (
            1024 ** "KMGT".index(found[2].upper()) * 1024
            if found[3] and found[2]
            else _UNITS[found[2].upper()]
        )
        size = int(float(found[1]) * unit)
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise MisuseError(
            f'shard_size is a number of bytes, or text such as "5GB" or "512MiB", not {shown(size)}'
        )
    return size


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
    sharing = _core.Sharing(path, ranks)
    try:
        yield sharing
    except BaseException as failure:
        sharing.fail(f"{type(failure).__name__}: {failure}")
        raise
    finally:
        sharing.leave()


def _hashed(file: OutputFile) -> object:
    """A planned file, with hashes in the place of its bytes, which may be many."""
    pieces = [
        (offset, length, None if data is None else hashlib.sha256(data).digest(), tensor, checked)
        for offset, length, data, tensor, checked in file.pieces
    ]
    return file.name, file.length, pieces


def _digest(core: _core.Checkpoint, plan: Iterable[object], ranks: int) -> bytes:
    """Names a plan and its source. All ranks of a conversion have the same."""
    digest = hashlib.sha256(repr((_WINDOW_BYTES, ranks, core.path(), core.manifest())).encode())
    digest.update(repr((core.places(), core.layouts(), core.computations())).encode())
    for part in plan:
        digest.update(repr(part).encode())
    return digest.digest()


def _resume_digest(core: _core.Checkpoint, digest: bytes) -> bytes:
    """Names a plan and the files of its source as they are: a conversion is resumed only by the
    same. A file that was replaced may have the length and the time of the old one, so its inode
    counts, too."""
    whole = hashlib.sha256(digest)
    directory, files = core.path(), json.loads(core.manifest())["files"]
    for file in files:
        with contextlib.suppress(OSError):
            stat = os.stat(os.path.join(directory, file["path"]))
            whole.update(repr((stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)).encode())
    return whole.digest()


def _verify(
    core: _core.Checkpoint,
    conversion: _core.Conversion,
    content: Content,
    sharing: _core.Sharing,
    beside: _core.Manager | None,
) -> None:
    """Reads the output back and compares it with the source. Removes it if they differ."""
    partial = conversion.partial()
    try:
        wrong = _different(core, partial, content, sharing, beside)
        if wrong:
            raise CorruptCheckpoint(
                f"{listed(tuple(tensor.path for tensor in wrong))} of {partial} differ from the source; the output was removed. "
                "Convert again, and verify the disk"
            )
    except CorruptCheckpoint:
        # The same call would resume it, and find the same.
        conversion.discard()
        raise


def _different(
    core: _core.Checkpoint,
    partial: str,
    content: Content,
    sharing: _core.Sharing,
    beside: _core.Manager | None,
) -> list[OutputTensor]:
    """The tensors of the output that are missing or differ from the source."""
    try:
        found = find(partial)
        made = None if found is None else found.open("auto")
    except StepwellError as error:
        raise _unreadable(partial) from error
    if made is None:
        raise _unreadable(partial)
    try:
        leaves = {path: leaf for leaf, path in enumerate(made.leaf_paths())}
        missing = [tensor for tensor in content.tensors if tensor.path not in leaves]
        present = [tensor for tensor in content.tensors if tensor.path in leaves]
        pairs = [(tensor.leaf, leaves[tensor.path], tensor.dtype) for tensor in present]
        return [*missing, *(present[at] for at in sharing.compare(core, made, pairs, beside))]
    finally:
        made.close()


def _unreadable(partial: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{partial} cannot be read back; the output was removed. Convert again, and verify the disk"
    )
