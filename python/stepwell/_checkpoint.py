"""A read-only checkpoint: ``sw.open(path)``. It holds a lease, so that no retention removes it
while it is read."""

from __future__ import annotations

import datetime
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    final,
    overload,
)

import numpy as np
import numpy.typing as npt

from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._checks import flag, listed, meant, progress_callback, shown
from ._choice import choice_of, copied_part
from ._contents import StoredNode, nodes
from ._locations import Location, Path, check_destination, location
from ._manifest import Manifest
from ._paths import Component, printable, split
from ._public import public
from ._restore import collector as collecting
from ._restore import plan
from ._restore import restore as restoring
from ._restore.allocate import Allocator
from ._restore.options import (
    ChoiceKeywords,
    Globs,
    RestoreKeywords,
    RestoreOptions,
    ResumeKeywords,
    spelled_out,
)
from ._restore.plan import RestorePlan
from ._restore.report import RestoreReport
from ._restore.structure import Structure, kind_of
from ._state.leaves import Reviver
from ._state.specs import ArraySpec, ObjectSpec, as_rank, to_dtype
from ._steps import AdoptedFiles, utc
from ._types import Metrics
from .errors import ClosedError, MisuseError, StepwellError

if TYPE_CHECKING:
    from ._comparison import Difference
    from ._distributed.agreement import Together, Unasked
    from ._distributed.exchange import Exchange
    from ._restore.restore import Restored
    from .formats.adoption import Adoption
    from .formats.copies import Copies
    from .formats.lookup import Stamp
    from .maps import MapLike

#: One step of a path.
Key: TypeAlias = str | int
#: The lines and the indent that a representation has at most.
_LINES, _INDENT = 20, 4
_T = TypeVar("_T")


