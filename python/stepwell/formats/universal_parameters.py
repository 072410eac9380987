"""Universal checkpoints of DeepSpeed: a directory for each parameter, with its weights and each of
its slots as a file.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``. A file has a tensor, or a dict with it. A
tensor from ZeRO-3 has one dimension only; its shape is in the files ``*_model_states.pt``.
``zero/optimizer_state.pt`` has the groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from . import lookup
from .description import Chunk, Tensor
from .files import corrupt, is_file_name
from .parameter_shapes import shapes_of
from .slicing_rules import SlicingRules
from .tensor_slices import SliceRule, whole
from .typed_fields import Fields, Size, unwrapped
from .zero_state import ZeroState, beside, named_groups

DIRECTORY = "zero"
_WEIGHTS = "fp32"
_GROUPS = "optimizer_state.pt"
_END = ".pt"

#: Returns the content of a file of ``torch.save``.
Load = Callable[[str], object]


def universal_state(path: str, models: Sequence[Fields], rules: SlicingRules | None, load: Load) -> ZeroState:
    """Returns the state of the optimizer in a directory. ``models`` have the names of the
    parameters: one for each model-parallel rank. ``rules`` say which rows are padding."""
    state = ZeroState()
    names: dict[int, list[str]] = {}
    is_whole = len(models) == 1
    for model in models:
        for group, shapes in enumerate(shapes_of(model)):
            for name, size in shapes.items():
                if name not in state.masters:
                    names.setdefault(group, []).append(name)
                    rows = None if rules is None else rules.rows(name)
                    _add(state, path, name, size if is_whole else None, rows, load)
    file = os.path.join(path, _GROUPS)
    fields = Fields(file, load(file))
    state.groups = named_groups(file, fields.list("param_groups"), names)
    state.beside = beside(fields)
    if fields.has("optimizer_state_dict"):
        _add_steps(state, fields.fields("optimizer_state_dict"), names)
    return state


def _add(state: ZeroState, path: str, name: str, size: Size | None, rows: int | None, load: Load) -> None:
    """Adds a parameter of that shape, without the padding behind ``rows``."""
    if not is_file_name(name):
        raise corrupt(path, f"parameter `{name[:200]}` cannot be the name of a directory")
    directory = os.path.join(path, name)
    files = lookup.names(directory) if lookup.is_dir(directory) else []
    if _WEIGHTS + _END not in files:
        raise corrupt(path, f"parameter `{name[:200]}` has no {_WEIGHTS}{_END}. Copy the whole directory")
    for file in sorted(files):
        slot, end = os.path.splitext(file)
        if end != _END:
            continue
        where = os.path.join(directory, file)
        value = unwrapped(load(where))
        if isinstance(value, dict):
            value = unwrapped(value.get("param"))
        if isinstance(value, Tensor) and value.shape:
            value = _shaped(where, value, size, rows)
        if slot == _WEIGHTS:
            state.masters[name] = value
        else:
            state.slots.setdefault(name, {})[slot] = value
    if not isinstance(state.masters[name], Tensor):
        raise corrupt(os.path.join(directory, _WEIGHTS + _END), "a tensor was expected")


def _shaped(file: str, tensor: Tensor, size: Size | None, rows: int | None) -> Tensor:
    """A tensor of that shape without padding, which may be stored flat, or without padding.
    ``None``: its own shape."""
    shape = tensor.shape
    without = None if size is None or rows is None else (*map(min, size[:1], (rows,)), *size[1:])
    if size is not None and shape not in (size, without):
        is_flat = len(shape) == 1 and all(one.strides is None for one in tensor.chunks)
        if not is_flat or shape[0] != math.prod(size):
            raise corrupt(file, f"a tensor of shape {list(size)} was expected, not of {list(shape)}")
        tensor = replace(tensor, shape=size, chunks=tuple(map(_as_run, tensor.chunks)))
    return whole([tensor], SliceRule(None, rows=rows))


def _as_run(chunk: Chunk) -> Chunk:
    """A chunk with all elements of a flat tensor as one of a tensor of any shape."""
    return replace(chunk, start=(0,), extent=(chunk.extent[0],))


def _add_steps(state: ZeroState, base: Fields, names: dict[int, list[str]]) -> None:
    """Adds the steps of ZeRO-3, which are in the state of the first rank."""
    states = base.fields("state").entries
    for group, own in names.items():
        slots = states.get(group)
        step = slots.get("step") if isinstance(slots, dict) else None
        for name in own if step is not None else ():
            slot = replace(step) if isinstance(step, Tensor) else step
            state.slots.setdefault(name, {}).setdefault("step", slot)
