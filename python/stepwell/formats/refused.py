"""Formats that are recognised and not read, and the way around each of them. Files that are not
recognised."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .. import _core
from .._locations import container_of
from ..errors import CorruptCheckpoint, FormatError
from . import lookup
from .files import read

#: Offset and value of first bytes, and the message.
_BEGINNINGS: Sequence[tuple[int, bytes, str]] = (
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive. Unpack it first"),
    (0, b"\x1f\x8b", "a gzip archive. Unpack it first; a .nemo file has model_weights.ckpt inside"),
    (257, b"ustar", "a tar archive. Unpack it first; a .nemo file has model_weights.ckpt inside"),
    (0, b"GGUF", "a GGUF file of llama.cpp. Use the checkpoint that it was converted from"),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file, as Keras writes it. Load it with Keras, then pass model.get_weights() to sw.save",
    ),
)
_TORCHSCRIPT = "a program of TorchScript. Save its state_dict with torch.save instead"
#: Ends of names in zip archives, and the message.
_MEMBERS: Sequence[tuple[str, str]] = (
    (
        "model.weights.h5",
        "a Keras archive. Load it with Keras, then pass model.get_weights() to sw.save",
    ),
    ("archive_format", "a program of torch.export. Save its state_dict with torch.save instead"),
    (".data/extern_modules", "a package of torch.package. Save a state_dict with torch.save instead"),
    ("constants.pkl", _TORCHSCRIPT),
    ("code/", _TORCHSCRIPT),
)
#: Names in directories, and the message.
_FILES: Sequence[tuple[str, str]] = (
    (
        "saved_model.pb",
        "a SavedModel of TensorFlow. Load it with TensorFlow, then pass its arrays to sw.save",
    ),
)


#: Files of Orbax: of a step, and of its arrays.
_OF_ORBAX = ("_CHECKPOINT_METADATA", "manifest.ocdbt")


def refuse_members(path: str, names: Collection[str]) -> None:
    """Raises :class:`FormatError` for a zip archive with these members that is not read."""
    for end, what in _MEMBERS:
        if any(name.endswith(end) or f"/{end}" in name for name in names):
            raise FormatError(f"{path}: this is {what}")


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
        for name, what in _FILES:
            if name in names:
                raise FormatError(f"{path}: this is {what}")
        if any(name.endswith(".index") for name in names) and any(
            ".data-00000-of-" in name for name in names
        ):
            raise FormatError(
                f"{path}: this is a checkpoint of TensorFlow. Load it with TensorFlow, "
                "then pass its arrays to sw.save"
            )
        return
    if not lookup.is_file(path):
        return
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
