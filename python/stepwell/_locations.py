"""Paths that callers give: what they must be, and what a wrong one looks like, so that the error
can say what to pass instead."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from . import _core
from ._checks import shown
from ._store import SCHEMES, Store, StoreUrl, is_store_url, shown_url, url_of
from .errors import FormatError, MisuseError, NotAStep, StepNotFound, StorageError, from_system

Path: TypeAlias = str | os.PathLike[str]
#: A path, or a place in an object store.
Location: TypeAlias = Path | Store

#: The commit record of a checkpoint.
MANIFEST = "manifest.json"
#: The control directory of a root.
CONTROL = ".stepwell"
#: The directory of our root in a trainer's checkpoint, or in the directory of its run.
GUEST = "stepwell"
#: Ends of the names of files of other libraries.
_OF_OTHERS = (".safetensors", ".pt", ".pth", ".bin", ".npy", ".npz", ".msgpack")
#: Entries of a directory that are looked into.
_LOOKED_AT = 64


#: A URL: ``scheme://``, also with one slash, as ``pathlib`` makes it of two, or none.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//|/?)")
#: Schemes that are recognised with one slash, or none.
_WITHOUT_SLASHES = frozenset(
    [
        "abfs",
        "abfss",
        "adl",
        "az",
        "dbfs",
        "file",
        "gcs",
        "gs",
        "hdfs",
        "hf",
        "http",
        "https",
        "oss",
        "r2",
        "s3",
        "s3a",
        "wasb",
        "wasbs",
    ]
)


def absolute(path: Location, what: str = "the path") -> str:
    """Returns an absolute path, ``~`` expanded. Accepts ``file://`` URLs, and refuses others."""
    if isinstance(path, Store):
        path = path.url
    try:
        given = os.fspath(path)
    except TypeError as error:
        raise MisuseError(f"{what} is a str or an os.PathLike, not {shown(path)}") from error
    given = os.fsdecode(given)
    if not given:
        raise MisuseError(f'{what} is empty; pass a directory ("." is the working directory)')
    if "\0" in given:
        raise MisuseError(f"{what} holds a null byte: {given!r:.80}")
    found = _URL.match(given)
    if found is not None and (found[2] == "//" or found[1].lower() in _WITHOUT_SLASHES):
        given = _from_url(given, found[1].lower(), what)
    return os.path.abspath(os.path.expanduser(given))


def location(path: Location, what: str = "the path") -> str:
    """Returns an absolute path, or the URL of an object store (:class:`StoreUrl`)."""
    if isinstance(path, StoreUrl):
        return path
    return url_of(path, what) if isinstance(path, Store) or is_store_url(path) else absolute(path, what)


def is_store(where: str) -> bool:
    """True for a location in an object store."""
    return isinstance(where, StoreUrl)


def is_root(where: str) -> bool:
    """True for a location with a root of stepwell."""
    return _core.path_kind(where) == "root" if is_store(where) else _is_root(where)


def is_checkpoint(where: str) -> bool:
    """True for a location with a checkpoint of stepwell."""
    if is_store(where):
        return _core.path_kind(where) == "checkpoint"
    return os.path.isfile(os.path.join(where, MANIFEST))


def readable(path: Location, what: str = "the path") -> str:
    """Returns the absolute path of something to read. A symlink to a directory is followed. One to
    a file has its own name, and the other files of its model beside it, as in a hub's cache."""
    found = location(path, what)
    is_link = not is_store(found) and os.path.islink(found)
    return os.path.realpath(found) if is_link and os.path.isdir(found) else found


