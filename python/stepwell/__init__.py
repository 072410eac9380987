"""A checkpoint manager for training: committed steps are complete and durable, training does not
wait, and every step restores in whole or in part.

    import stepwell as sw

    with sw.CheckpointManager("runs/llama", save_policy=100, retention=3) as mgr:
        state, first = mgr.resume(state)
        for step in range(first, 10_000):
            state = update(state)
            mgr.save(step, state, metrics={"loss": loss})

Importing this imports no framework. Each part of the package is imported when it is first used:
``sw.coordinators``, ``sw.errors``, ``sw.events``, ``sw.maps``, ``sw.providers``, ``sw.results``,
``sw.sharding`` and ``sw.torch`` hold what fewer programs need.
"""

import importlib as _importlib
import typing as _typing

from . import (
    _lifecycle,  # noqa: F401  (registers its exit hook first)
    errors,
)
from ._core import VERSION as __version__
from .errors import (
    CorruptCheckpoint,
    LoadFailed,
    LockedError,
    MismatchError,
    MisuseError,
    RankFailed,
    SaveFailed,
    StepExists,
    StepNotFound,
    StepwellError,
    StorageError,
    UnsupportedLeaf,
)

if _typing.TYPE_CHECKING:
    from . import coordinators, events, maps, providers, results, sharding
    from ._adopt import adopt
    from ._advise import advise
    from ._checkpoint import Checkpoint
    from ._conversion.convert import convert, export
    from ._doctor import doctor
    from ._engine_info import engine_info
    from ._exports import Export
    from ._manager import CheckpointManager
    from ._opening import metadata, restore, restore_async, verify, watch
    from ._opening import open as open
    from ._options import Options, StepName
    from ._policies import (
        SavePolicy,
        at_steps,
        every_optimal,
        every_seconds,
        every_steps,
        on_preemption,
        when,
        when_idle,
    )
    from ._repair import repair
    from ._restore.report import RestoreReport
    from ._retention import (
        Retention,
        keep_all,
        keep_best,
        keep_every,
        keep_latest,
        keep_newer_than,
        keep_steps,
    )
    from ._roots import open_root
    from ._save_result import Save
    from ._singular import add_metrics, save, save_async
    from ._start import Start
    from ._state.registry import register
    from ._state.specs import AS_STORED, ArraySpec, ObjectSpec, PerRank, Replicated
    from ._steps import inspect
    from ._store import Store
    from ._tiers import Tier
    from ._trace.runs import compare_traces

#: The modules of the other names. Each is imported when a name of it is first used, so that
#: importing the package costs almost nothing.
_MODULES = {
    "_adopt": "adopt",
    "_advise": "advise",
    "_checkpoint": "Checkpoint",
    "_conversion.convert": "convert export",
    "_manager": "CheckpointManager",
    "_doctor": "doctor",
    "_engine_info": "engine_info",
    "_exports": "Export",
    "_opening": "metadata open restore restore_async verify watch",
    "_options": "Options StepName",
    "_store": "Store",
    "_policies": "SavePolicy at_steps every_optimal every_seconds every_steps on_preemption when when_idle",
    "_repair": "repair",
    "_restore.report": "RestoreReport",
    "_roots": "open_root",
    "_retention": "Retention keep_all keep_best keep_every keep_latest keep_newer_than keep_steps",
    "_save_result": "Save",
    "_singular": "add_metrics save save_async",
    "_start": "Start",
    "_state.registry": "register",
    "_state.specs": "AS_STORED ArraySpec ObjectSpec PerRank Replicated",
    "_steps": "inspect",
    "_tiers": "Tier",
    "_trace.runs": "compare_traces",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
_NAMESPACES = ("coordinators", "events", "maps", "providers", "results", "sharding", "torch")


if not _typing.TYPE_CHECKING:  # a misspelt name is an error of type checkers

    def __getattr__(name: str) -> object:
        if name in _NAMESPACES:
            return _importlib.import_module(f"stepwell.{name}")
        module = _MODULE_OF.get(name)
        if module is None:
            advice = "" if name.startswith("_") else _advice(name)
            raise AttributeError(f"module 'stepwell' has no attribute {name!r}{advice}")
        found = getattr(_importlib.import_module(f"stepwell.{module}"), name)
        globals()[name] = found
        return found


def _advice(name: str) -> str:
    """Returns where that name is, or the nearest one."""
    import difflib

    for space in ("coordinators", "errors", "events", "maps", "providers", "results", "sharding"):
        if name in _importlib.import_module(f"stepwell.{space}").__all__:
            return f". It is sw.{space}.{name}"
    near = difflib.get_close_matches(name, __dir__(), 1)
    return f". Did you mean {near[0]!r}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if not name.startswith("_")), *_MODULE_OF, *_NAMESPACES})


#: All names but ``open``, which would replace the built-in one.
__all__ = [
    "AS_STORED",
    "ArraySpec",
    "Checkpoint",
    "CheckpointManager",
    "CorruptCheckpoint",
    "Export",
    "LoadFailed",
    "LockedError",
    "MismatchError",
    "MisuseError",
    "ObjectSpec",
    "Options",
    "PerRank",
    "RankFailed",
    "Replicated",
    "RestoreReport",
    "Retention",
    "Save",
    "SaveFailed",
    "SavePolicy",
    "Start",
    "StepExists",
    "StepName",
    "StepNotFound",
    "StepwellError",
    "StorageError",
    "Store",
    "Tier",
    "UnsupportedLeaf",
    "__version__",
    "add_metrics",
    "adopt",
    "advise",
    "at_steps",
    "compare_traces",
    "convert",
    "coordinators",
    "doctor",
    "engine_info",
    "errors",
    "events",
    "every_optimal",
    "every_seconds",
    "every_steps",
    "export",
    "inspect",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_latest",
    "keep_newer_than",
    "keep_steps",
    "maps",
    "metadata",
    "on_preemption",
    "open_root",
    "providers",
    "register",
    "repair",
    "restore",
    "restore_async",
    "results",
    "save",
    "save_async",
    "sharding",
    "verify",
    "watch",
    "when",
    "when_idle",
]
