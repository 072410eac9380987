"""Names and shapes of the parameters in files of DeepSpeed, in the order of the partitions.

They are in the files ``*_model_states.pt`` (``param_shapes``), and the values in the files
``*_optim_states.pt``. The optimizer for bfloat16 without ZeRO has names in
``param_slice_mappings`` only. With ``round_robin_gradients`` these have another order than the
values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from .description import Tensor
from .typed_fields import Fields, Size, is_count, unwrapped

#: The dict of an optimizer's file that has its state.
STATE = "optimizer_state_dict"


def shapes_of(model: Fields) -> list[dict[str, Size]]:
    """Returns the shapes of the parameters, by group."""
    shapes = [
        Fields(model.file, one, "a group of `param_shapes`").sizes() for one in model.list("param_shapes")
    ]
    names = list(itertools.chain.from_iterable(shapes))
    if len(set(names)) != len(names):
        model.wrong("`param_shapes` names a parameter twice")
    return shapes


def names_of(model: Fields, files: Sequence[Fields]) -> set[str]:
    """Returns the names of the parameters."""
    if model.has("param_shapes"):
        return {name for group in shapes_of(model) for name in group}
    ranks = [file.fields(STATE) for file in files]
    return {str(name) for group in range(_mapped_groups(ranks)) for name in _mapped(ranks, group)}


def _mapped_groups(ranks: Sequence[Fields]) -> int:
    """The number of groups in ``param_slice_mappings``."""
    mappings = ranks[0].get("param_slice_mappings") if ranks else None
    return len(mappings) if isinstance(mappings, list) else 0


def _mapped(ranks: Sequence[Fields], group: int) -> list[object]:
    """The names of a group's parameters in the order of ``param_slice_mappings``."""
    order: list[object] = []
    for rank in ranks:
        mappings = rank.get("param_slice_mappings")
        own = unwrapped(mappings[group]) if isinstance(mappings, list) and group < len(mappings) else None
        if not isinstance(own, dict):
            return []
        order.extend(name for name in own if not order or name != order[-1])
    return order


def mapped_shapes(
    model: Fields, ranks: Sequence[Fields], module: Mapping[str, object]
) -> list[dict[str, Size]]:
    """Returns the shapes of the parameters of the optimizer for bfloat16 without ZeRO, which does
    not reorder them. They are those of the weights of the model itself."""
    if ranks[0].has("zero_stage") or not _mapped_groups(ranks):
        model.wrong("it has no `param_shapes`, which name the parameters in *_optim_states.pt")
    found: list[dict[str, Size]] = []
    seen: set[str] = set()
    for group in range(_mapped_groups(ranks)):
        found.append({})
        for name in map(str, _mapped(ranks, group)):
            weight = module.get(name)
            if not isinstance(weight, Tensor) or name in seen:
                model.wrong(f"`{name[:200]}` of `param_slice_mappings` is twice, or has no weight")
            seen.add(name)
            found[-1][name] = weight.shape
    return found


def paddings_of(first: Fields, shapes: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Returns the elements behind each parameter, by group."""
    if not first.has("param_alignment_paddings"):
        return [[] for _ in shapes]
    found = first.list("param_alignment_paddings")
    is_sound = len(found) == len(shapes) and all(
        isinstance(one, list) and len(one) == len(group) and all(map(is_count, one))
        for one, group in zip(found, shapes, strict=False)
    )
    if not is_sound:
        first.wrong("`param_alignment_paddings` has no number for each parameter")
    return found  # type: ignore[return-value]


def is_reordered(ranks: Sequence[Fields], group: int, names: Iterable[str]) -> bool:
    """True if ``param_slice_mappings`` contradict the order of a group's parameters."""
    order = _mapped(ranks, group)
    return bool(order) and order != list(names)
