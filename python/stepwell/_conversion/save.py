"""Conversions into checkpoints of ours: saves that read their arrays as they capture them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from math import prod

from .. import _core, coordinators
from .. import _lifecycle as lifecycle
from .._checkpoint import Checkpoint
from .._checks import metadata_json
from .._opening import open as open_checkpoint
from .._options import Options, to_json
from .._paths import glob_escape, listed
from .._policies import every_steps
from .._retention import keep_all
from .._save_result import Save
from .._singular import keep
from .._state.specs import to_dtype
from ..errors import CorruptCheckpoint, MisuseError, StepwellError
from ..formats.description import Opaque
from .leaves import SelectedLeaf, held_objects, nested, output_dtypes, selected
from .spec import STALL_SECONDS, Conversion, ConversionResult, Progress, digest

#: Bytes of the staging ring.
_STAGING_BYTES = 64 << 20
#: Two read, and one copies what they have read.
_CAPTURE_THREADS = 3
#: Seconds between reports of progress.
_PROGRESS_SECONDS = 0.05


def save(
    checkpoint: Checkpoint,
    path: str,
    what: Conversion,
    sharing: _core.Sharing,
    ranks: coordinators.Meeting | None,
    progress: Progress | None,
    later: Mapping[str, float] | None = None,
) -> ConversionResult:
    """Saves leaves of a checkpoint as one of ours, with the ranks of ``sharing``. The save reads
    them as it captures them. To it, they are replicated: all ranks write parts of them. With
    metrics of a later date it is a copy, which has the number of the step."""
    choice, subtree = what.choice, what.subtree
    core, begun, reads = checkpoint._open(), time.monotonic(), _core.StoredReads()
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
    tensors = {leaf.number: _core.StoredTensor(core, leaf.number, reads, rank) for leaf in arrays}
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
    sharing.check_equal(digest(core, [*names, *casts.items()], rank[1]).hex(), what.verify)
    metrics, metadata = {**checkpoint._metrics(), **(later or {})}, checkpoint.manifest["custom_metadata"]
    saving = _begin(path, state, casts, metrics, metadata, ranks, 0 if later is None else checkpoint.step)
    try:
        while not saving.done():
            if progress is not None and (stats := saving.stats) is not None:
                # The files are a little longer than the tensors.
                progress(min(stats.written_bytes, stats.nbytes), stats.nbytes)
            with contextlib.suppress(TimeoutError):
                saving.result(_PROGRESS_SECONDS)
    except BaseException:
        reads.stop()
        with contextlib.suppress(StepwellError):
            saving.result()
        raise
    saving.result()
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


def copy(checkpoint: Checkpoint, path: str, part: _core._Part, progress: Progress | None) -> None:
    """Copies an adopted step into one with bytes of its own."""
    include, exclude, later, compress = part
    if compress:
        raise MisuseError(
            "the copy of an adopted step is made by a save, and saves are not compressed: leave compress= out, then copy the copy"
        )
    what = Conversion("stepwell", (include, exclude, []))
    sharing = _core.Sharing(path, None, STALL_SECONDS)
    try:
        save(checkpoint, path, what, sharing, None, progress, later)
    finally:
        sharing.leave()


def _begin(
    path: str,
    state: object,
    casts: Mapping[str, str],
    metrics: dict[str, float],
    metadata: object,
    ranks: coordinators.Meeting | None,
    step: int,
) -> Save:
    """Begins a save whose arrays are stored tensors."""
    # The ranks read one source, so their tensors need no comparison.
    chosen = Options(compare_replicas=False, capture_threads=_CAPTURE_THREADS)
    options = to_json(chosen, every_steps(1), keep_all(), None, _STAGING_BYTES, 1, False, "raise")
    ticket = _core.PathTicket(path, "error", options, ranks)
    try:
        flat = _core.flatten(state, (None, [], list(casts.items()), None), ranks is None)
        text = metadata_json(metadata)
        handle = ticket.save(flat, metrics, text, "lazy", {}, lifecycle.notifier.events, step)
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
