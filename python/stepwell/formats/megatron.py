"""Checkpoints of Megatron: those of ``megatron.core.dist_checkpointing``, and the old ones with a
directory for each rank.

A distributed checkpoint has ``metadata.json``, which names a backend. With ``torch_dist`` its
tensors and objects are those of DCP under flat keys, and ``common.pt`` has all other values. With
``zarr`` each tensor is an array, and each object a file. Megatron is not imported.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence

from .._paths import named, printable
from ..errors import FormatError
from . import dcp, lookup, zarr
from .description import Description, Guarded, Opaque, Value
from .files import corrupt, read_whole
from .megatron_files import COMMON, COMMON_KEY, CONFIG, no_common, no_config
from .pickle_values import placed
from .torch_save import TorchFile, required, with_streams

FAMILY = "Megatron"
#: That of DCP.
_METADATA = ".metadata"
_MAX_CONFIG_BYTES = 64 << 10
#: The key of an object: that of all its shards, and the shard's offset and the shape of their grid.
_SHARD = re.compile(r"(.+)/(shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*)", re.DOTALL)
#: Keys of the distributed optimizer that have no parameters, and why.
_REFUSED: Sequence[tuple[re.Pattern[str], str]] = (
    (
        re.compile(r"(.*\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\..*", re.DOTALL),
        "bucket of a distributed optimizer, without names of parameters (dp_reshardable or "
        "fully_sharded_bucket_space)",
    ),
    (
        re.compile(r"(.*\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state(/.*)?", re.DOTALL),
        "buffers of a distributed optimizer, without names of parameters (dp_zero_gather_scatter)",
    ),
)
#: A rank's directory in a checkpoint of the old format, and its files.
RANK = re.compile(r"mp_rank_\d{2,6}(?:_\d{3,6}){0,2}")
_RANK_FILE, _RANK_OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
#: Parallel dimensions that multiply the directories of ranks.
_DIMENSIONS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


def describe(path: str) -> Description | None:
    """Describes the directory of a checkpoint."""
    if not lookup.is_dir(path):
        return None
    names = lookup.names(path)
    backend = _backend(path) if CONFIG in names else None
    if backend is None and COMMON in names and (CONFIG in names or _METADATA in names):
        raise no_config(path)
    if backend == "torch_dist":
        return _of_dcp(path, names)
    if backend == "zarr":
        return _of_zarr(path, names)
    if backend is not None:
        raise FormatError(
            f"{path}: a checkpoint of Megatron with the backend `{printable(backend)}`; torch_dist and zarr are read"
        )
    ranks = sorted(name for name in names if RANK.fullmatch(name))
    ranks = [name for name in ranks if lookup.is_file(os.path.join(path, name, _RANK_FILE))]
    return _of_ranks(path, ranks) if ranks else None


def _backend(path: str) -> str | None:
    """The backend of a distributed checkpoint. ``None`` if the file is another library's."""
    file = os.path.join(path, CONFIG)
    if (lookup.length(file) or 0) > _MAX_CONFIG_BYTES:
        return None
    try:
        config = json.loads(read_whole(file, _MAX_CONFIG_BYTES, lambda _: ValueError()))
    except (ValueError, RecursionError):
        return None
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    return backend[:100] if isinstance(backend, str) else None