def _from_url(url: str, scheme: str, what: str) -> str:
    """Returns the path of a ``file://`` URL. Refuses other schemes."""
    if scheme != "file":
        advice = (
            "Pass it as a str with ://, since pathlib takes a slash away"
            if scheme in SCHEMES and "://" not in url
            else "A path is wanted here. Roots and checkpoints may also be in object stores, "
            f"at {', '.join(f'{one}://' for one in SCHEMES)}"
        )
        raise MisuseError(f"{what} is a URL ({shown_url(url)}). {advice}")
    parts = urlsplit(url)
    if not parts.path.startswith("/"):
        raise MisuseError(
            f"{what} is a file: URL without an absolute path ({shown_url(url)}); pass the path itself, or file:///…"
        )
    if parts.netloc not in ("", "localhost"):
        raise MisuseError(f"{what} names another host ({shown_url(url)}); pass a path of this machine")
    return unquote(parts.path)


def is_directory(path: str) -> bool:
    """True if a directory is there, or something below a URL. A disk that does not answer is an
    error, and no "nothing there": see :class:`~stepwell.StorageError`."""
    if is_store(path):
        return _core.path_kind(path) != "absent"
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise from_system(f"stat of {path} failed", error, path) from error


def check_root(root: str) -> None:
    """Refuses what is there already and can be no root."""
    if os.path.isfile(os.path.join(root, MANIFEST)):
        above = os.path.dirname(root)
        raise MisuseError(
            f"{root} is no root but a checkpoint itself (it has a {MANIFEST}): a manager takes the directory that holds the steps"
            + (f", here {above}" if _is_root(above) else "; sw.restore() and sw.open() read a single one")
        )
    if inside := container_of(root):
        raise MisuseError(f"{root} cannot be a root: {inside}")
    if os.path.lexists(root) and not os.path.isdir(root):
        raise MisuseError(
            f"{root} cannot be a root: it is {_no_directory(root)}; pass the directory of the run"
        )


def check_destination(path: str) -> None:
    """Refuses to save a single checkpoint where something else is. The engine checks a store for
    roots and checkpoints."""
    if is_store(path):
        if _core.path_kind(path) == "directory":
            raise MisuseError(
                f"{path} has objects that are no checkpoint, and they would stay beside it; pass a URL that is free"
            )
        return
    if os.path.islink(path):
        raise MisuseError(
            f"{path} is a symlink, and a save would replace the link; pass {os.path.realpath(path)}"
        )
    above, name = os.path.split(path)
    if _is_root(above) and name[-1:].isdigit():
        raise MisuseError(
            f"{path} is where the run {above} has its steps: a checkpoint there would be taken for one of them, or replace one; "
            "save through sw.CheckpointManager, or pass a path beside the run"
        )
    if _is_root(path):
        raise MisuseError(
            f"{path} is the root of a run, with steps of its own; save through sw.CheckpointManager({path!r}), or pass another path"
        )
    if inside := container_of(path):
        raise MisuseError(f"{path} cannot be a checkpoint: {inside}")
    if os.path.lexists(path) and not os.path.isfile(os.path.join(path, MANIFEST)):
        kind = "a directory" if os.path.isdir(path) else _no_directory(path)
        raise MisuseError(
            f"{path} is {kind} that is no checkpoint, and is not replaced by one; pass a path that is free"
        )


def check_watched(root: str) -> None:
    """Refuses to wait for steps where none can come. A root that is not there yet may come."""
    if is_store(root):
        if is_checkpoint(root):
            raise MisuseError(f"{root} is a checkpoint, and no root in which steps could come")
        return
    if os.path.isfile(os.path.join(root, MANIFEST)) or (os.path.lexists(root) and not os.path.isdir(root)):
        raise MisuseError(f"{root} is no root, in which steps could come; pass the directory of the run")
    if inside := container_of(root):
        raise MisuseError(f"{root} is no root: {inside}")


@contextmanager
def explaining(path: str) -> Iterator[None]:
    """Adds an explanation of the path to the error that no step exists."""
    if is_store(path):
        yield
        return
    try:
        yield
    except (StepNotFound, FormatError, StorageError) as error:
        mistyped = isinstance(error, (StepNotFound, NotAStep)) or getattr(error, "errno", 0) in (
            errno.ENOENT,
            errno.ENOTDIR,
        )
        with contextlib.suppress(OSError):
            if mistyped and (why := explain(path, isinstance(error, StepNotFound))):
                text = str(error).removesuffix("; is the path right?").removesuffix("; it has no step at all")
                error.args = (f"{text}; {why}", *error.args[1:])
        raise


