"""Classes of what calls return, for annotations. The most common ones are also names of
``stepwell``."""

from ._attached import Attached
from ._background import Restore
from ._checkpoint import Array, Checkpoint, Damage, Metadata, Subtree, VerifyReport
from ._contents import StoredChunk, StoredNode
from ._holds import Hold, Rewound
from ._manifest import Manifest
from ._repair import RepairedIndex, RepairReport
from ._restore.plan import ItemPlan, RestorePlan
from ._restore.report import RestoreReport
from ._retention import RetentionDecision
from ._save_result import Save, SaveStats
from ._steps import ItemInfo, StepInfo

__all__ = [
    "Array",
    "Attached",
    "Checkpoint",
    "Damage",
    "Hold",
    "ItemInfo",
    "ItemPlan",
    "Manifest",
    "Metadata",
    "RepairReport",
    "RepairedIndex",
    "Restore",
    "RestorePlan",
    "RestoreReport",
    "RetentionDecision",
    "Rewound",
    "Save",
    "SaveStats",
    "StepInfo",
    "StoredChunk",
    "StoredNode",
    "Subtree",
    "VerifyReport",
]

for _name in __all__:
    # The most common ones are names of stepwell itself.
    if globals()[_name].__module__ != "stepwell":
        globals()[_name].__module__ = __name__
