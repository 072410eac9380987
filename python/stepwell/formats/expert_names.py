"""Names of experts' parameters in files of DeepSpeed.

In ``param_shapes``, an expert has its number among those of expert-parallel rank 0. In the files
``layer_*_expert_*_model_states.pt``, it has its number in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .description import Tensor
from .typed_fields import Fields, Size

#: The name of an expert's parameter: the number, and what is before and behind it.
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..*)", re.DOTALL)


class ExpertNames:
    """The names in the whole model."""

    def __init__(self, weights: Mapping[str, object]) -> None:
        """``weights`` are those of all experts, from their files."""
        self._weights = weights
        numbers: dict[str, set[int]] = {}
        for name in weights:
            if (match := _EXPERT.fullmatch(name)) is not None:
                numbers.setdefault(match[1], set()).add(int(match[2]))
        #: The number of experts of each layer.
        self._counts = {layer: len(found) for layer, found in numbers.items()}

    def in_model(self, model: Fields, local: str, shape: Size, expert_rank: int, size: int) -> str:
        """Returns the name of a parameter of that shape, of one of ``size`` expert-parallel ranks.
        A group of the optimizer may have some of the rank's experts only."""
        match = _EXPERT.fullmatch(local)
        assert match is not None
        layer, number, rest = match[1], int(match[2]), match[3]
        own, remainder = divmod(self._counts.get(layer, 0), size)
        name = f"{layer}{expert_rank * own + number}{rest}"
        weight = self._weights.get(name)
        if remainder or number >= own or not isinstance(weight, Tensor) or weight.shape != shape:
            model.wrong(
                f"expert {number} of expert-parallel rank {expert_rank} is not in the files "
                f"layer_*_expert_*_model_states.pt as `{name[:200]}` of shape {list(shape)}. "
                "Copy the files of all experts, and keep those of one save"
            )
        return name


def is_expert(name: str) -> bool:
    """True for the name of an expert's parameter."""
    return _EXPERT.fullmatch(name) is not None