def explain(path: str, asked_for_step: bool = False) -> str:
    """Explains a path that is not a checkpoint, with likely intended paths. May be empty."""
    if inside := container_of(path):
        return inside
    if not os.path.lexists(path):
        return _nowhere(path)
    if not os.path.exists(path):
        return f"it is a link that leads nowhere: there is no {os.path.realpath(path)}"
    if not os.path.isdir(path):
        return f"it is {_no_directory(path)}, and a checkpoint of stepwell is a directory"
    if os.path.isfile(os.path.join(path, MANIFEST)):
        return "it is a single checkpoint: leave the step out" if asked_for_step else ""
    names = sorted(os.listdir(path))
    if CONTROL in names:
        return (
            "" if any(os.path.isfile(os.path.join(path, name, MANIFEST)) for name in names) else _beside(path)
        )
    found = [name for name in names[:_LOOKED_AT] if _is_root(os.path.join(path, name))]
    single = [name for name in names[:_LOOKED_AT] if os.path.isfile(os.path.join(path, name, MANIFEST))]
    if found or single:
        kind = "the root" if found else "the checkpoint"
        plural = "s" if len(found or single) > 1 else ""
        return f"it holds {kind}{plural} {_few(found or single)}: pass that path"
    if "snapshots" in names:
        return f"it is a cache of Hugging Face: pass a directory in {os.path.join(path, 'snapshots')}"
    if files := [name for name in names if name.endswith(_OF_OTHERS)]:
        return f"it holds no step. Files of other libraries are opened one by one: {_few(files)}"
    return (
        f"it is a directory that holds no step: {_few(names)}. Files of other libraries are .metadata, "
        "*.safetensors, pytorch_model.bin and flax_model.msgpack"
        if names
        else "it is a directory that holds nothing"
    )


def _few(names: list[str]) -> str:
    """The first names, and a mark if there are more."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def container_of(path: str) -> str:
    """Names the checkpoint or root that contains the path."""
    above = os.path.dirname(path)
    if os.path.basename(path) == CONTROL and os.path.isdir(path):
        return f"it is the control directory of the root {above}; pass that"
    for _ in range(3):
        if os.path.isfile(os.path.join(above, MANIFEST)):
            return f"it is inside the checkpoint {above}; pass that"
        if os.path.basename(above) == CONTROL and os.path.isdir(above):
            return f"it is inside the control directory of the root {os.path.dirname(above)}; pass that"
        above = os.path.dirname(above)
    return ""


def _no_directory(path: str) -> str:
    """Describes an existing path that is not a directory."""
    if os.path.exists(path) and not os.path.isfile(path):
        return "a pipe, a socket or a device"
    return "a file" if os.path.exists(path) else "a link that leads nowhere"


def _is_root(path: str) -> bool:
    return os.path.isdir(os.path.join(path, CONTROL))


def _beside(path: str) -> str:
    """A root without a step, as a mistyped name makes one: which other may have been meant."""
    above, name = os.path.split(path)
    roots = [one for one in os.listdir(above) if one != name and _is_root(os.path.join(above, one))]
    near = difflib.get_close_matches(name, roots, 3)
    return f"nothing was saved in this root yet; near its name are {', '.join(near)}" if near else ""


def _nowhere(path: str) -> str:
    """A path that leads nowhere: where it stops to exist, and what is near there."""
    there, missing = os.path.dirname(path), os.path.basename(path)
    while there != os.path.dirname(there) and not os.path.lexists(there):
        there, missing = os.path.dirname(there), os.path.basename(there)
    if not os.path.isdir(there):
        return f"{there} is {_no_directory(there)}"
    names = [name for name in os.listdir(there) if not name.startswith(".")]
    near = difflib.get_close_matches(missing, names, 3)
    return f"{there} has no {missing}" + (f" (near it is {', '.join(near)})" if near else "")
