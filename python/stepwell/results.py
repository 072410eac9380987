"""Classes of what calls return, for annotations. The most common ones are also names of
``stepwell``."""

from ._attached import Attached
from ._background import Restore
from ._checkpoint import Array, Checkpoint, Damage, Metadata, Subtree, VerifyReport
from ._contents import ItemInfo, StepInfo, StoredChunk, StoredNode
from ._holds import Hold, Rewound
from ._repair import RepairedIndex, RepairReport
from ._restore.plan import ItemPlan, RestorePlan
from ._restore.report import RestoreReport
from ._save_result import Save, SaveStats

__all__ = [
    "Array",
    "Attached",
    "Checkpoint",
    "Damage",
    "Hold",
    "ItemInfo",
    "ItemPlan",
    "Metadata",
    "RepairReport",
    "RepairedIndex",
    "Restore",
    "RestorePlan",
    "RestoreReport",
    "Rewound",
    "Save",
    "SaveStats",
    "StepInfo",
    "StoredChunk",
    "StoredNode",
    "Subtree",
    "VerifyReport",
]

for _class in (
    Array,
    Attached,
    Damage,
    Hold,
    ItemInfo,
    ItemPlan,
    RepairedIndex,
    RepairReport,
    Restore,
    Rewound,
    SaveStats,
    StepInfo,
    StoredChunk,
    StoredNode,
    Subtree,
):
    _class.__module__ = __name__
