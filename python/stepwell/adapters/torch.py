"""What this package knows of torch's plain values. Imported only where torch is."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]


def describe(obj: Any) -> Any:
    """``torch.Size`` and ``torch.dtype``, by name; ``None`` for the rest."""
    if isinstance(obj, torch.Size):
        return ("extension", "torch.Size", list(obj))
    if isinstance(obj, torch.dtype):
        return ("extension", "torch.dtype", str(obj).removeprefix("torch."))
    return None


def revive(name: str, parts: Any) -> Any:
    """The other way."""
    if name == "torch.Size":
        return torch.Size(parts)
    if name == "torch.dtype":
        found = getattr(torch, parts, None)
        if isinstance(found, torch.dtype):
            return found
    from . import StoredExtension

    return StoredExtension(name, parts)


def spec(obj: Any) -> Any:
    """No torch arrays yet."""
    return None
