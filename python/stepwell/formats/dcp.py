"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): a ``.metadata`` pickle beside files of
archives, one archive for each part of a tensor and for each object.

The metadata say which parts a tensor has and where their archives are. Each archive says how its
part is laid out. With ``SerializationFormat.SAFETENSORS``, a file has the archives of its objects,
and behind them its tensors as a file of safetensors. torch is not imported.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from .. import _core
from .._paths import named
from .._state.specs import to_dtype
from ..errors import CorruptCheckpoint, FormatError
from . import lookup, megatron_files
from .dcp_layouts import Layouts, TensorLayout
from .dcp_metadata import Part, Place, Saved, SavedTensor, read_metadata
from .description import Chunk, Compressed, Description, Guarded, Opaque, Tensor, Unlocated, fits, row_major
from .files import check_present, corrupt, is_file_name, read
from .safetensors import Header, read_header
from .torch_archive import Archive, roots_of
from .torch_save import archived

FAMILY = "torch.distributed.checkpoint"
_METADATA = ".metadata"
#: The end of the names of its data files.
_DATA = ".distcp"
#: A metadata file of one rank, in the mode in which ranks save for themselves.
_OF_RANK = re.compile(r"__\d+\.metadata")
#: The longest object, without its tensors, that is read when the checkpoint is opened.
_MAX_OBJECT_BYTES = 64 << 20
#: Decoded bytes of a compressed tensor that are read then: the pickle, and what is in front of the
#: elements. An object may have more, as a multiple of its compressed bytes.
_HEAD_BYTES, _OBJECT_BYTES, _OBJECT_RATIO = 16 << 10, 1 << 20, 256
#: The transform of ``torch.distributed.checkpoint._extension.ZStandard``.
_ZSTD = re.compile(r"stream\.zstd/1(\.\w+)*")
#: The first bytes of an archive.
_ZIP = b"PK\x03\x04"
#: The ends of the names of records that are read with an archive.
_RECORDS = ("/data.pkl", "/byteorder")


def describe(path: str) -> Description | None:
    """Describes a directory with ``.metadata``, or with one such file for each rank."""
    if not lookup.is_dir(path):
        name = os.path.basename(path)
        if name.endswith(_DATA) or name == _METADATA or _OF_RANK.fullmatch(name):
            raise FormatError(
                f"{path}: this is a file of a checkpoint of {FAMILY}. Pass its directory, {os.path.dirname(path)}"
            )
        return None
    names = lookup.names(path)
    if _METADATA in names:
        checkpoint = Checkpoint(path, [_METADATA])
        if megatron_files.COMMON_KEY in checkpoint.names:
            raise megatron_files.no_config(path)
        return checkpoint.description()
    of_ranks = sorted((name for name in names if _OF_RANK.fullmatch(name)), key=lambda name: int(name[2:-9]))
    if of_ranks:
        return Checkpoint(path, of_ranks).description()
    return None


