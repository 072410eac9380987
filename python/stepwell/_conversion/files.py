"""Conversions into files of other libraries."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .. import _core
from .._checkpoint import Checkpoint
from .._locations import is_store
from .._paths import listed, named
from ..errors import CorruptCheckpoint, FormatError, MisuseError, StepwellError
from ..formats import find
from ..formats.writers import WRITERS, Content, OutputFile, OutputTensor, PlainValue, Writer
from .leaves import SelectedLeaf, held_objects, nested, output_dtypes, selected
from .passed_along import as_output, stored
from .spec import Conversion, ConversionResult, Progress, digest

#: Bytes of host memory, of a window, and between two records of the journal.
_BUDGET_BYTES = 256 << 20
_WINDOW_BYTES = 16 << 20
_JOURNAL_BYTES = 512 << 20


def write(
    checkpoint: Checkpoint,
    where: str,
    what: Conversion,
    sharing: _core.Sharing,
    *,
    extra: Iterable[OutputFile] = (),
    progress: Progress | None = None,
    beside: _core.Manager | None = None,
    owner: bytes | None = None,
) -> ConversionResult:
    """Writes a checkpoint in the format of another library, with the ranks of ``sharing``, whose
    session the caller ends if this fails. ``extra``: more files. ``beside``: at low priority,
    beside the saves of a manager. ``owner``: names an export, which replaces no incomplete output
    of another owner."""
    begun = time.monotonic()
    options = what.file_options(where)
    core = checkpoint._open()
    writer = WRITERS[what.to]
    with core.reading():  # files beside an adopted source are checked
        passed = as_output(what.files)
        in_checkpoint, numbers = stored(checkpoint, core, what.stored_files)
    passed += in_checkpoint
    leaves = selected(checkpoint, core, what.choice, what.subtree, without=numbers)
    values, skipped = held_objects(core, leaves, what.to, what.objects, writer.holds, writer.held)
    content = _content(checkpoint, leaves, values, what.choice, writer, what.subtree)
    files = [*writer.plan(content, options), *passed, *extra]
    sizes = {file.name: file.length for file in files}
    if len(sizes) < len(files):
        twice = next(file.name for file in files if [one.name for one in files].count(file.name) > 1)
        raise MisuseError(
            f"{twice} is a file to pass along, and has the name of another file that is written. Leave it out"
        )
    result = ConversionResult(
        where, what.to, sizes, sum(sizes.values()), 0, dict(content.ties), skipped, 0.0, dry_run=what.dry_run
    )
    if what.dry_run:
        return result
    rows = [(file.name, file.length, file.pieces) for file in files]
    plan = digest(core, [_WINDOW_BYTES, *map(_hashed, files)], sharing.ranks()[1])
    sharing.check_equal(plan.hex(), what.verify)
    # Python and the engine hold what is passed along.
    budget = _BUDGET_BYTES - 2 * sum(file.length for file in passed)
    limits = budget, _WINDOW_BYTES, _JOURNAL_BYTES
    is_in_files = options.shard_bytes is not None
    digests = _resume_digest(core, plan), owner
    conversion = _core.Conversion(core, where, is_in_files, rows, digests, limits, sharing)
    with contextlib.closing(conversion):
        resumed = conversion.resumed_bytes()
        # The location of a store has more than the text.
        partial = where if is_store(where) else conversion.partial()
        try:
            conversion.write(core, progress, beside)
        except (KeyboardInterrupt, StepwellError) as interrupt:
            if not is_store(where):
                interrupt.add_note(f"{partial} has what is done so far; the same call goes on from there")
            raise
        if what.verify:
            _verify(core, conversion, partial, content, writer.paths(content), sharing, beside)
        conversion.publish()
    seconds = time.monotonic() - begun
    return replace(result, resumed_nbytes=resumed, seconds=seconds, verified=what.verify)


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
    # Of tied tensors, the first one of the state has the bytes. It is the embedding of a model
    # whose head is tied to it. `transformers` and vLLM tie the head again.
    first: dict[tuple[int, str], str] = {}
    for leaf, dtype in zip(arrays, output_dtypes(arrays, choice), strict=True):
        name = names[leaf.number]
        tensors[leaf.number] = OutputTensor(name, leaf.number, dtype, leaf.shape, leaf.path)
        first.setdefault((leaf.holder, dtype), name)
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


def _hashed(file: OutputFile) -> object:
    """A planned file, with hashes in the place of its bytes, which may be many."""
    pieces = [
        (offset, length, None if data is None else hashlib.sha256(data).digest(), tensor, checked)
        for offset, length, data, tensor, checked in file.pieces
    ]
    return file.name, file.length, pieces


def _resume_digest(core: _core.Checkpoint, plan: bytes) -> bytes:
    """Names a plan and the files of its source as they are: a conversion is resumed only by the
    same. A file that was replaced may have the length and the time of the old one, so its inode
    counts, too."""
    whole = hashlib.sha256(plan)
    directory, files = core.directory(), json.loads(core.manifest())["files"]
    for file in files:
        with contextlib.suppress(OSError):
            stat = os.stat(os.path.join(directory, file["path"]))
            whole.update(repr((stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)).encode())
    return whole.digest()


def _verify(
    core: _core.Checkpoint,
    conversion: _core.Conversion,
    partial: str,
    content: Content,
    paths: Mapping[str, str],
    sharing: _core.Sharing,
    beside: _core.Manager | None,
) -> None:
    """Reads the output back and compares it with the source. Removes it if they differ."""
    try:
        wrong = _different(core, partial, content, paths, sharing, beside)
        if wrong:
            raise CorruptCheckpoint(
                f"{listed(tuple(paths[tensor.name] for tensor in wrong))} of {partial} differ from the source; the output was removed. "
                "Convert again, and verify the disk"
            )
    except BaseException as error:
        # The same call would resume a wrong one, and find the same. In a store it has its name.
        if isinstance(error, CorruptCheckpoint) or is_store(partial):
            conversion.discard()
        raise


def _different(
    core: _core.Checkpoint,
    partial: str,
    content: Content,
    paths: Mapping[str, str],
    sharing: _core.Sharing,
    beside: _core.Manager | None,
) -> list[OutputTensor]:
    """The tensors of the output that are missing or differ from the source. ``paths`` are theirs in
    the output, by name."""
    try:
        found = find(partial)
        made = None if found is None else found.open("auto", partial)
    except (CorruptCheckpoint, FormatError) as error:
        raise _unreadable(partial) from error
    if made is None:
        raise _unreadable(partial)
    try:
        leaves = {path: leaf for leaf, path in enumerate(made.leaf_paths())}
        missing = [tensor for tensor in content.tensors if paths[tensor.name] not in leaves]
        present = [tensor for tensor in content.tensors if paths[tensor.name] in leaves]
        pairs = [(tensor.leaf, leaves[paths[tensor.name]], tensor.dtype) for tensor in present]
        return [*missing, *(present[at] for at in sharing.compare(core, made, pairs, beside))]
    finally:
        made.close()


def _unreadable(partial: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{partial} cannot be read back; the output was removed. Convert again, and verify the disk"
    )
