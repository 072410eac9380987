"""A torch model: the names of its parameters without wrappers, and its own loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch

from .torch_groups import Stored

#: The names that wrappers insert into parameter names. Stored names are those of the wrapped model.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@final
class OwnLoading:
    """A model whose loading does more than copy. A restore calls its own ``load_state_dict``, with
    its own names."""

    _takes_tensors = True

    def __init__(self, model: torch.nn.Module, kept: set[str] | None = None) -> None:
        self._model = model
        self._kept = kept

    def state_dict(self) -> dict[str, object]:
        """Tensors and extra state, by plain names."""
        plain = plain_names(self._model)
        state = {plain(str(name)): value for name, value in self._model.state_dict().items()}
        return state if self._kept is None else {name: state[name] for name in state if name in self._kept}

    def load_state_dict(self, state: Mapping[str, Stored]) -> None:
        """Loads the tensors into the model."""
        plain = plain_names(self._model)
        own = {plain(str(name)): name for name in self._model.state_dict()}
        self._model.load_state_dict(
            {own.get(name, name): value for name, value in state.items()}, strict=self._kept is None
        )


#: Classes (of torch, and others of the same name) that hold a model as ``module``.
_HOLDERS = frozenset({"DataParallel", "DistributedDataParallel"})


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``torch.compile``."""
    while isinstance(wrapped := model._modules.get("_orig_mod"), torch.nn.Module):
        model = wrapped
    return model


def plain_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Returns a function from a parameter's name to its name in the model without wrappers."""
    is_held = any(cls.__name__ in _HOLDERS for cls in type(unwrapped(model)).__mro__)

    def plain(name: str) -> str:
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        return ".".join(parts[1:] if is_held and parts[0] == "module" else parts)

    return plain
