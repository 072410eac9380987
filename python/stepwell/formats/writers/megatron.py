"""Checkpoints of Megatron-Core (``torch_dist``): those of DCP without paths, and beside them
``metadata.json`` and ``common.pt``.

Values that are not tensors are common ones. Those of a grid are objects of DCP: a dict with the
keys ``shard_<offset>_<shape>`` at the top.
"""

from __future__ import annotations

import json
import re

from ..._paths import named
from ...errors import MisuseError
from . import dcp
from .content import Content, FileOptions, Namespace, PlainValue, tensors_in
from .output import OutputFile, OutputTensor
from .torch import add_archive

_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: Megatron takes checkpoints without a version for old ones, with another order of rows.
_VERSION = ("checkpoint_version", 3.0)
_SHARD = re.compile(r"shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
#: In the place of a container that has tensors only.
_NOTHING = object()


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans all files."""
    if not isinstance(content.state, dict):
        what = "list" if isinstance(content.state, (list, tuple)) else "single leaf"
        raise MisuseError(
            f'to="megatron" writes dicts with Megatron\'s keys, and this state is a {what}. Name its leaves with map=, or '
            "choose a dict below it with subtree="
        )
    common: dict[object, object] = dict([_VERSION])
    objects: dict[str, object] = {}
    for key, value in content.state.items():
        if isinstance(value, dict) and value and all(_SHARD.fullmatch(str(name)) for name in value):
            objects |= {f"{key}/{name}": [one] for name, one in value.items()}
        elif (rest := _without_tensors(value)) is not _NOTHING:
            common[key] = Namespace(rest) if key == "args" and isinstance(rest, dict) else rest
    tensor = next(tensors_in(list(objects.values())), None)
    if tensor is not None:
        raise MisuseError(
            f'to="megatron" cannot write {named(tensor.source)}: it is in an object of a grid. Leave that out with exclude='
        )
    config = OutputFile("metadata.json")
    config.add_bytes(json.dumps(_CONFIG).encode())
    values = OutputFile("common.pt")
    add_archive(values, common, [], {})
    # Megatron writes the configuration last.
    items = [*dcp.tensor_items(content.every, content.ties), *(dcp.Item(*one) for one in objects.items())]
    return [*dcp.plan_items(items, options, None), values, config]


def _without_tensors(value: object) -> object:
    """The rest of a value. A list that loses elements becomes a dict by number."""
    if isinstance(value, OutputTensor):
        return _NOTHING
    if isinstance(value, PlainValue) or not isinstance(value, (dict, list, tuple)):
        return value
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    rest = {key: left for key, one in pairs if (left := _without_tensors(one)) is not _NOTHING}
    if not rest and value:
        return _NOTHING
    return rest if isinstance(value, dict) or len(rest) < len(value) else type(value)(rest.values())
