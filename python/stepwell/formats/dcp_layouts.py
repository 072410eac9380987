"""How the tensors in DCP's archives are laid out."""

from __future__ import annotations

from typing import TypeAlias

from .description import Place, Tensor
from .files import corrupt
from .pickle_values import Found, Malformed, Stream, opaque
from .torch_archive import Archive
from .torch_save import converted
from .torch_symbols import Storage, found_storage, storage_id

#: The one tensor of an archive as if its storage began a file, and the place of the storage.
TensorLayout: TypeAlias = tuple[Tensor, Place]


class Layouts:
    """The layouts of archived tensors. Archives of tensors that are alike have the same pickle, so
    each pickle is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bool], tuple[Tensor, str, int] | None] = {}

    def of(self, archive: Archive) -> TensorLayout | None:
        """The layout of an archive's tensor; ``None`` if it has another form."""
        if archive.is_cut:
            return None
        key = (archive.data(), archive.big_endian)
        if key not in self._known:
            self._known[key] = self._read(archive)
        known = self._known[key]
        if known is None:
            return None
        tensor, storage, nbytes = known
        try:
            return tensor, archive.place(storage, nbytes)
        except Malformed as error:
            raise corrupt(archive.path, str(error)) from None

    def _read(self, archive: Archive) -> tuple[Tensor, str, int] | None:
        """The tensor as if its storage began the file, the key of the storage, and its bytes."""
        keys: list[tuple[str, int]] = []

        def storage(persistent: object) -> Found:
            one = storage_id(persistent)
            if isinstance(one, str):
                return opaque(one)
            keys.append((one.key, one.nbytes))
            return found_storage(
                Storage(one.key, (archive.path, 0), one.nbytes, one.dtype, archive.big_endian)
            )

        stream, root = archive.pickle()
        value = converted(Stream(stream.file, stream.data, None), root, storage).state
        if not isinstance(value, Tensor) or len(value.chunks) != 1 or len(keys) != 1:
            return None
        ((key, nbytes),) = keys
        return value, key, nbytes
