"""``torch.distributed.checkpoint`` (DCP) with stepwell's files and promises.

    import stepwell.integrations.dcp as dcp  # in place of torch.distributed.checkpoint

    dcp.save({"model": model.state_dict()}, checkpoint_id="runs/step-100")
    dcp.load(state, checkpoint_id="runs/step-100")

:func:`save`, :func:`async_save` and :func:`load` have torch's signatures. :func:`use` puts them
into ``torch.distributed.checkpoint``, for trainers that call it. For calls that take a
``storage_writer=``, there are :class:`StepwellWriter` and :class:`StepwellReader`. Every other name
is torch's.

Checkpoints that DCP wrote are loaded by torch, as before.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor

from .. import _core
from .._adapters import torch as adapter
from .._checkpoint import Checkpoint
from .._locations import absolute
from .._opening import is_own
from .._opening import open as open_checkpoint
from .._paths import Component, extend
from .._restore.options import Globs, globs
from .._state.specs import Replicated, to_dtype
from ..coordinators import TorchStore
from ..errors import MisuseError, RankFailed
from ..sharding import LocalShard
from . import _guest
from ._terms import Terms

_Path: TypeAlias = str | os.PathLike[str]
#: A state dict of torch.
_State: TypeAlias = dict[str, Any]  # tensors, containers, any object

_torch_save, _torch_async_save, _torch_load = (
    state_dict_saver.save,
    state_dict_saver.async_save,
    state_dict_loader.load,
)

#: The caller makes the state dict, and may wrap its values.
_TERMS = Terms(
    missing="leave these out of the state dict, or pass planner=DefaultLoadPlanner(allow_partial_load=True)",
    mismatch="give the state dict what is stored; sw.restore reads parts of the checkpoint",
    differs=(
        "Pass it as sw.PerRank(…) if it differs on purpose. If rank 0's value is enough (statistics of BatchNorm), "
        "call stepwell.integrations.dcp.use(replicated=[glob])"
    ),
    per_rank=None,
)
#: Globs of values that may differ between ranks; see :func:`use`.
_replicated: Sequence[str] = ()
#: What a checkpoint holds that a plan of DCP wrote: each value under its name with dots.
_BY_PLAN = {"stepwell.integrations.dcp": "plan"}
#: Trainers look for this file of DCP in a directory before they load it.
_MARKER = ".metadata"
_MARKER_TEXT = "This is a checkpoint of stepwell. Load it with stepwell.integrations.dcp, or with sw.open.\n"


def save(
    state_dict: _State,
    *,
    checkpoint_id: _Path | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves a state dict, as ``torch.distributed.checkpoint.save`` does. All ranks of the group
    make this call. It returns when the checkpoint is durable.

    A second save to the same directory replaces the first one when it is committed. Calls with a
    writer or planner of another class than DCP's own go to torch; :class:`StepwellWriter` serves
    those.

    Raises:
        UnsupportedLeaf: a value cannot be stored. DCP would pickle it.
        MismatchError: a value that is no tensor shard differs between ranks. DCP would keep one of
            them. Wrap it in :class:`stepwell.PerRank`.
        SaveFailed: the checkpoint could not be written; or an earlier :func:`async_save` failed,
            and nobody has asked.
    """
    path = _own_path(checkpoint_id, storage_writer, planner)
    if path is None or not use_collectives:
        return _torch_save(  # type: ignore[no-any-return]
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    return _begin(path, partial(_saved_values, state_dict), process_group, no_dist, None).result()


def async_save(
    state_dict: _State,
    *,
    checkpoint_id: _Path | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_stager: object = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    **others: object,
) -> Future[Metadata] | state_dict_saver.AsyncSaveResponse:
    """Saves a state dict in the background, as ``torch.distributed.checkpoint.async_save`` does.
    Returns a ``concurrent.futures.Future`` when the state may change. The next save raises the
    failure of an earlier one that nobody has seen, and so does the end of the process.

    With ``async_stager=`` it returns torch's ``AsyncSaveResponse``. The stager is not used, and
    neither is ``async_checkpointer_type=``: no process or thread of torch is needed.
    """
    path = _own_path(checkpoint_id, storage_writer, planner)
    if path is None or not use_collectives:
        call: Callable[..., Future[Metadata] | state_dict_saver.AsyncSaveResponse] = _torch_async_save
        if async_stager is not None:
            others["async_stager"] = async_stager
        return call(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
            **others,
        )
    found = _begin(path, partial(_saved_values, state_dict), process_group, no_dist, None)
    if async_stager is None:
        return found
    staged: Future[None] = Future()
    staged.set_result(None)
    return state_dict_saver.AsyncSaveResponse(staged, cast("Future[None]", found))


def load(
    state_dict: _State,
    *,
    checkpoint_id: _Path | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads a checkpoint into a state dict in place, as ``torch.distributed.checkpoint.load`` does.
    All ranks of the group make this call. A checkpoint of DCP is loaded by torch.

    Raises:
        MismatchError: a wanted value is not stored, or has another shape. Nothing was written.
        CorruptCheckpoint: a stored block is damaged.
        RankFailed: another rank could not load.
    """
    path = _own_path(checkpoint_id, storage_reader)
    if path is None or not is_own(path):
        reader, where = storage_reader, checkpoint_id
    elif type(planner) not in (type(None), DefaultLoadPlanner) or _is_by_plan(path):
        reader, where = StepwellReader(path), None
    else:
        _load(state_dict, path, bool(getattr(planner, "allow_partial_load", False)), process_group, no_dist)
        return
    _torch_load(
        state_dict,
        checkpoint_id=where,
        storage_reader=reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _load(
    state_dict: _State, path: str, is_partial: bool, group: dist.ProcessGroup | None, no_dist: bool
) -> None:
    coordinator = _coordinator(group, no_dist)
    with _failing_together(coordinator):
        _guest.raise_unseen()
        into = _values(state_dict)
    _fill(into, _guest.restored(path, into, coordinator, is_partial, _TERMS))
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(into[key])
        else:
            state_dict[key] = into[key]


@contextmanager
def _failing_together(coordinator: TorchStore | None) -> Iterator[None]:
    """If the block raises on one rank, the others raise :class:`RankFailed` at its end."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    told: list[str | None] = []
    if coordinator is not None:
        told = [None] * coordinator.world_size
        own = None if failure is None else f"{type(failure).__name__}: {failure}"
        dist.all_gather_object(told, own, group=coordinator.group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            other = RankFailed(f"rank {rank} could not load: {text}")
            other.rank = rank
            raise other


def __getattr__(name: str) -> object:
    """Returns torch's object of that name."""
    return getattr(torch_dcp, name)


def use(*, replicated: Globs = None) -> Callable[[], None]:
    """Puts :func:`save`, :func:`async_save` and :func:`load` into ``torch.distributed.checkpoint``.
    Returns a function that puts torch's own back.

    Args:
        replicated: values that may differ between ranks, by glob over paths. Rank 0's are stored.
            ``"**.running_*"`` are the statistics of BatchNorm.
    """
    global _replicated
    ours = {"save": save, "async_save": async_save, "load": load}
    before, named_before = {name: getattr(torch_dcp, name) for name in ours}, _replicated

    def put(functions: Mapping[str, object], named: Sequence[str]) -> None:
        global _replicated
        _replicated = named
        for name, function in functions.items():
            setattr(torch_dcp, name, function)

    put(ours, globs(replicated, "replicated=") or ())
    return partial(put, before, named_before)


@contextmanager
def using(*, replicated: Globs = None) -> Iterator[None]:
    """:func:`use` for the length of a ``with`` block."""
    restore = use(replicated=replicated)
    try:
        yield
    finally:
        restore()


class StepwellWriter(StorageWriter):
    """A ``storage_writer=`` for ``torch.distributed.checkpoint.save`` and ``async_save``. DCP plans
    the save, with any planner that is derived from ``DefaultSavePlanner``. Values have their names
    with dots in the checkpoint (``"model.layers.0.weight"``).

    Args:
        path: the directory of the checkpoint.
        process_group: the group of the call.
        no_dist: ``no_dist=`` of the call.
    """

    def __init__(
        self, path: _Path, process_group: dist.ProcessGroup | None = None, no_dist: bool = False
    ) -> None:
        super().__init__()
        self._group, self._no_dist = process_group, no_dist
        self.reset(path)

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins a save, to another path if one is given."""
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id, "the checkpoint")

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Called by torch."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called by torch."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called by torch."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Saves the values of a plan."""
        _begin(self.path, partial(self._values, plan, planner), self._group, self._no_dist, _BY_PLAN).result()
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(
            [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by torch."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Called by torch."""
        return True

    def _values(self, plan: SavePlan, planner: SavePlanner) -> dict[str, object]:
        values: dict[str, object] = {}
        for item in plan.items:
            if item.index.fqn in values:
                raise MisuseError(
                    f"{item.index.fqn!r} has several parts on this rank. Pass the state to stepwell.integrations.dcp.save, without a storage_writer="
                )
            values[item.index.fqn] = self._value(item, planner)
        return values

    def _value(self, item: WriteItem, planner: SavePlanner) -> object:
        if item.type == WriteItemType.BYTE_IO:
            found = getattr(planner, "lookup_object", None)
            if found is None:
                raise MisuseError(
                    f"{type(planner).__name__} gives objects as pickles, which are not stored. Derive it from DefaultSavePlanner"
                )
            return found(item.index)
        data, tensor = item.tensor_data, planner.resolve_data(item)
        assert data is not None
        assert isinstance(tensor, torch.Tensor)
        return LocalShard(tensor.detach(), tuple(data.size), tuple(data.chunk.offsets))


class StepwellReader(StorageReader):
    """A ``storage_reader=`` for ``torch.distributed.checkpoint.load``, with any planner.

    Args:
        path: a checkpoint of stepwell, or a root, whose newest step is read.
    """

    def __init__(self, path: _Path) -> None:
        super().__init__()
        self.path: str
        self._rows: dict[str, _Row] = {}
        self.reset(path)

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begins a load, of another path if one is given."""
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id, "the checkpoint")

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Returns the names and shapes of the stored values."""
        with open_checkpoint(self.path) as checkpoint:
            self._rows = _rows(checkpoint)
            if len(self._rows) < len(checkpoint.paths()):
                raise MisuseError(
                    f"{self.path}: two stored values have one name with dots. Load it with stepwell.integrations.dcp.load"
                )
        return _metadata(self._rows)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by torch."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by torch."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads the values of a plan."""
        with open_checkpoint(self.path) as checkpoint:
            for some in _batches(plan.items):
                wanted = [(self._rows[item.storage_index.fqn].path, _box(item)) for item in some]
                for item, value in zip(some, checkpoint.read(wanted), strict=True):
                    if item.type == LoadItemType.BYTE_IO:
                        stream = io.BytesIO()
                        torch.save(value, stream)
                        planner.load_bytes(item, io.BytesIO(stream.getvalue()))
                        continue
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(cast(torch.Tensor, adapter.from_numpy(np.asarray(value))))
                    planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Called by torch."""
        return is_own(absolute(checkpoint_id, "the checkpoint"))


def _own_path(checkpoint_id: _Path | None, storage: object, planner: object = None) -> str | None:
    """The directory of a call that stepwell serves; ``None`` if torch does, because it has a URL,
    or a storage or planner of another class than DCP's own."""
    if type(planner) not in (type(None), DefaultSavePlanner):
        return None
    if storage is not None:
        if type(storage) not in (FileSystemWriter, FileSystemReader):
            return None
        checkpoint_id = storage.path if checkpoint_id is None else checkpoint_id  # type: ignore[attr-defined]
    if checkpoint_id is None:
        raise MisuseError("pass checkpoint_id=, the directory of the checkpoint")
    if "://" in os.fspath(checkpoint_id) and not os.fspath(checkpoint_id).startswith("file://"):
        return None
    return absolute(checkpoint_id, "the checkpoint")


def _coordinator(group: dist.ProcessGroup | None, no_dist: bool) -> TorchStore | None:
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return None
    found = TorchStore(group)
    return found if found.world_size > 1 else None


def _values(state_dict: _State) -> _State:
    return {key: one.state_dict() if isinstance(one, Stateful) else one for key, one in state_dict.items()}


def _saved_values(state_dict: _State) -> _State:
    found = _values(state_dict)
    return cast(_State, _marked(found, "")) if _replicated else found


def _marked(value: object, path: str) -> object:
    """A value whose leaves that :func:`use` names are :class:`stepwell.Replicated`."""
    if type(value) in (dict, OrderedDict):
        marked: dict[object, object] = {}
        for key, one in cast("dict[object, object]", value).items():
            component: Component = ("i", key) if type(key) is int else ("k", str(key))
            marked[key] = _marked(one, extend(path, component))
        return marked
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        found = [_marked(one, extend(path, ("x", at))) for at, one in enumerate(value)]
        return tuple(found) if isinstance(value, tuple) else found
    is_named = not isinstance(value, DTensor) and _core.first_globs(_replicated, [path])[0] is not None
    return Replicated(value) if is_named else value


def _begin(
    path: str,
    state: Callable[[], _State],
    group: dist.ProcessGroup | None,
    no_dist: bool,
    kind: object,
) -> _guest.GuestSave[Metadata]:
    """Begins a save, whose result is DCP's description of it. If ``state`` raises on one rank, the
    save fails on all of them."""
    coordinator = _coordinator(group, no_dist)

    def committed() -> Metadata:
        if coordinator is None or coordinator.rank == 0:
            _core.write_record(os.path.join(path, _MARKER), _MARKER_TEXT)
        with open_checkpoint(path) as checkpoint:
            return _metadata(_rows(checkpoint))

    return _guest.save(path, state, coordinator, kind, committed, terms=_TERMS)


def _fill(into: Any, values: Any) -> None:  # dicts and lists
    """Puts restored values into nested dicts and lists in place."""
    places = into.items() if isinstance(into, dict) else enumerate(into)
    for key, one in list(places):
        if isinstance(one, (dict, list)) and type(one) is type(values[key]) and len(one) == len(values[key]):
            _fill(one, values[key])
        else:
            into[key] = values[key]


def _is_by_plan(path: str) -> bool:
    with open_checkpoint(path) as checkpoint:
        return bool(checkpoint.metadata().custom_metadata == _BY_PLAN)


@dataclass(frozen=True, slots=True)
class _Row:
    """A stored value, as DCP sees it."""

    #: Its path in the checkpoint, and in a nested state dict.
    path: str
    keys: tuple[str | int, ...]
    #: ``None``: an object.
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def _rows(checkpoint: Checkpoint) -> dict[str, _Row]:
    """The leaves of a checkpoint by their names in DCP, which are keys joined by dots."""
    structure, rows = checkpoint._tree(), checkpoint._open().leaves()
    found: dict[str, _Row] = {}
    for node, path, row in zip(structure.leaf_nodes, checkpoint.paths(), rows, strict=True):
        keys = tuple(key for _, key in structure.components(node))
        _, dtype, shape, _ = row
        torch_dtype = None if dtype is None else adapter.torch_dtype(to_dtype(dtype))
        found[".".join(map(str, keys))] = _Row(path, keys, torch_dtype, tuple(shape or ()))
    return found


def _metadata(rows: Mapping[str, _Row]) -> Metadata:
    return Metadata(
        {
            name: BytesStorageMetadata()
            if row.dtype is None
            else TensorStorageMetadata(
                TensorProperties(row.dtype),
                torch.Size(row.shape),
                [ChunkStorageMetadata(torch.Size([0] * len(row.shape)), torch.Size(row.shape))],
            )
            for name, row in rows.items()
        },
        planner_data={name: row.keys for name, row in rows.items()},
    )


#: Bytes that are read together.
_BATCH_BYTES = 256 << 20


def _batches(items: Sequence[ReadItem]) -> Iterator[list[ReadItem]]:
    """Groups items so that those of a group need little memory."""
    some: list[ReadItem] = []
    nelements = 0
    for item in items:
        some.append(item)
        nelements += item.lengths.numel()
        if 8 * nelements >= _BATCH_BYTES:
            yield some
            some, nelements = [], 0
    if some:
        yield some


def _box(item: ReadItem) -> object:
    if item.type == LoadItemType.BYTE_IO:
        return ...
    return tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
