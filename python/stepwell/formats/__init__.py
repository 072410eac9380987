"""Checkpoints of other libraries, opened as if they were ours.

A format module describes the files of one family: a tree of containers, tensors with the places of
their bytes, and objects. The engine reads the tensors from there. So a restore in
part, resharded or cast, ``sw.open`` and the command line work as with our own files. No other
library is imported, and no pickle is executed.

A format is recognised by its files. Nothing vouches for the bytes of most formats; ``verify``
says how many these are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from .. import _core
from .._restore import collector as collecting
from ..errors import FormatError, StepwellError, from_system
from . import adoption, dcp, deepspeed, flax, lookup, megatron, npz, orbax, roots, safetensors, torch_save
from .description import Description, Value, of_parts
from .files import json_value
from .refused import refuse, refuse_file

__all__ = ["Description", "find", "find_adoption", "find_at", "find_step", "list_steps", "roots"]

#: Describes the files at a path; ``None``: another format.
Format: TypeAlias = Callable[[str], Description | None]

_FORMATS: Sequence[Format] = (
    megatron.describe,
    dcp.describe,
    orbax.describe,
    safetensors.describe,
    torch_save.describe,
    deepspeed.describe,
    npz.describe,
    flax.describe,
)


# Metadata become many small objects, which are all there until it returns.
@collecting.paused()
def find(path: str, *, adopted: bool = True) -> Description | None:
    """Returns the description of what another library wrote at a path, if there is any. That of a
    root is its newest complete step. A known format that is not read is refused by its name. Reads
    are checked if the checkpoint was adopted, unless ``adopted`` is false."""
    with _explaining(path), lookup.located(path):
        found = _describe(path, lookup.reading(), adopted)
        if found is None and (listing := roots.find(path)) is not None:
            found = _of_step(listing, None, adopted)
        if found is None:
            found = _step_at(path, adopted)
        if found is None:
            refuse(path)
        return found


@collecting.paused()
def find_step(path: str, step: int | str | None, *, adopted: bool = True) -> Description | None:
    """Returns the description of a step of a root of another library; ``None`` if the path is no
    such root. ``adopted`` as of :func:`find`."""
    with _explaining(path), lookup.located(path):
        listing = roots.find(path)
        return None if listing is None else _of_step(listing, step, adopted)


@collecting.paused()
def find_at(path: str, *, finished: bool = True) -> Description | None:
    """Returns the description of a path as a step of the root above it, with all its parts;
    ``None``: it is no step. Steps beside it are not looked at. Reads are checked if it was
    adopted. An unfinished step is refused unless ``finished`` is false."""
    with _explaining(path), lookup.located(path):
        if (listing := roots.containing(path)) is None:
            return None
        name = os.path.basename(path)
        return _of_listed(listing, listing.step(name) if finished else listing.named(name)[-1], True)


def list_steps(path: str) -> roots.Listing | None:
    """Returns the steps of a root of another library; ``None`` if the path is no such root."""
    with _explaining(path), lookup.located(path):
        return roots.find(path)


def find_adoption(path: str, step: int | str | None) -> tuple[str, adoption.Adoption | None]:
    """Returns the path of a checkpoint, or of a step of a root, and its checksums. ``None``: it was
    not adopted."""
    with _explaining(path), lookup.located(path):
        target = path
        if step is not None or not lookup.is_named(adoption.place(path)):
            listing = roots.find(path)
            if listing is not None:
                target = (listing.step(None) if step is None else listing.named(step)[-1]).path
        return target, adoption.find(target)


@contextmanager
def _explaining(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StepwellError):
            raise
        raise from_system(f"{path} cannot be read", error, path) from error


def _describe(path: str, reading: _core.Reading, adopted: bool) -> Description | None:
    known = _checking(path, reading, adopted)
    with reading:
        refuse_file(path)
        for describe in _FORMATS:
            found = describe(path)
            if found is not None:
                found.adoption, found.reading = known, reading
                return found
    return None


def _checking(path: str, reading: _core.Reading, adopted: bool) -> adoption.Adoption | None:
    """Has the reads of an adopted checkpoint checked, and returns its checksums."""
    known = adoption.find(path) if adopted else None
    if known is not None:
        known.check_in(reading)
    return known


def _of_step(listing: roots.Listing, wanted: int | str | None, adopted: bool) -> Description:
    step = listing.step(wanted)
    try:
        return _of_listed(listing, step, adopted)
    except StepwellError as error:
        error.step = step.number
        raise


def _of_listed(listing: roots.Listing, step: roots.ForeignStep, adopted: bool) -> Description:
    reading = lookup.reading()
    known = _checking(step.path, reading, adopted)
    # The checksums of a step are those of its parts, and are read once.
    of_their_own = adopted and known is None
    if step.parts:
        parts = {name: _part(path, reading, of_their_own) for name, path in step.parts.items()}
        found = of_parts(listing.family, step.path, parts)
    else:
        found = _required(step.checkpoint or step.path, reading, of_their_own)
    found.path, found.step, found.of_root, found.ours = step.path, step.number, True, step.ours
    found.adoption, found.reading = known, reading
    return found


def _step_at(path: str, adopted: bool) -> Description | None:
    """The description of a directory that is a checkpoint only as a step of the root above it."""
    try:
        listing = roots.containing(path) if lookup.is_dir(path) else None
    except StepwellError:  # of the directory above, which nobody has asked for
        return None
    return None if listing is None else _of_step(listing, os.path.basename(path), adopted)


def _part(path: str, reading: _core.Reading, adopted: bool) -> Description:
    if not path.endswith(".json"):
        return _required(path, reading, adopted)
    _checking(path, reading, adopted)
    with reading:
        return Description("JSON", path, Value(json_value(path)), files=[path])


def _required(path: str, reading: _core.Reading, adopted: bool) -> Description:
    found = _describe(path, reading, adopted)
    if found is None:
        refuse(path)
        raise FormatError(f"{path}: this is in no format that is read")
    return found
