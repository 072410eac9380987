"""The keywords of every restore, in one place: :class:`RestoreKeywords` is what type checkers and
editors see, :class:`RestoreOptions` the same with defaults and checks.
``CheckpointManager.restore``, ``Checkpoint.restore``, ``sw.restore`` and the dry runs hand theirs
on as they come."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, TypeVar, final, get_args

import numpy as np

from .. import _adapters as adapters
from .. import _core
from .._checks import RESTORE_WORDS, flag, meant, one_of, shown
from .._state.leaves import storable_name
from .._state.specs import ArraySpec, to_dtype
from ..errors import MisuseError

if TYPE_CHECKING:
    from ..maps import MapLike
else:  # few restores have a map
    MapLike = object

#: One glob over rendered leaf paths, or several.
Globs: TypeAlias = str | Iterable[str] | None
#: A choice for all leaves, or by glob.
Missing: TypeAlias = Literal["error", "keep"]
Unexpected: TypeAlias = Literal["error", "ignore"]
Cast: TypeAlias = Literal["exact", "lossless", "lossy"]
Resize: TypeAlias = Literal["pad", "keep", "truncate", "both"]
#: The same for the engine, which has dtypes by name.
Choice: TypeAlias = str | dict[str, str | None] | None

_Function = TypeVar("_Function", bound=Callable[..., object])


class ResumeKeywords(TypedDict, total=False):
    """The keywords of every restore.

    Args:
        include: stored leaves to look at, by glob over rendered paths; default: all. A glob that
            matches a subtree selects all of it: ``"params"``.
        exclude: stored leaves to leave out, though ``include`` has them.
        rename: stored paths (or subtrees) to wanted ones: ``{"old/*": "new/*"}``; each wildcard
            stands for what it matched.
        missing: the treatment of a wanted leaf that is not stored: ``"error"``, or ``"keep"`` (the
            caller's own array stays); also by glob.
        unexpected: the treatment of a stored leaf inside a wanted top-level entry that is not
            wanted: ``"error"`` or ``"ignore"``; also by glob.
        cast: which changes of dtype are allowed: ``"exact"`` (none), ``"lossless"`` (the default:
            widening within a kind), ``"lossy"``; or ``{glob: one of these or a dtype}``.
        map: a :class:`stepwell.maps.Map`, a TOML file, a recipe or rules: what is stored, under
            the names and in the shapes of another model. The other keywords see the mapped leaves.
        resize: which changes of shape are allowed: ``"pad"`` with zeros, ``"keep"`` (the rest keeps
            the caller's values), ``"truncate"``, or ``"both"`` (pads, truncates); also by glob.
        shardings: the places of JAX arrays: one sharding or device for all, a tree of them (one
            entry covers all below it), or a function of path and :class:`~stepwell.ArraySpec`.
        broadcast: read each byte that several ranks want once, and exchange it by torch, JAX or
            MPI, on this thread. ``True``: the first of them reads for the others. ``"gather"``:
            each of them reads a share. All ranks pass the same value. Has no effect unless several
            processes have opened the manager.
    """

    include: Globs
    exclude: Globs
    rename: Mapping[str, str] | Iterable[tuple[str, str]] | None
    missing: Missing | Mapping[str, Missing]
    unexpected: Unexpected | Mapping[str, Unexpected]
    cast: Cast | Mapping[str, object]
    map: MapLike | None
    resize: Resize | Mapping[str, Resize | None] | None
    shardings: object
    broadcast: bool | Literal["gather"]


class ChoiceKeywords(ResumeKeywords, total=False):
    """Those of a restore into a given state.

    Args:
        like: the wanted structure of arrays, specs, types, values; never changed. Missing top-level
            entries are not read.
        to: the library of returned arrays without ``like`` or ``into``; default: numpy.
        device: on which device those of ``to`` are; torch's or JAX's.
    """

    like: object
    to: Literal["numpy", "torch", "jax"] | None
    device: object


class RestoreKeywords(ChoiceKeywords, total=False):
    """Those of any restore.

    Args:
        into: as ``like``, and filled where it can be; what cannot be changed in place is new in
            what is returned.
        return_report: return the :class:`~stepwell.RestoreReport` too: ``(state, report)``.
    """

    into: object
    return_report: bool


class MatchOptions(TypedDict):
    """The options of a match, for the engine."""

    include: list[str] | None
    exclude: list[str] | None
    rename: list[tuple[str, str]]
    missing: Choice
    unexpected: Choice
    cast: Choice
    resize: Choice


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """:class:`RestoreKeywords`, checked."""

    like: object = None
    into: object = None
    include: Globs = None
    exclude: Globs = None
    rename: object = None
    missing: object = "error"
    unexpected: object = "error"
    cast: object = "lossless"
    map: MapLike | None = None
    resize: object = None
    shardings: object = None
    to: Literal["numpy", "torch", "jax"] | None = None
    device: object = None
    broadcast: bool | Literal["gather"] = False
    return_report: bool = False

    def __post_init__(self) -> None:
        if self.like is not None and self.into is not None:
            raise MisuseError("pass like= or into=, not both: into= is a like= that is filled in place")
        if self.to is not None:
            one_of(self.to, "to", ("numpy", "torch", "jax"))
            if self.target is not None:
                raise MisuseError(
                    "to= says what comes back where nothing else does; like= and into= say so array by array"
                )
            if self.to == "numpy":
                object.__setattr__(self, "to", None)
        if self.device is not None and self.to is None:
            raise MisuseError(
                'device= goes with to="torch" or to="jax"; arrays of like= and into= say where they are'
            )
        if self.to is not None:
            adapters.check_device(self.to, self.device)
        if self.shardings is not None:
            if self.to != "jax" and self.target is None:
                raise MisuseError('shardings= goes with to="jax", or with arrays of JAX in like= or into=')
            if self.device is not None:
                raise MisuseError("pass shardings= or device=, not both")
        if isinstance(self.broadcast, str):
            one_of(self.broadcast, "broadcast (where it is not True or False)", ("gather",))
        else:
            flag(self.broadcast, "broadcast")
        flag(self.return_report, "return_report")
        if self.rename is not None and self.like is None and self.into is None:
            raise MisuseError(
                "rename= says which wanted leaves stored ones become; without like= or into= everything comes back under its stored name"
            )

    @classmethod
    def of(cls, keywords: RestoreKeywords, function: str = "restore") -> RestoreOptions:
        """From the keywords of a call."""
        names = {field.name for field in dataclasses.fields(cls)}
        for name in keywords:
            if name in RESTORE_WORDS:
                raise MisuseError(f"{function}() has no keyword {name}=; pass {RESTORE_WORDS[name]}")
            if name not in names:
                raise TypeError(
                    f"{function}() got an unexpected keyword argument {name!r}{meant(name, names)}"
                )
        return cls(**keywords)

    def reading_alone(self) -> RestoreOptions:
        """These, for a call that one process makes by itself."""
        if self.broadcast:
            raise MisuseError(
                "broadcast= has ranks read for each other, and this call reads for one process alone; restore() of a CheckpointManager that all of them have opened does so"
            )
        return self

    def mapped(self, core: _core.Checkpoint) -> _core.Checkpoint:
        """A checkpoint as the map of these options makes it."""
        if self.map is None:
            return core
        from ..maps import Map

        return Map.of(self.map)._apply(core)

    @property
    def target(self) -> object:
        """The caller's structure; ``None`` where everything is wanted."""
        return self.like if self.into is None else self.into

    @property
    def fill(self) -> bool:
        """True if the caller's own memory is to be filled."""
        return self.into is not None

    def placement(self) -> Callable[[str, ArraySpec], object] | None:
        """Returns the function from path and spec of a JAX array to its place, or ``None``."""
        if self.shardings is None:
            return None
        jax = adapters.named_by("shardings=", "jax")
        found: Callable[[str, ArraySpec], object] = jax.placements(self.shardings)
        return found

    def plain(self) -> MatchOptions:
        """Returns plain lists and strings for the engine."""
        return {
            "include": globs(self.include, "include"),
            "exclude": globs(self.exclude, "exclude"),
            "rename": _renames(self.rename),
            "missing": _choice(self.missing, "missing", ("error", "keep")),
            "unexpected": _choice(self.unexpected, "unexpected", ("error", "ignore")),
            "cast": _cast(self.cast),
            "resize": _choice(self.resize, "resize", ("pad", "keep", "truncate", "both", None)),
        }


def spelled_out(function: _Function) -> _Function:
    """Has ``help()`` and ``inspect.signature`` show the keywords of ``**options`` one by one, with
    their defaults and meanings."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {one.name for one in own}
    sources: tuple[type, ...] = (ResumeKeywords,)
    if function.__name__ not in ("resume", "__init__"):
        sources = (RestoreKeywords, ChoiceKeywords, ResumeKeywords)
    keywords = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in dataclasses.fields(RestoreOptions)
        if field.name in sources[0].__annotations__ and field.name not in names
    ]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
    function.__doc__ = with_meanings(function.__doc__, *sources)
    return function


def with_meanings(text: str | None, *sources: type) -> str:
    """Returns a docstring with the meanings of further keywords."""
    meanings = [inspect.cleandoc(source.__doc__ or "").partition("Args:\n")[2] for source in sources]
    head, raises, tail = inspect.cleandoc(text or "").partition("\n\nRaises:")
    head += "" if "\nArgs:" in head else "\n\nArgs:"
    return "\n".join([head, *meanings]) + raises + tail


def globs(value: object, name: str) -> list[str] | None:
    """Checks a glob or several."""
    if value is None:
        return None
    wrong = f"{name} takes a glob or a list of globs over rendered leaf paths, such as 'params/**', not {shown(value)}"
    if not isinstance(value, (str, Iterable)) or isinstance(value, (bytes, np.ndarray)):
        raise MisuseError(wrong)
    found = [value] if isinstance(value, str) else list(value)
    if name == "include" and not found:
        raise MisuseError("include=[] selects nothing; leave it out for all of the state")
    if not all(isinstance(one, str) for one in found):
        raise MisuseError(wrong)
    return found


def _renames(value: object) -> list[tuple[str, str]]:
    if value is None:
        return []
    wrong = f"rename takes {{stored path: wanted path}} or pairs of them, not {shown(value)}"
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise MisuseError(wrong)
    found: list[tuple[str, str]] = []
    for pair in pairs:
        if not (
            isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(one, str) for one in pair)
        ):
            raise MisuseError(wrong)
        found.append((pair[0], pair[1]))
    return found


def _choice(value: object, name: str, allowed: tuple[str | None, ...]) -> Choice:
    if isinstance(value, Mapping):
        return {
            glob_key(glob, name): one_of(one, f"{name}={{{glob!r}: …}}", allowed)
            for glob, one in value.items()
        }
    if value is None or isinstance(value, str):
        return one_of(value, name, allowed)
    words = ", ".join(map(repr, allowed))
    raise MisuseError(f"{name} is one of {words}, or {{glob: …}} of them; not {shown(value)}")


def glob_key(glob: object, name: str) -> str:
    """Checks a glob that is the key of a choice."""
    if not isinstance(glob, str):
        raise MisuseError(f"{name}={{glob: …}} has globs over rendered leaf paths as keys, not {shown(glob)}")
    return glob


#: The words of ``cast=``, beside dtypes.
CASTS: tuple[str, ...] = get_args(Cast)


def _cast(value: object) -> Choice:
    if not isinstance(value, Mapping):
        if isinstance(value, str) and value in CASTS:
            return value
        raise MisuseError(
            f"cast is one of {', '.join(map(repr, CASTS))}, or {{glob: one of them or a dtype}}; not {shown(value)}{meant(value, CASTS)}"
        )
    return {glob_key(glob, "cast"): _cast_one(glob, one) for glob, one in value.items()}


def _cast_one(glob: str, one: object) -> str:
    if isinstance(one, str) and one in CASTS:
        return one
    name = storable_dtype(one)
    if name is None:
        raise MisuseError(
            f"cast={{{glob!r}: …}} takes {', '.join(map(repr, CASTS))} or a dtype that can be stored, not {shown(one)}{meant(one, CASTS)}"
        )
    return name


def storable_dtype(given: object) -> str | None:
    """The stored name of a dtype, given by name or as one of a framework; ``None`` if it is
    none."""
    if given is None:
        return None
    try:
        return storable_name(to_dtype(given).newbyteorder("="))
    except (TypeError, ValueError):
        return None