@final
@dataclass(frozen=True, slots=True)
class Metadata:
    """Facts about a step, known without reading an array."""

    #: Its number. ``None``: files of another library that are no step of a root.
    step: int | None
    #: The structure, with :class:`ArraySpec` and :class:`ObjectSpec` as leaves.
    tree: Any  # of the nesting that was saved
    #: Names of the items: what can be restored and dropped alone.
    items: tuple[str, ...]
    #: Metrics by name.
    metrics: dict[str, float]
    #: The JSON that was saved with it.
    custom_metadata: Any  # the user's own JSON
    #: When its save began, in UTC.
    started: datetime.datetime
    #: When it was committed, in UTC.
    committed: datetime.datetime
    #: How many processes wrote it.
    world_size: int
    #: The version of the file format.
    format_version: int
    #: The program that wrote it, with its version.
    writer: str
    #: Bytes of all arrays.
    nbytes: int
    #: The whole manifest.
    manifest: Manifest
    #: Leaves that were left out because they could not be stored, with the reasons. Those of all
    #: processes, each path once.
    unsupported: dict[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Damage:
    """Stored bytes that are not what was written."""

    #: The file, relative to the step.
    file: str
    #: The block of it, where it is one.
    block: int | None
    #: Rendered paths of the leaves that lie there.
    leaves: tuple[str, ...]
    #: A description of the damage.
    what: str


@final
@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification."""

    #: Files and bytes that were read.
    files: int
    nbytes: int
    #: All damage; empty if everything is valid.
    damages: tuple[Damage, ...]
    #: The directory that was looked at.
    path: str = ""
    #: Its step, where one is known.
    step: int | None = None
    #: Bytes for which no checksum is known, as in formats of other libraries. They can be read, and
    #: nothing vouches for them.
    unguarded_nbytes: int = 0

    @property
    def ok(self) -> bool:
        """True if every byte is what was written."""
        return not self.damages

    def __bool__(self) -> bool:
        return self.ok


#: Paths that are compared with one that is not found.
_COMPARED = 2000


class Subtree(Mapping[Key, Any]):  # as it is stored
    """A container of a checkpoint: look up a child by its key, index or field name, or anything
    below by its path. Nothing is read before a leaf is asked for."""

    __slots__ = ("_checkpoint", "_node")

    def __init__(self, checkpoint: Checkpoint, node: int) -> None:
        self._checkpoint = checkpoint
        self._node = node

    def __getitem__(self, key: Key) -> Any:  # as it is stored
        found = self._checkpoint._find(self._node, key)
        if found is None:
            where, keys = self._checkpoint._tree().paths[self._node], list(self)
            dropped = [item for item, _ in self._checkpoint._open().dropped()] if not where else []
            if isinstance(key, str) and key.split("/")[0] in dropped:
                raise KeyError(f"{key!r} was dropped from this step by thinning")
            below = [path for path in self._checkpoint.paths()[:_COMPARED] if path.startswith(where)]
            near = meant(key, [path[len(where) :].lstrip("/.") for path in below])
            raise KeyError(
                f"{f'`{where}`' if where else 'the state'} has no {key!r}{near}; it has {keys[:20]}"
            )
        return self._checkpoint._at(found)

    def __contains__(self, key: object) -> bool:
        return self._checkpoint._find(self._node, key) is not None

    def __iter__(self) -> Iterator[Key]:
        structure = self._checkpoint._tree()
        return iter([structure.key(child) for child in structure.children[self._node]])

    def __len__(self) -> int:
        return len(self._checkpoint._tree().children[self._node])

    # A comparison of mappings would read everything.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def load(self) -> Any:  # of the nesting that was saved
        """The whole subtree, read."""
        return self._checkpoint._load(self._node)

    def __repr__(self) -> str:
        path = self._checkpoint._tree().paths[self._node]
        return f"<Subtree `{path}`:\n" + "\n".join(self._checkpoint._lines(self._node)) + ">"


@final
class Array:
    """An array of a checkpoint: slicing reads the blocks that the slice needs and no others."""

    __slots__ = ("_checkpoint", "_leaf", "dtype", "path", "shape")

    def __init__(
        self, checkpoint: Checkpoint, leaf: int, path: str, dtype: str, shape: tuple[int, ...]
    ) -> None:
        self._checkpoint = checkpoint
        self._leaf = leaf
        #: Rendered leaf path.
        self.path = path
        #: Element type.
        self.dtype: np.dtype = to_dtype(dtype)
        #: Elements along each dimension.
        self.shape = shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: object) -> Any:  # an array or a scalar of its dtype
        box, rest = _box(index, self.shape, self.path)
        values = self._checkpoint._read(self._leaf, box, self.dtype)
        return values[rest]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        values = self._checkpoint._read(self._leaf, [(0, n) for n in self.shape], self.dtype)
        return values if dtype is None else values.astype(dtype)

    def load(self) -> np.ndarray:
        """The whole array, read."""
        return self.__array__()

    def __repr__(self) -> str:
        return f"<Array `{self.path}` {self.dtype.name}{list(self.shape)}>"


def _box(
    index: object, shape: tuple[int, ...], path: str
) -> tuple[list[tuple[int, int]], tuple[int | slice, ...]]:
    """A numpy basic index → the box that holds what it names (start, length per dimension), and the
    index into that box."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or not _is_basic(part) for part in parts):
        raise IndexError(f"`{path}` takes integers, slices and `...`; load() it for other indices")
    if sum(part is ... for part in parts) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = sum(part is not ... for part in parts)
    if given > len(shape):
        raise IndexError(f"`{path}` has {len(shape)} dimensions, {given} were indexed")
    fill = [slice(None)] * (len(shape) - given)
    if any(part is ... for part in parts):
        at = next(i for i, part in enumerate(parts) if part is ...)
        parts[at : at + 1] = fill
    else:
        parts += fill
    box: list[tuple[int, int]] = []
    rest: list[int | slice] = []
    for part, n in zip(parts, shape, strict=True):
        if not isinstance(part, slice):
            i = operator.index(cast(SupportsIndex, part))
            if not -n <= i < n:
                raise IndexError(f"index {i} is out of bounds for `{path}`, which has {n} there")
            box.append((i % n, 1))
            rest.append(0)
            continue
        start, stop, step = part.indices(n)
        places = range(start, stop, step)
        if not places:
            box.append((0, 0))
            rest.append(slice(None))
            continue
        low, high = min(places[0], places[-1]), max(places[0], places[-1])
        box.append((low, high - low + 1))
        rest.append(slice(None, None, step))
    return box, tuple(rest)


def _is_basic(part: object) -> bool:
    if part is ... or isinstance(part, slice):
        return True
    if isinstance(part, (bool, np.bool_)):
        return False
    try:
        operator.index(cast(SupportsIndex, part))
    except TypeError:  # no number, or an array of several
        return False
    return True


def _pairs(wanted: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """Checks the argument of :meth:`Checkpoint.read`."""
    advice = 'read() takes pairs of a leaf\'s path and an index, such as [("params/w", ...)] for a whole leaf'
    if isinstance(wanted, Mapping):
        raise MisuseError(f"{advice}, not a {type(wanted).__qualname__}: pass its items()")
    pairs = listed(wanted, advice)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise MisuseError(f"{advice}, not {shown(pair)}")
    return pairs


def _number_of(path: str, numbers: Mapping[str, int]) -> int:
    """Returns the number of the leaf with that path."""
    if path not in numbers:
        near = meant(path, islice(numbers, _COMPARED))
        raise KeyError(f"no leaf has the path {path!r}{near}; paths() lists them")
    return numbers[path]


@public
@final
class Checkpoint(Mapping[Key, Any]):  # as it is stored
    """An open, leased checkpoint: a mapping of its top-level entries, in which paths are found too.
    ``ckpt["params/layers/0/w"][0:128]`` reads just that."""

    __slots__ = (
        "__weakref__",
        "_adopted_step",
        "_adoption",
        "_copies",
        "_core",
        "_foreign_step",
        "_ours",
        "_owner",
        "_stamps",
        "_structure",
    )

    def __init__(
        self,
        core: _core.Checkpoint,
        step: int | None = None,
        adoption: Adoption | None = None,
        copies: Copies | None = None,
        stamps: Mapping[str, Stamp] | None = None,
        adopted_step: _core.Checkpoint | None = None,
        ours: str | None = None,
    ) -> None:
        self._core: _core.Checkpoint | None = core
        #: The number of a step of another library.
        self._foreign_step = step
        #: The checksums of these files, if they were adopted.
        self._adoption = adoption
        #: Tensors of these files that have to have the same values as others.
        self._copies = copies
        #: The stamps of files of another library, unless checksums show what changes.
        self._stamps = stamps
        #: The step of a root that these files are, leased.
        self._adopted_step = adopted_step
        #: The path of the checkpoint of stepwell that has the rest of this step.
        self._ours = ours
        self._owner = lifecycle.Owner("checkpoint")
        self._structure: Structure | None = None

    def _open(self) -> _core.Checkpoint:
        self._owner.check()
        if self._core is None:
            raise ClosedError("this checkpoint was closed; open it again")
        return self._core

    def _with(self, core: _core.Checkpoint) -> Checkpoint:
        """This checkpoint, with its tensors in another arrangement. It keeps no lease of its
        own."""
        return Checkpoint(core, self._foreign_step, self._adoption, self._copies, None, self._adopted_step)

    def _of_ours(self) -> _core.Checkpoint:
        """Refuses files of another library."""
        core = self._open()
        if not self.manifest["format_version"]:
            raise MisuseError(
                f"{self.path} is no step of stepwell: another library wrote it ({self.manifest['writer']}). "
                'Write it as one with sw.convert(…, to="stepwell")'
            )
        return core

    def _attempt(self) -> tuple[str, int]:
        """The save that this step is of: session and number."""
        step = self._open() if self._adopted_step is None else self._adopted_step
        session, counter = json.loads(step.manifest())["attempt"].values()
        return str(session), int(counter)

    def _tree(self) -> Structure:
        if self._structure is None:
            self._structure = Structure(self._open().nodes)
        return self._structure

    def _at(self, node: int) -> object:
        structure = self._tree()
        kind = structure.nodes[node][2]
        if not isinstance(kind, int):
            return Subtree(self, node)
        _, dtype, shape, _ = self._open().leaf(kind)
        if dtype is None or shape is None:
            return self._open().objects([kind], Reviver())[0]
        return Array(self, kind, structure.paths[node], dtype, tuple(shape))

    def _find(self, node: int, key: object) -> int | None:
        """Returns the node below ``node`` with that key. If no key matches, ``key`` is a path."""
        if not isinstance(key, (str, int)):
            return None
        structure = self._tree()
        above = structure.components(node) if structure.nodes else ()

        def below(*parts: Key) -> int | None:
            return structure.find(
                (*above, *(("k" if isinstance(part, str) else "x", part) for part in parts))
            )

        found = below(key)
        if found is None and isinstance(key, str) and (parts := split(key)):
            for at, part in enumerate(parts):
                if isinstance(part, str) and part.isdigit() and below(*parts[: at + 1]) is None:
                    parts[at] = int(part)
            found = below(*parts)
        return found

    def _lines(self, node: int, indent: str = "  ") -> list[str]:
        """The entries of a container and of its containers, for people."""
        structure, lines = self._tree(), []
        for child in structure.children[node]:
            kind = structure.nodes[child][2]
            name = f"{indent}{printable(str(structure.key(child)))}: "
            if isinstance(kind, int):
                what, dtype, shape, _ = self._open().leaf(kind)
                lines.append(name + (what if dtype is None else f"{dtype}{shape}"))
                continue
            lines.append(f"{name}{kind_of(kind)} of {len(structure.children[child])}")
            if len(indent) < _INDENT:
                lines += self._lines(child, indent + "  ")
        return (
            lines if len(lines) <= _LINES else [*lines[:_LINES], f"{indent}… and {len(lines) - _LINES} more"]
        )

    def _load(self, node: int) -> object:
        """A subtree, as stored."""
        from ._restore import template
        from ._state.specs import AS_STORED

        structure = self._tree()
        job = restoring.Restore(self._open(), RestoreOptions(unexpected="ignore"), structure)
        components = structure.components(node)
        return job.run(template.Leaf(components, "stored", AS_STORED), fill=False)

    def _read(self, leaf: int, box: list[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
        shape = tuple(n for _, n in box)
        values = Allocator().empty(shape, dtype)
        if values.size:
            self._open().read([(leaf, [start for start, _ in box], values)])
        return values

    @property
    def path(self) -> str:
        """Its path."""
        core = self._open()
        return core.path() if self._adopted_step is None else self._adopted_step.path()

    @property
    def step(self) -> int:
        """Its number; 0 for files of another library that are no step of a root."""
        return int(self.manifest["step"])

    @property
    def _number(self) -> int | None:
        """Its number, if it has one."""
        return self.step if self.manifest["format_version"] else self._foreign_step

    @property
    def adopted(self) -> AdoptedFiles | None:
        """The files of another library that have the bytes of this step, if it was adopted:
        :class:`stepwell.results.AdoptedFiles`."""
        if self._adopted_step is None:
            return None
        return AdoptedFiles.of(self.manifest["adopted"], os.path.dirname(self.path))

    def _metrics(self) -> dict[str, float]:
        """The metrics that were saved with it."""
        core = self._open()
        return core.metrics() if self._adopted_step is None else self._adopted_step.metrics()

    @property
    def manifest(self) -> Manifest:
        """The commit record."""
        found: Manifest = json.loads(self._open().manifest())
        return found

    def paths(self) -> list[str]:
        """Rendered paths of all leaves."""
        found: list[str] = self._open().leaf_paths()
        return found

    def contents(self) -> list[StoredNode]:
        """Returns all containers and leaves, parents first, with the places of their bytes. Reads
        no array."""
        return nodes(self._open(), self._tree(), self.manifest)

    def read(self, wanted: Iterable[tuple[str, object]]) -> list[Any]:  # arrays, or any objects
        """Reads slices of several leaves in one go: pairs of a leaf's path and a numpy basic index
        (``...`` for the whole leaf). An object is returned whole.

        Raises:
            KeyError: there is no leaf with that path.
            MisuseError: ``wanted`` has something else than pairs.
        """
        core, rows = self._open(), self._open().leaves()
        numbers = {path: leaf for leaf, path in enumerate(self.paths())}
        pairs = [(_number_of(path, numbers), path, index) for path, index in _pairs(wanted)]
        objects = {leaf: None for leaf, _, _ in pairs if rows[leaf][1] is None}
        values = dict(zip(objects, core.objects(list(objects), Reviver()), strict=True))
        found: list[object] = [values.get(leaf) for leaf, _, _ in pairs]
        requests, slices = [], []
        for number, (leaf, path, index) in enumerate(pairs):
            _, dtype, shape, _ = rows[leaf]
            if dtype is None or shape is None:
                continue
            box, rest = _box(index, tuple(shape), path)
            array = Allocator().empty(tuple(n for _, n in box), to_dtype(dtype))
            if array.size:
                requests.append((leaf, [start for start, _ in box], array))
            slices.append((number, array, rest))
        core.read(requests)
        for number, array, rest in slices:
            found[number] = array[rest]
        return found

    def __getitem__(self, key: Key) -> Any:  # as it is stored
        root = self._at(0)
        if not isinstance(root, Subtree):
            raise MisuseError("the state of this checkpoint is a single value; call restore() for it")
        return root[key]

    def __iter__(self) -> Iterator[Key]:
        root = self._at(0)
        return iter(root) if isinstance(root, Subtree) else iter(())

    def __len__(self) -> int:
        root = self._at(0)
        return len(root) if isinstance(root, Subtree) else 0

    def __contains__(self, key: object) -> bool:
        return self._find(0, key) is not None

    # A comparison of mappings would read everything.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def metadata(self) -> Metadata:
        """Returns facts about the step without reading an array."""
        with collecting.paused():
            return self._metadata()

    def _metadata(self) -> Metadata:
        core = self._open()
        structure = self._tree()
        specs: list[object] = []
        nbytes = 0
        # Leaves that are alike share a description, which nobody can change.
        alike: dict[tuple[str, tuple[int, ...]], tuple[ArraySpec, int]] = {}
        for _, dtype, sizes, tied in core.leaves():
            if dtype is None or sizes is None:
                specs.append(ObjectSpec())
            else:
                shape = tuple(sizes)
                found = alike.get((dtype, shape))
                if found is None:
                    spec = ArraySpec(shape, dtype)
                    found = alike[dtype, shape] = (spec, spec.nbytes or 0)
                spec, size = found
                nbytes += size if tied is None else 0
                specs.append(spec)
        manifest = self.manifest
        metrics = {str(name): float(value) for name, value in self._metrics().items()}
        return Metadata(
            step=self._number,
            tree=structure.build(0, specs.__getitem__) if structure.nodes else {},
            items=tuple(str(item["name"]) for item in manifest["items"]),
            metrics=metrics,
            custom_metadata=manifest.get("custom_metadata"),
            started=utc(manifest["started_unix_ns"]),
            committed=utc(manifest["committed_unix_ns"]),
            world_size=int(manifest["world_size"]),
            format_version=int(manifest["format_version"]),
            writer=str(manifest["writer"]),
            nbytes=nbytes,
            manifest=manifest,
            unsupported={one["path"]: one["reason"] for one in manifest.get("unsupported", ())},
        )

    @overload
    def restore(
        self, *, into: _T, return_report: Literal[False] = False, **options: Unpack[ResumeKeywords]
    ) -> _T: ...
    @overload
    def restore(
        self, *, into: _T, return_report: Literal[True], **options: Unpack[ResumeKeywords]
    ) -> tuple[_T, RestoreReport]: ...
    @overload
    def restore(
        self, *, return_report: bool = False, **options: Unpack[ChoiceKeywords]
    ) -> Any: ...  # as stored, or as like= says
    @spelled_out
    def restore(self, **options: Unpack[RestoreKeywords]) -> object:
        """Restores; see :meth:`CheckpointManager.restore`."""
        checked = RestoreOptions.of(options).reading_alone()
        if checked.fill:
            lifecycle.wait_captured()
        with as_rank(coordinators.initialised_rank()):
            return self._restored(checked).answer(options)

    def _restored(
        self, options: RestoreOptions, together: Together | None = None, exchange: Exchange | None = None
    ) -> Restored:
        """Restores, and checks that nobody has written to the files meanwhile."""
        restored = restoring.run(self._open(), options, together, exchange)
        if self._stamps is not None:
            from .formats.files import check_unwritten

            with self._open().reading():
                check_unwritten(self._stamps)
        return restored

    @spelled_out
    def plan(self, **options: Unpack[RestoreKeywords]) -> RestorePlan:
        """Returns what :meth:`restore` with these keywords would read and do. Reads no array and
        changes nothing. Raises the errors that ``restore`` would raise about the match."""
        checked = RestoreOptions.of(options, "plan").reading_alone()
        with as_rank(coordinators.initialised_rank()):
            return self._planned(checked)

    def _planned(self, options: RestoreOptions, others: Unasked | None = None) -> RestorePlan:
        """Plans a restore; ``others`` stands for the other ranks, where there are some."""
        found = plan.plan(self._open(), options, self.manifest["items"], others)
        found.path, found.step = self.path, self._number
        return found

    def verify(self, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
        """Reads everything and compares every checksum. ``progress(bytes done, bytes in all)`` is
        called now and then."""
        progress_callback(progress)
        files, nbytes, unguarded, damages = self._open().verify(progress)
        found = tuple(Damage(f, b, tuple(leaves), what) for f, b, leaves, what in damages)
        if self._adoption is not None:
            known = [os.path.join(self._open().directory(), file["path"]) for file in self.manifest["files"]]
            more_files, more_bytes, more = self._adoption.verify(known, progress)
            files, nbytes = files + more_files, nbytes + more_bytes
            found += tuple(Damage(f, b, tuple(leaves), what) for f, b, leaves, what in more)
        if self._copies is not None and not found:
            found = tuple(Damage(f, None, (leaf,), what) for f, leaf, what in self._copies.differing())
        if self._ours is not None:
            from ._opening import verify

            rest = verify(self._ours, progress=progress)
            files, nbytes = files + rest.files, nbytes + rest.nbytes
            found += tuple(replace(one, file=os.path.join(rest.path, one.file)) for one in rest.damages)
        return VerifyReport(files, nbytes, found, self.path, self._number, unguarded)

    def diff(
        self,
        other: Path | Checkpoint,
        *,
        map: MapLike | None = None,
        include: Globs = None,
        exclude: Globs = None,
        values: bool = True,
        progress: Callable[[int, int], object] | None = None,
    ) -> Difference:
        """Compares this checkpoint with another one, of any format: structure, kinds, dtypes,
        shapes and values.

        Arrays of one dtype are compared bit for bit, arrays of two dtypes by their numbers. Memory
        stays bounded.

        Leaves are compared by path. Checkpoints of two formats have other containers for the same
        leaves. So containers are not compared then, and a leaf without a partner is compared with
        the one of the same dotted name: ``layers[0]/w`` with ``layers.0.w``.

        Args:
            other: a checkpoint, a step's directory, a root, files of another library, or an open
                checkpoint.
            map: a :class:`stepwell.maps.Map`, a TOML file, a recipe or rules. This checkpoint is
                compared under the names and in the shapes of that map, without its containers.
            include: leaves to compare, by glob over the paths of this checkpoint, or of the other
                one for leaves that only it has; default: all.
            exclude: leaves to leave out.
            values: ``False``: compare everything but values.
            progress: called now and then with the bytes done and in all. Arrays that differ are
                read twice, so the bytes in all may grow.

        Raises:
            CorruptCheckpoint: one of the two is damaged.
            MismatchError: a pattern matches no leaf.
        """
        from ._comparison import compare
        from ._opening import opened

        flag(values, "values")
        progress_callback(progress)
        choice = choice_of(include, exclude, None)
        with opened(self, None, map) as one, opened(other, None, None) as two:
            return compare(one, two, choice, with_containers=map is None, values=values, progress=progress)

    def copy(
        self,
        path: Location,
        *,
        include: Globs = None,
        exclude: Globs = None,
        metrics: Metrics | None = None,
        compress: bool | Globs = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> str:
        """Copies the checkpoint to a free path, byte for byte, and returns that path. The copy is
        verified and durable before it gets its name. The copy of a step that was adopted has the
        values in files of its own, and is verified once it has its name.

        Args:
            path: the free path.
            include: items to copy, by glob over their names; default: all. ``"params/**"`` is the
                item ``params``.
            exclude: items to leave out.
            metrics: metrics that were added later, for the copy. They belong to the root
                (:meth:`CheckpointManager.metrics`), not to this checkpoint.
            compress: tensors to compress: ``True`` for all, or globs over rendered leaf paths. The
                copy has the same values then, and fewer bytes. Compressed tensors stay compressed.
            progress: as in :meth:`verify`.
        """
        where = location(path)
        check_destination(where)
        self._copy(where, copied_part(include, exclude, metrics, compress), progress)
        return where

    def _copy(self, path: str, part: _core._Part, progress: Callable[[int, int], object] | None) -> None:
        if self._adopted_step is None:
            self._of_ours().copy(path, part, progress)
        else:
            from ._conversion.save import copy

            copy(self, path, part, progress)

    def close(self) -> None:
        """Gives the lease up. Closing twice is fine."""
        if self._core is not None and self._owner.is_here:
            self._core.close()
            if self._adopted_step is not None:
                self._adopted_step.close()
        self._core = None

    def __enter__(self) -> Checkpoint:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._core is None:
            return "<Checkpoint, closed>"
        manifest = self.manifest
        kind = f"of step {manifest['step']}" if manifest["format_version"] else f"({manifest['writer']})"
        head = f"<Checkpoint {kind} at {os.fspath(self.path)}"
        try:
            return "\n".join([f"{head}:", *self._lines(0)]) + ">"
        except StepwellError:  # a damaged index
            return f"{head}>"


__all__ = ["Array", "Checkpoint", "Component", "Damage", "Metadata", "Subtree", "VerifyReport"]