class Checkpoint:
    """The metadata files of a directory, and the archives that they name."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        metadata = [os.path.join(path, name) for name in names]
        self._path, self._metadata = path, metadata[0]
        self._saved = _merged([read_metadata(file) for file in metadata], metadata)
        objects = self._saved.objects
        self._objects = {*objects.values(), *(two for name, _, two in self._saved.copies if name in objects)}
        #: Places of objects that are no archives.
        self._raw: set[Place] = set()
        self._layouts = Layouts()
        #: The offset of the last part of each file that is not compressed, and whether that is a
        #: tensor.
        self._last: dict[str, tuple[int, bool]] = {}
        #: The headers of the files that are safetensors behind their objects, and ``None`` for
        #: others.
        self._headers: dict[str, Header | None] = {}
        self._check_files()

    def _check_files(self) -> None:
        """Checks the names and the lengths of the files, and reads nothing of them."""
        ends: dict[str, int] = {}
        for name, place in self._places():
            if not is_file_name(place.file):
                raise corrupt(self._path, f"{named(name)} is in {place.file!r}, which is no file name")
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
            if not place.transforms:
                last = self._last.get(place.file, (0, False))
                self._last[place.file] = max(last, (place.offset, place not in self._objects))
        check_present(self._metadata, self._path, ends)
        for file, end in ends.items():
            where = os.path.join(self._path, file)
            length = read(where, 0, 0)[1]
            if end > length:
                raise corrupt(where, f"the metadata name {end} bytes; the file has {length}")

    def description(self) -> Description:
        """All of it."""
        state = _nested(self._path, self.leaves(), self._saved.paths)
        return Description(FAMILY, self._path, state, guarded=self.guarded)

    @property
    def names(self) -> list[str]:
        """The names of its tensors and objects."""
        return [*self._saved.tensors, *self._saved.objects]

    def leaves(self, without: Mapping[str, object] | None = None) -> dict[str, object]:
        """The leaves by name, those of ``without`` in place of its own. The archives of tensors are
        looked at when they are needed, unless they are compressed."""
        known = without or {}
        read = [
            place
            for name, place in self._places()
            if name not in known and (place.transforms or name in self._saved.objects)
        ]
        copies = [place for _, *two in self._saved.copies for place in two]
        archives = self._archives([*read, *copies])
        leaves: dict[str, object] = {}
        for name, tensor in self._saved.tensors.items():
            leaves[name] = known[name] if name in known else self._tensor(name, tensor, archives)
        for name, place in self._saved.objects.items():
            leaves[name] = known[name] if name in known else self._object(name, place, archives)
        for name, one, other in self._saved.copies:
            is_known = one in archives and other in archives
            is_copy = archives[one].is_copy_of(archives[other]) if is_known else None
            if is_copy is None:
                leaves[name] = Opaque("value of several ranks, without checksums to compare")
            elif not is_copy:
                leaves[name] = Opaque("value that differs between ranks")
        return leaves

    def locate(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Returns parts of tensors with their places and layouts."""
        parts = [self._part(chunk) for chunk in chunks]
        archives = self._archives([part.place for _, _, part in parts])
        found = []
        for wanted, (name, tensor, part) in zip(chunks, parts, strict=True):
            chunk = self._chunk(name, tensor, part, archives)
            if chunk is None:
                raise self._wrong(name, f"its part at {list(part.offsets)} is a tensor of an unknown form")
            found.append(chunk if tensor.flattened is None else self._box_of(name, chunk, wanted))
        return found

    def _box_of(self, name: str, part: Chunk, box: Chunk) -> Chunk:
        """A box of a part that is a run of elements."""
        if part.strides is not None:
            raise self._wrong(
                name, f"the elements of its part at {list(part.start)} do not follow each other"
            )
        place = (part.file, part.offset + box.offset)
        return replace(box, file=place[0], offset=place[1], big_endian=part.big_endian, negated=part.negated)

    def _part(self, chunk: Chunk) -> tuple[str, SavedTensor, Part]:
        assert isinstance(chunk.file, Unlocated)
        assert isinstance(chunk.file.key, tuple)
        name, number = chunk.file.key
        tensor = self._saved.tensors[name]
        return name, tensor, tensor.parts[number]

    def guarded(self) -> Mapping[str, Sequence[Guarded]]:
        """The ranges of the archives that have checksums, by file."""
        found: dict[str, list[Guarded]] = {}
        for archive in self._archives([place for _, place in self._places()]).values():
            found.setdefault(archive.path, []).extend(archive.guarded())
        return found

    def _archives(self, places: Iterable[Place]) -> Mapping[Place, Archive]:
        """Reads the directories of archives, file by file."""
        by_file: dict[str, set[Place]] = {}
        for place in places:
            if not place.transforms or _is_zstd(place):
                by_file.setdefault(place.file, set()).add(place)
        found: dict[Place, Archive] = {}
        for file, some in by_file.items():
            where = os.path.join(self._path, file)
            ordered = sorted(some, key=lambda one: one.offset)
            found |= {
                one: archive
                for one in ordered
                if one.transforms and (archive := self._decoded(where, one)) is not None
            }
            plain = [one for one in ordered if not one.transforms]
            if any(one not in self._objects for one in plain) and self._header(file) is not None:
                plain = [one for one in plain if one.offset < self._last[file][0]]
            for place, (members, offsets, records) in self._rows(where, plain):
                if self._is_raw(place, members):
                    continue
                contents = {members[number][0]: data for number, data in records}
                found[place] = Archive(where, members, offsets, contents)
        return found

    def _header(self, file: str) -> Header | None:
        """The header of a file that is safetensors behind its objects. ``None`` for archives."""
        if file not in self._headers:
            where, (last, is_tensor) = os.path.join(self._path, file), self._last[file]
            start = read(where, last, 9)[0] if is_tensor else b""
            is_header = start.endswith(b"{")
            if not is_header and start and not start.startswith(_ZIP):
                raise FormatError(f"{where}: archives of torch.save or a file of safetensors were expected")
            self._headers[file] = read_header(where, last) if is_header else None
        return self._headers[file]

    def _rows(self, where: str, places: Sequence[Place]) -> Iterator[tuple[Place, _core._Archive]]:
        """Reads the directories of the archives of a file."""
        try:
            return zip(places, _zip_archives(where, places), strict=True)
        except CorruptCheckpoint:
            # A planner of the user may have written an object without torch.save.
            raw = {
                one
                for one in places
                if one in self._objects and read(where, one.offset, min(one.length, len(_ZIP)))[0] != _ZIP
            }
            if not raw:
                raise
        self._raw |= raw
        archives = [one for one in places if one not in raw]
        return zip(archives, _zip_archives(where, archives), strict=True)

    def _is_raw(self, place: Place, members: Sequence[_core._ZipMember]) -> bool:
        """True for an object that is no archive of ``torch.save``."""
        if place in self._objects and not roots_of(one[0] for one in members):
            self._raw.add(place)
        return place in self._raw

    def _decoded(self, where: str, place: Place) -> Archive | None:
        """An archive in a stream of zstd, as far as its start shows it. An object is all there."""
        head = _HEAD_BYTES
        if place in self._objects:
            head = min(_MAX_OBJECT_BYTES, max(_OBJECT_BYTES, _OBJECT_RATIO * place.length))
        at = (place.offset, place.length)
        rows = _core.compressed_archives(lookup.real(where), [at], "zstd", _RECORDS, head)
        members, offsets, records = rows[0]
        if self._is_raw(place, members):
            return None
        contents = {members[number][0]: data for number, data in records}
        return Archive(where, members, offsets, contents, Compressed(where, *at, 0, None, "zstd"))

    def _places(self) -> Iterator[tuple[str, Place]]:
        for name, tensor in self._saved.tensors.items():
            for part in tensor.parts:
                yield name, part.place
        yield from self._saved.objects.items()
        for name, _, place in self._saved.copies:
            yield name, place

    def _tensor(self, name: str, tensor: SavedTensor, archives: Mapping[Place, Archive]) -> Tensor | Opaque:
        if tensor.dtype is None:
            return Opaque(f"torch tensor of {tensor.stored_dtype}{list(tensor.shape)}")
        itemsize = to_dtype(tensor.dtype).itemsize
        shape = tensor.shape if tensor.flattened is None else tensor.flattened
        if not fits(tensor.shape, itemsize) or not fits(shape, itemsize):
            raise self._wrong(name, f"its shape is too large: {list(shape)}")
        chunks = []
        for number, part in enumerate(tensor.parts):
            transforms = part.place.transforms
            if transforms and not _is_zstd(part.place):
                return Opaque(
                    f"torch tensor of {tensor.dtype}{list(tensor.shape)}, by {', '.join(transforms)}"
                )
            if 0 in part.sizes:
                continue
            file = Unlocated(os.path.join(self._path, part.place.file), (name, number), self)
            boxes = [Chunk(file, 0, math.prod(part.sizes) * itemsize, part.offsets, part.sizes)]
            if tensor.flattened is not None:
                boxes = _boxes_of_run(boxes[0], tensor.flattened, tensor.shape, itemsize)
            if transforms:
                chunk = self._chunk(name, tensor, part, archives)
                if chunk is None:
                    return Opaque(f"torch tensor of {tensor.dtype}{list(shape)}, of an unknown form")
                whole = tensor.flattened is None
                boxes = [chunk] if whole else [self._box_of(name, chunk, box) for box in boxes]
            chunks.extend(boxes)
        covered = sum(math.prod(part.sizes) for part in tensor.parts)
        if covered != math.prod(tensor.shape):
            raise self._wrong(
                name, f"its parts have {covered} of {math.prod(tensor.shape)} elements; is a file missing?"
            )
        return Tensor(tensor.dtype, shape, tuple(chunks))

    def _chunk(
        self, name: str, tensor: SavedTensor, part: Part, archives: Mapping[Place, Archive]
    ) -> Chunk | None:
        """A part of a tensor with its place and layout. ``None`` if it has another form."""
        layout = self._layout(name, part, archives)
        if layout is None:
            return None
        found, (file, offset) = layout
        if found.dtype != tensor.dtype or found.shape != part.sizes:
            raise self._wrong(
                name,
                f"its part at {list(part.offsets)} is {found.dtype}{list(found.shape)}; the metadata "
                f"say {tensor.dtype}{list(part.sizes)}",
            )
        (chunk,) = found.chunks
        at = (file, offset + chunk.offset, chunk.nbytes, part.offsets, part.sizes)
        return Chunk(*at, chunk.strides, chunk.big_endian, chunk.negated)

    def _layout(self, name: str, part: Part, archives: Mapping[Place, Archive]) -> TensorLayout | None:
        """The tensor of a part."""
        header = self._headers.get(part.place.file)
        if header is None or part.place in archives:
            try:
                return self._layouts.of(archives[part.place])
            except CorruptCheckpoint as error:
                error.leaf = error.leaf or name
                raise
        tensor = header.tensors.get(name)
        # Parts of one tensor have one name in a file, so that its writer keeps the last part only.
        if not isinstance(tensor, Tensor) or not tensor.chunks or header.starts.get(name) != part.offsets:
            raise self._wrong(name, f"its part at {list(part.offsets)} is not in {part.place.file}")
        return tensor, (tensor.chunks[0].file, 0)

    def _object(self, name: str, place: Place, archives: Mapping[Place, Archive]) -> object:
        if place.transforms and not _is_zstd(place):
            return Opaque(f"object, by {', '.join(place.transforms)}")
        if place in self._raw:
            return Opaque(f"object of {place.length} bytes that torch.save did not write")
        if place not in archives:
            raise self._wrong(name, f"{place.file} has its tensors at byte {place.offset}")
        if archives[place].is_cut:
            return Opaque(f"object of more than {_OBJECT_RATIO} times its {place.length} compressed bytes")
        # The tensors of an object stay in the file.
        if archives[place].pickle_nbytes > _MAX_OBJECT_BYTES:
            return Opaque(f"object of {place.length} bytes")
        return archived(archives[place]).state

    def _wrong(self, name: str, what: str) -> CorruptCheckpoint:
        error = corrupt(self._path, f"{named(name)}: {what}")
        error.leaf = name
        return error


