"""Layers of a pipeline of DeepSpeed, which has a file for each, under the names of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .typed_fields import Fields

_TIED = "tied_modules."


def named_layers(layers: Mapping[int, Fields], known: Collection[str]) -> dict[str, object]:
    """Returns the tensors of layers, by their numbers. A name in a file lacks the layer. ``known``
    are the names of parameters and buffers. There, tied layers have a name instead of a number."""
    tied: dict[str, str] = {}
    for name in sorted(known):
        if name.startswith(_TIED) and name.count(".") > 1:
            key, rest = name.removeprefix(_TIED).split(".", 1)
            tied.setdefault(rest, f"{_TIED}{key}.")
    found: dict[str, object] = {}
    for number, layer in layers.items():
        own = dict(layer.named_entries())
        prefix = f"{number}."
        if not any(prefix + name in known for name in own):
            prefix = min((tied[name] for name in own if name in tied), default=prefix)
        for name, value in own.items():
            found.setdefault(prefix + name, value)
    return found