class _Leaves:
    """The leaves of a checkpoint, by key and shard."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.state: dict[str | int, object] = {}
        #: Keys with shards.
        self._objects: dict[str, dict[str, object]] = {}

    def add(self, key: str, value: object) -> None:
        """Adds a tensor or an object."""
        if key in self.state:
            raise corrupt(self._path, f"{named(key)} is in it twice")
        self.state[key] = value

    def add_shard(self, key: str, shard: str, value: object) -> None:
        """Adds an object of a grid."""
        if key not in self._objects:
            self._objects[key] = {}
            self.add(key, self._objects[key])
        self._objects[key][shard] = value

    def add_common(self, common: object) -> None:
        """Adds common values at the top."""
        if not isinstance(common, dict):
            raise corrupt(self._path, f"a dict was expected in {COMMON}")
        for key, value in common.items():
            self.add(key, value)


def _of_dcp(path: str, names: Sequence[str]) -> Description:
    if _METADATA not in names:
        raise corrupt(path, f"its {_METADATA} is missing. Copy the whole directory")
    checkpoint = dcp.Checkpoint(path, [_METADATA])
    leaves = _Leaves(path)
    found = checkpoint.leaves({name: why for name in checkpoint.names if (why := _refused(name))})
    common = required(os.path.join(path, COMMON)) if COMMON in names else None
    if common is None and COMMON_KEY not in found:
        raise no_common(path)
    for name, value in found.items():
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            value = _only(value)
        if name == COMMON_KEY and common is None:
            leaves.add_common(value)
        elif shard is not None and shard[1] not in found:
            leaves.add_shard(shard[1], shard[2], value)
        else:
            leaves.add(name, value)
    files = {} if common is None else {os.path.join(path, COMMON): common}
    if common is not None:
        leaves.add_common(common.state)
    return _description(path, leaves.state, files, checkpoint.guarded)


def _only(value: object) -> object:
    """Returns the only object of a list, or all of them. A rank stores a list of those that it has
    of a shard."""
    elements = value.value if isinstance(value, Value) else value
    if not isinstance(elements, list) or len(elements) != 1:
        return value
    return placed(elements[0]) if isinstance(value, Value) else elements[0]


def _refused(name: str) -> Opaque | None:
    """Names a leaf without parameters, and says why. ``None``: another leaf."""
    return next((Opaque(why) for pattern, why in _REFUSED if pattern.fullmatch(name)), None)


def _description(
    path: str,
    state: object,
    files: Mapping[str, TorchFile],
    guarded: Callable[[], Mapping[str, Sequence[Guarded]]] = dict,
) -> Description:
    """``files``: those of ``torch.save``."""

    def all_guarded() -> Mapping[str, Sequence[Guarded]]:
        return {**guarded(), **{name: file.guarded() for name, file in files.items()}}

    return Description(FAMILY, path, state, files=with_streams(files), guarded=all_guarded)


def _of_zarr(path: str, names: Sequence[str]) -> Description:
    leaves = _Leaves(path)
    store = zarr.Files(path)
    files: dict[str, TorchFile] = {}
    # Writers of flattened tensors lock them with files in ``KEY.sync``.
    locks = {f"{name}.sync" for name in names}
    present = sorted(set(names) - locks)
    stored = {key for key in present if lookup.is_file(os.path.join(path, key, ".zarray"))}
    arrays = zarr.arrays(
        store, [key for key in present if key in stored and _refused(key) is None], is_3=False
    )
    if COMMON not in present:
        raise no_common(path)
    common = files[os.path.join(path, COMMON)] = required(os.path.join(path, COMMON))
    leaves.add_common(common.state)
    for key in present:
        directory = os.path.join(path, key)
        if not lookup.is_dir(directory):
            continue
        if key in stored:
            leaves.add(key, _refused(key) or arrays[key])
            continue
        for name in sorted(lookup.names(directory)):
            shard = _SHARD.fullmatch(f"{key}/{name.removesuffix('.pt')}")
            if shard is None or not name.endswith(".pt"):
                continue
            refused = _refused(key)
            if refused is None:
                file = os.path.join(directory, name)
                files[file] = required(file)
            leaves.add_shard(key, shard[2], refused or files[file].state)
    return _description(path, leaves.state, files)


def _of_ranks(path: str, ranks: Sequence[str]) -> Description:
    """The files of all ranks: the state of one rank, or a dict of several. Nothing says along which
    axis a tensor was cut."""
    files: dict[str, TorchFile] = {}
    states: dict[str | int, object] = {}
    for rank in ranks:
        file = os.path.join(path, rank, _RANK_FILE)
        files[file] = required(file)
        state = files[file].state
        if isinstance(state, dict) and lookup.is_file(os.path.join(path, rank, _RANK_OPTIMIZER)):
            what = f"Megatron's optimizer in {_RANK_OPTIMIZER}. Pass that file to read its buffers"
            state = {**state, _RANK_OPTIMIZER: Opaque(what)}
        states[rank] = state
    expected = _ranks_of(states[ranks[0]])
    if expected not in (None, len(ranks)):
        raise FormatError(
            f"{path}: {len(ranks)} directories mp_rank_… of {expected}. Copy the directories of all ranks, or pass the "
            f"{_RANK_FILE} of one"
        )
    return _description(path, states[ranks[0]] if len(ranks) == 1 else states, files)


def _ranks_of(state: object) -> int | None:
    """The number of ranks with a directory, if the arguments of the run say it."""
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, dict) or _DIMENSIONS[0] not in args:
        return None
    count = 1
    for name in _DIMENSIONS:
        size = args.get(name, 1)
        if type(size) is not int or not 0 < size < 1 << 20:
            return None
        count *= size
    return count
