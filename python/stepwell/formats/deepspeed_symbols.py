"""Symbols of DeepSpeed in pickles."""

from __future__ import annotations

from collections.abc import Mapping

from .pickle_values import Found, Made, Symbol, plain
from .python_symbols import integer, namespace


def _enumerated(made: Made) -> Found:
    """A member of an enumeration is its number."""
    return plain(integer(made.arg(0)))


#: Objects with attributes become dicts.
SYMBOLS: Mapping[tuple[str, str], Symbol] = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _enumerated,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): namespace,
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): namespace,
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): namespace,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): namespace,
}
