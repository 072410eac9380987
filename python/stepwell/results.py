"""Classes of what calls return, for annotations. The most common ones are also names of
``stepwell``."""

from ._adopt import AdoptReport
from ._advise import Advice, DiskForecast, PerStepSaves, Projection
from ._attached import Attached
from ._background import Restore
from ._checkpoint import Array, Checkpoint, Damage, Metadata, Subtree, VerifyReport
from ._comparison import Change, Difference
from ._contents import StoredChunk, StoredNode
from ._conversion.spec import ConversionResult
from ._doctor import DoctorReport, Finding
from ._holds import Hold, Rewound
from ._manifest import Manifest
from ._repair import RepairedIndex, RepairReport
from ._restore.plan import ItemPlan, RestorePlan
from ._restore.report import (
    CastLeaf,
    Collision,
    IdleRename,
    MissingLeaf,
    PassedOver,
    RenamedLeaf,
    ResizedLeaf,
    RestoreReport,
    UnexpectedLeaf,
    UnmatchedPattern,
    WrongDtype,
    WrongKind,
    WrongShape,
)
from ._retention import RetentionDecision
from ._roots import Root, RootStep
from ._run_measurements import RunMeasurements
from ._save_result import Save, SaveStats
from ._state.registry import StoredEnum
from ._steps import AdoptedFiles, ItemInfo, StepInfo
from ._tiers import TierStatus
from ._trace.compare import LeafDifference, ReplicaDifference
from ._trace.runs import Drift, Parting, TracedRun, TraceReport
from ._trace.tracer import TraceDifference

__all__ = [
    "AdoptReport",
    "AdoptedFiles",
    "Advice",
    "Array",
    "Attached",
    "CastLeaf",
    "Change",
    "Checkpoint",
    "Collision",
    "ConversionResult",
    "Damage",
    "Difference",
    "DiskForecast",
    "DoctorReport",
    "Drift",
    "Finding",
    "Hold",
    "IdleRename",
    "ItemInfo",
    "ItemPlan",
    "LeafDifference",
    "Manifest",
    "Metadata",
    "MissingLeaf",
    "Parting",
    "PassedOver",
    "PerStepSaves",
    "Projection",
    "RenamedLeaf",
    "RepairReport",
    "RepairedIndex",
    "ReplicaDifference",
    "ResizedLeaf",
    "Restore",
    "RestorePlan",
    "RestoreReport",
    "RetentionDecision",
    "Rewound",
    "Root",
    "RootStep",
    "RunMeasurements",
    "Save",
    "SaveStats",
    "StepInfo",
    "StoredChunk",
    "StoredEnum",
    "StoredNode",
    "Subtree",
    "TierStatus",
    "TraceDifference",
    "TraceReport",
    "TracedRun",
    "UnexpectedLeaf",
    "UnmatchedPattern",
    "VerifyReport",
    "WrongDtype",
    "WrongKind",
    "WrongShape",
]

for _name in __all__:
    # The most common ones are names of stepwell itself.
    if globals()[_name].__module__ != "stepwell":
        globals()[_name].__module__ = __name__