def _zip_archives(where: str, places: Sequence[Place]) -> list[_core._Archive]:
    return _core.zip_archives(lookup.real(where), [(one.offset, one.length) for one in places], _RECORDS)


def _boxes_of_run(run: Chunk, shape: tuple[int, ...], stored: tuple[int, ...], itemsize: int) -> list[Chunk]:
    """The boxes of a tensor that a run of elements has. The tensor is stored as flattened boxes. A
    run begins at the number of a box along each dimension, and at an element of that box."""
    *numbers, begin = run.start
    local = tuple(size // count for size, count in zip(shape, stored[:-1], strict=True))
    first = tuple(number * size for number, size in zip(numbers, local, strict=True))
    steps = row_major(local, 1)
    found = _core.flat_pieces(local, [(first, local, 0, steps)], begin, run.extent[-1])
    assert found is not None, "a run inside a box has boxes"
    boxes = []
    for start, extent, at, strides in found:
        last = sum((size - 1) * step for size, step in zip(extent, strides, strict=True))
        packed = tuple(strides) == row_major(tuple(extent), 1)
        boxes.append(
            Chunk(
                run.file,
                at * itemsize,
                (last + 1) * itemsize,
                tuple(start),
                tuple(extent),
                None if packed else tuple(step * itemsize for step in strides),
            )
        )
    return boxes


def _is_zstd(place: Place) -> bool:
    return len(place.transforms) == 1 and _ZSTD.fullmatch(place.transforms[0]) is not None


def _merged(saved: Sequence[Saved], files: Sequence[str]) -> Saved:
    """The metadata of all ranks as one. The first rank's copy of a part counts."""
    whole = saved[0]
    #: The places of the known parts of each tensor that several ranks have.
    known_places: dict[str, dict[tuple[int, ...], Place]] = {}
    for one, file in zip(saved[1:], files[1:], strict=True):
        for name, tensor in one.tensors.items():
            known = whole.tensors.setdefault(name, tensor)
            if known is tensor:
                continue
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise corrupt(
                    file, f"{named(name)} has another dtype or shape in the metadata of another rank"
                )
            if name not in known_places:
                known_places[name] = {part.offsets: part.place for part in known.parts}
            places = known_places[name]
            for part in tensor.parts:
                if part.offsets in places:
                    whole.copies.append((name, places[part.offsets], part.place))
                else:
                    places[part.offsets] = part.place
                    known.parts.append(part)
        for name, place in one.objects.items():
            if whole.objects.setdefault(name, place) is not place:
                whole.copies.append((name, whole.objects[name], place))
        whole.paths.update(one.paths)
    return whole


def _nested(
    checkpoint: str, leaves: Mapping[str, object], paths: Mapping[str, tuple[str | int, ...]]
) -> object:
    """The state as it was before it was flattened. Names without a path stay at the top."""
    root: dict[str | int, object] = {}
    for name, value in leaves.items():
        path = paths.get(name, (name,))
        at = root
        for part in path[:-1]:
            child = at.setdefault(part, {})
            if not isinstance(child, dict) or type(child) is not dict:
                raise corrupt(checkpoint, f"{named(name)} is below another leaf in the metadata")
            at = child
        if path[-1] in at:
            raise corrupt(checkpoint, f"{named(name)} has the path of another leaf in the metadata")
        at[path[-1]] = value
    return _with_lists(root)


def _with_lists(root: dict[str | int, object]) -> object:
    """Dicts with the keys 0, 1, 2, … as lists: these were lists before."""
    order: list[tuple[dict[str | int, object], dict[str | int, object] | None, str | int]] = []
    pending: list[tuple[dict[str | int, object], dict[str | int, object] | None, str | int]] = [
        (root, None, "")
    ]
    while pending:
        one = pending.pop()
        order.append(one)
        pending.extend((child, one[0], key) for key, child in one[0].items() if type(child) is dict)
    for children, parent, key in reversed(order):
        numbers = [name for name in children if isinstance(name, int)]
        if parent is not None and numbers and sorted(numbers) == list(range(len(children))):
            parent[key] = [children[number] for number in range(len(children))]
    return root
