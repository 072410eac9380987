"""The leaves of a checkpoint that are converted, and the state that they form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from .. import _core
from .._checkpoint import Checkpoint
from .._checks import shown
from .._choice import FLOATS
from .._paths import Component, listed, render
from .._restore.structure import Structure
from .._state.leaves import Reviver
from ..errors import MisuseError
from ..formats.description import Opaque
from ..formats.writers import PlainValue

#: Containers that are lists or tuples in the output.
_SEQUENCES = ("list", "tuple", "deque")
#: In the place of what is not selected: ``None`` is a value.
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class SelectedLeaf:
    """A selected leaf of the source."""

    number: int
    path: str
    components: tuple[Component, ...]
    #: ``None`` for an object.
    dtype: str | None
    shape: tuple[int, ...]
    #: The leaf that holds its bytes.
    holder: int

    @property
    def name(self) -> str:
        """Its name in a flat state dict."""
        return ".".join(str(value) for _, value in self.components)

    @property
    def nested_name(self) -> str:
        """Its path in a state with the nesting of the source."""
        return render(self.components)


def selected(
    checkpoint: Checkpoint,
    core: _core.Checkpoint,
    choice: _core._Choice,
    subtree: str,
    without: Collection[int] = (),
) -> list[SelectedLeaf]:
    """The leaves that are converted, by path below the subtree."""
    structure = checkpoint._tree()
    above, below = _below(checkpoint, structure, subtree)
    numbers = [number for number in below if number not in without]
    include, exclude, casts = choice
    paths = core.leaf_paths()
    chosen = [paths[number] for number in numbers]
    for option, given in (("include", include), ("exclude", exclude), ("cast", [one for one, _ in casts])):
        _check_matches(checkpoint.path, option, given or [], chosen)
    dropped = _core.first_globs(exclude, chosen)
    taken = [0] * len(chosen) if include is None else _core.first_globs(include, chosen)
    rows = core.leaves()
    found: list[SelectedLeaf] = []
    for number, out, taking in zip(numbers, dropped, taken, strict=True):
        if out is not None or taking is None:
            continue
        _, dtype, shape, tied = rows[number]
        components = structure.components(structure.leaf_nodes[number])[above:]
        found.append(
            SelectedLeaf(
                number,
                paths[number],
                components,
                dtype,
                tuple(shape or ()),
                number if tied is None else tied,
            )
        )
    if not numbers:
        where = f"{checkpoint.path} has no leaf" + (f" below {subtree!r}" if subtree else "")
        raise MisuseError(f"{where}, so there is nothing to convert")
    if not found:
        raise MisuseError(
            f"no leaf of {checkpoint.path} is selected; `stepwell show` lists them. Change include=, exclude= or subtree="
        )
    return found


def _check_matches(path: str, option: str, given: list[str], chosen: list[str]) -> None:
    """Refuses a pattern that matches no leaf: it may be misspelt."""
    for glob in given:
        if chosen and all(one is None for one in _core.first_globs([glob], chosen)):
            raise MisuseError(
                f"{option}={glob!r} matches no leaf that is converted of {path}. Patterns match whole paths of the source, such as {chosen[0]!r}. "
                "Mend the pattern, or leave it out"
            )


def _below(checkpoint: Checkpoint, structure: Structure, subtree: object) -> tuple[int, list[int]]:
    """The number of components of a container's path, and the leaves below it."""
    node = 0 if subtree == "" else container(checkpoint, structure, subtree, "subtree")
    return len(structure.components(node)), structure.leaves_below(node)


def container(checkpoint: Checkpoint, structure: Structure, path: object, option: str) -> int:
    """The node of the container at a path, which an option names."""
    if not isinstance(path, str):
        raise MisuseError(f"{option} is the path of a container, not {shown(path)}")
    node = checkpoint._find(0, path)
    if node is None or not structure.is_container(node):
        raise MisuseError(f"{checkpoint.path} has no container at {path!r}; `stepwell show` lists its paths")
    return node


def held_objects(
    core: _core.Checkpoint,
    leaves: list[SelectedLeaf],
    to: str,
    objects: str,
    holds: Callable[[object], bool],
    held: str,
) -> tuple[dict[int, PlainValue], tuple[str, ...]]:
    """Returns the objects that the format holds, by leaf, and the paths of the others. Takes these
    out, or refuses them."""
    numbers = [leaf.number for leaf in leaves if leaf.dtype is None]
    found = dict(zip(numbers, core.objects(numbers, Reviver()), strict=True))
    values = {number: PlainValue(one) for number, one in found.items() if holds(one)}
    paths = tuple(leaf.path for leaf in leaves if leaf.dtype is None and leaf.number not in values)
    # A tensor of a kind that is not read is an object, too.
    kinds = {leaf.path: one.what for leaf in leaves if isinstance(one := found.get(leaf.number), Opaque)}
    which = listed(paths, kinds)
    if paths and objects == "error":
        raise MisuseError(
            f'{to} cannot hold {which}: it holds {held} only. Pass objects="skip" to leave such leaves out, or choose '
            "leaves with include="
        )
    leaves[:] = [leaf for leaf in leaves if leaf.dtype is not None or leaf.number in values]
    if not leaves:
        raise MisuseError(
            f"{to} cannot hold {which}: it holds {held} only. No other leaf is selected, so there is nothing to convert"
        )
    return values, paths


def output_dtypes(leaves: list[SelectedLeaf], choice: _core._Choice) -> list[str]:
    """The dtypes in the output."""
    rules = choice[2]
    casts = _core.first_globs([glob for glob, _ in rules], [leaf.path for leaf in leaves])
    return [
        rules[rule][1] if rule is not None and leaf.shape and leaf.dtype in FLOATS else str(leaf.dtype)
        for leaf, rule in zip(leaves, casts, strict=True)
    ]


def nested(structure: Structure, node: int, values: Mapping[int, object]) -> object:
    """The selected part of a state, as dicts, lists and tuples. ``_NOTHING`` where nothing is
    selected."""
    kind = structure.nodes[node][2]
    if isinstance(kind, int):
        return values.get(kind, _NOTHING)
    children: list[tuple[Component, object]] = []
    for child in structure.children[node]:
        value, component = nested(structure, child, values), structure.nodes[child][1]
        if value is not _NOTHING and component is not None:
            children.append((component, value))
    if not children and structure.children[node]:
        return _NOTHING
    what = kind[3][0] if kind[0] == "stateful" else kind[0]
    places = [value for (tag, value), _ in children if tag == "x"]
    if places != list(range(len(children))) or (not children and what not in _SEQUENCES):
        return {value: one for (_, value), one in children}
    found = [one for _, one in children]
    return tuple(found) if what == "tuple" else found
