"""Formats that are recognised and not read, and the way around each of them. Files that are not
recognised."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

from .. import _core
from .._locations import container_of
from ..errors import CorruptCheckpoint, FormatError
from . import lookup
from .files import read, refuse_pointer

_KERAS = "Load it with Keras, then pass model.get_weights() to sw.save"
_TENSORFLOW = "Load it with TensorFlow, then pass its arrays to sw.save"
_PADDLE = "Load it with Paddle, then pass its arrays to sw.save"
#: Offset and value of first bytes, and the message.
_BEGINNINGS: Sequence[tuple[int, bytes, str]] = (
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive. Unpack it first"),
    (0, b"\x1f\x8b", "a gzip archive. Unpack it first; a .nemo file has model_weights.ckpt inside"),
    (257, b"ustar", "a tar archive. Unpack it first; a .nemo file has model_weights.ckpt inside"),
    (0, b"GGUF", "a GGUF file of llama.cpp. Use the checkpoint that it was converted from"),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        f"an HDF5 file, as Keras writes it. {_KERAS}",
    ),
)
_TORCHSCRIPT = "a program of TorchScript. Save its state_dict with torch.save instead"
#: Ends of names in zip archives, and the message.
_MEMBERS: Sequence[tuple[str, str]] = (
    ("model.weights.h5", f"a Keras archive. {_KERAS}"),
    ("archive_format", "a program of torch.export. Save its state_dict with torch.save instead"),
    (".data/extern_modules", "a package of torch.package. Save a state_dict with torch.save instead"),
    ("constants.pkl", _TORCHSCRIPT),
    ("code/", _TORCHSCRIPT),
)
_TENSORFLOW_CHECKPOINT = f"a checkpoint of TensorFlow. {_TENSORFLOW}"
_PADDLE_DISTRIBUTED = f"a distributed checkpoint of Paddle. {_PADDLE}"
_TENSORFLOW_DATA = re.compile(r".*\.data-\d{5}-of-\d{5}")
_PADDLE_DATA, _PADDLE_METADATA = re.compile(r"\d+_\d+\.distcp"), re.compile(r"\d+\.metadata")
#: Names of files, and the message. They are in directories, too.
_FILES: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"saved_model\.pb"), f"a SavedModel of TensorFlow. {_TENSORFLOW}"),
    (re.compile(r".*\.(?:pdparams|pdopt|pdiparams|pdmodel)"), f"a file of Paddle. {_PADDLE}"),
)
#: Files of checkpoints that are directories.
_PARTS: Sequence[tuple[re.Pattern[str], str]] = (
    (_TENSORFLOW_DATA, _TENSORFLOW_CHECKPOINT),
    (_PADDLE_DATA, _PADDLE_DISTRIBUTED),
    (_PADDLE_METADATA, _PADDLE_DISTRIBUTED),
)
#: Ends of names of files in directories, and the message.
_IN_DIRECTORIES: Sequence[tuple[str, str]] = (
    (".gguf", "a GGUF file of llama.cpp. Use the checkpoint that it was converted from"),
    (".nemo", "an archive of NeMo. Unpack it, and open its model_weights.ckpt"),
    (".keras", f"a Keras archive. {_KERAS}"),
    (".h5", f"an HDF5 file, as Keras writes it. {_KERAS}"),
)


#: Files of Orbax: of a step, and of its arrays.
_OF_ORBAX = ("_CHECKPOINT_METADATA", "manifest.ocdbt")


def refuse_members(path: str, names: Collection[str]) -> None:
    """Raises :class:`FormatError` for a zip archive with these members that is not read."""
    for end, what in _MEMBERS:
        if any(name.endswith(end) or f"/{end}" in name for name in names):
            raise FormatError(f"{path}: this is {what}")


def refuse_file(path: str) -> None:
    """Raises :class:`FormatError` for a file that may be mistaken for one that is read: a file of
    Paddle, or a Git LFS pointer."""
    if lookup.is_file(path):
        name = os.path.basename(path)
        for pattern, what in (*_FILES, *_PARTS):
            if pattern.fullmatch(name):
                raise FormatError(f"{path}: this is {what}")
        refuse_pointer(path)


def refuse(path: str) -> None:
    """Raises :class:`FormatError` for what is in a known format that is not read, and for a file in
    no known format that is in no checkpoint of ours."""
    if lookup.is_dir(path):
        names = lookup.names(path)
        if any(name in names for name in _OF_ORBAX):
            raise FormatError(
                f"{path}: this checkpoint of Orbax has no tree of arrays that is read. Restore it with "
                "orbax.checkpoint, then pass its state to sw.save"
            )
        _refuse_directory(path, sorted(names))
        return
    if not lookup.is_file(path):
        if lookup.is_file(f"{path}.index"):
            raise FormatError(f"{path}: this is {_TENSORFLOW_CHECKPOINT}")
        return
    if path.endswith(".index") and _is_tensorflow(lookup.names(os.path.dirname(path))):
        raise FormatError(f"{path}: this is {_TENSORFLOW_CHECKPOINT}")
    start, _ = read(path, 0, 512)
    for at, beginning, what in _BEGINNINGS:
        if start[at:].startswith(beginning):
            raise FormatError(f"{path}: this is {what}")
    if start.startswith(b"PK\x03\x04"):
        try:
            names = [one[0] for one in _core.ZipDirectory(lookup.real(path)).members()]
        except CorruptCheckpoint:
            names = []
        refuse_members(path, names)
    if container_of(path):
        return
    if not start:
        raise FormatError(f"{path}: this file is empty. Copy or download it again")
    raise FormatError(
        f"{path}: this file is in no format that is read. These are safetensors (*.safetensors), "
        "torch.save, numpy (npy, npz) and Flax (MessagePack)"
    )


def _refuse_directory(path: str, names: Sequence[str]) -> None:
    """Raises for a directory with files that are not read."""
    if _is_tensorflow(names):
        raise FormatError(f"{path}: this is {_TENSORFLOW_CHECKPOINT}")
    if any(map(_PADDLE_DATA.fullmatch, names)) and any(map(_PADDLE_METADATA.fullmatch, names)):
        raise FormatError(f"{path}: this is {_PADDLE_DISTRIBUTED}")
    for name in names:
        found = [what for pattern, what in _FILES if pattern.fullmatch(name)]
        found += [what for end, what in _IN_DIRECTORIES if name.endswith(end)]
        if found:
            raise FormatError(f"{path}: {name} in this directory is {found[0]}")


def _is_tensorflow(names: Collection[str]) -> bool:
    """True for a directory with a checkpoint of TensorFlow."""
    return any(name.endswith(".index") for name in names) and any(map(_TENSORFLOW_DATA.fullmatch, names))
