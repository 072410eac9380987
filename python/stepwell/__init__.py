"""A checkpoint manager for training: a committed step is a true step, training does not wait, and
any of them restores in whole or in part.

    import stepwell as sw

    policy, retention = sw.every_steps(100), sw.keep_latest(3)
    with sw.CheckpointManager("runs/llama", save_policy=policy, retention=retention) as mgr:
        if mgr.latest_step() is not None:
            state = mgr.restore(into=state)
        for step in range(mgr.next_step(), 10_000):
            state = update(state)
            mgr.save(step, state, metrics={"loss": loss})

Importing this imports no framework; each part of the package is imported when it is first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import errors
from . import lifecycle as _lifecycle  # noqa: F401  (registers its exit hook first)
from ._core import VERSION as __version__
from .errors import (
    Cancelled,
    ClosedError,
    CoordinationTimeout,
    CoordinatorError,
    CorruptCheckpoint,
    DeviceError,
    DonatedBuffer,
    DurabilityUncertain,
    ForkedProcess,
    FormatError,
    InternalError,
    LoadFailed,
    LockedError,
    MismatchError,
    MisuseError,
    NoLocks,
    NotAStep,
    RankFailed,
    ReadOnlyError,
    SaveFailed,
    StalledError,
    StepExists,
    StepGone,
    StepNotFound,
    StepOrder,
    StepwellError,
    StorageError,
    TornSnapshot,
    UnsupportedLeaf,
)

if _TYPE_CHECKING:
    from .checkpoint import Array, Branch, Checkpoint, Damage, Metadata, VerifyReport
    from .coordinators import MPI, JaxService, SharedDirectory, TorchStore
    from .events import JsonLines
    from .manager import CheckpointManager
    from .mesh import RankMesh, Rules
    from .options import Options, StepName
    from .pending import Save, SaveStats
    from .plan import ItemPlan, RestorePlan
    from .policies import SavePolicy, at_steps, every_seconds, every_steps, on_preemption, when, when_idle
    from .providers import Chunk, StateProvider
    from .registry import StoredEnum, register
    from .report import RestoreReport
    from .retention import (
        Retention,
        keep_all,
        keep_best,
        keep_every,
        keep_latest,
        keep_newer_than,
        keep_steps,
    )
    from .shards import FlatShard, LocalShard, Segment, Segments
    from .singular import add_metrics, engine_info, metadata, open, restore, save, save_async, verify, watch
    from .specs import AS_STORED, ArraySpec, ObjectSpec, PerRank, Replicated

#: The modules of the other names. Each is imported when a name of it is first used, so that
#: importing the package costs almost nothing.
_MODULES = {
    "checkpoint": "Array Branch Checkpoint Damage Metadata VerifyReport",
    "coordinators": "JaxService MPI SharedDirectory TorchStore",
    "events": "JsonLines",
    "manager": "CheckpointManager",
    "mesh": "RankMesh Rules",
    "options": "Options StepName",
    "pending": "Save SaveStats",
    "plan": "ItemPlan RestorePlan",
    "policies": "SavePolicy at_steps every_seconds every_steps on_preemption when when_idle",
    "providers": "Chunk StateProvider",
    "registry": "StoredEnum register",
    "report": "RestoreReport",
    "retention": "Retention keep_all keep_best keep_every keep_latest keep_newer_than keep_steps",
    "shards": "FlatShard LocalShard Segment Segments",
    "singular": "add_metrics engine_info metadata open restore save save_async verify watch",
    "specs": "AS_STORED ArraySpec ObjectSpec PerRank Replicated",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> _Any:
    if name == "torch":
        return _importlib.import_module("stepwell.torch")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    found = getattr(_importlib.import_module(f"stepwell.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, "torch"})


__all__ = [
    "AS_STORED",
    "MPI",
    "Array",
    "ArraySpec",
    "Branch",
    "Cancelled",
    "Checkpoint",
    "CheckpointManager",
    "Chunk",
    "ClosedError",
    "CoordinationTimeout",
    "CoordinatorError",
    "CorruptCheckpoint",
    "Damage",
    "DeviceError",
    "DonatedBuffer",
    "DurabilityUncertain",
    "FlatShard",
    "ForkedProcess",
    "FormatError",
    "InternalError",
    "ItemPlan",
    "JaxService",
    "JsonLines",
    "LoadFailed",
    "LocalShard",
    "LockedError",
    "Metadata",
    "MismatchError",
    "MisuseError",
    "NoLocks",
    "NotAStep",
    "ObjectSpec",
    "Options",
    "PerRank",
    "RankFailed",
    "RankMesh",
    "ReadOnlyError",
    "Replicated",
    "RestorePlan",
    "RestoreReport",
    "Retention",
    "Rules",
    "Save",
    "SaveFailed",
    "SavePolicy",
    "SaveStats",
    "Segment",
    "Segments",
    "SharedDirectory",
    "StalledError",
    "StateProvider",
    "StepExists",
    "StepGone",
    "StepName",
    "StepNotFound",
    "StepOrder",
    "StepwellError",
    "StorageError",
    "StoredEnum",
    "TorchStore",
    "TornSnapshot",
    "UnsupportedLeaf",
    "VerifyReport",
    "__version__",
    "add_metrics",
    "at_steps",
    "engine_info",
    "errors",
    "every_seconds",
    "every_steps",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_latest",
    "keep_newer_than",
    "keep_steps",
    "metadata",
    "on_preemption",
    "open",
    "register",
    "restore",
    "save",
    "save_async",
    "verify",
    "watch",
    "when",
    "when_idle",
]
