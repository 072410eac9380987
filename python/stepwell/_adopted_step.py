"""Steps of a root whose bytes are files of another library: how one is opened, and what its
manifest has about them.

The engine lists, leases and retires such a step like any other. Its manifest names the files, and
the file with their checksums (:mod:`stepwell.formats.adoption`).
"""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING

from ._checkpoint import Checkpoint
from ._restore.options import RestoreOptions
from ._steps import AdoptedFiles
from .errors import CorruptCheckpoint, FormatError, MisuseError, StepNotFound, StepwellError

if TYPE_CHECKING:
    from . import _core
    from ._manifest import Manifest, ManifestAdopted
    from .formats import Description
    from .formats.adoption import Adoption
    from .maps import MapLike

#: Errors of files that were moved or changed.
_CHANGED = (CorruptCheckpoint, FormatError, MisuseError, StepNotFound)
_GONE = (errno.ENOENT, errno.ENOTDIR)


def of_step(step: _core.Checkpoint, map: MapLike | None = None, engine: str = "auto") -> Checkpoint:
    """Returns a leased step for reading. If it was adopted, its files are opened, and it keeps its
    lease as long as they are open."""
    if not step.is_adopted():
        return Checkpoint(RestoreOptions(map=map).mapped(step))
    try:
        found, core = _files(step, engine)
        core = RestoreOptions(map=map).mapped(core)
    except BaseException:
        step.close()
        raise
    from .formats.copies import Copies

    copies = Copies(found.copies, found.reading) if found.copies else None
    return Checkpoint(core, step.step(), found.adoption, copies, adopted_step=step)


def _files(step: _core.Checkpoint, engine: str) -> tuple[Description, _core.Checkpoint]:
    """The files of an adopted step."""
    manifest: Manifest = json.loads(step.manifest())
    adopted = manifest["adopted"]
    files = AdoptedFiles.of(adopted, os.path.dirname(step.path()))
    try:
        found = _described(adopted, files.path)
        return found, found.open(engine, files.path, manifest)
    except (StepwellError, OSError) as error:
        if not isinstance(error, _CHANGED) and getattr(error, "errno", None) not in _GONE:
            if isinstance(error, StepwellError):
                error.step = manifest["step"]  # not that of the other root
            raise
        failure = CorruptCheckpoint(
            f"step {manifest['step']} was adopted from {files.path} ({files.family}), which was moved or changed: "
            f"{error}. Move it back, or delete the step from {os.path.dirname(step.path())} and adopt it again"
        )
        failure.step, failure.file = manifest["step"], getattr(error, "file", None) or files.path
        failure.block = getattr(error, "block", None)
        raise failure from error


def _described(adopted: ManifestAdopted, path: str) -> Description:
    """The description of the files of a step, with the checksums that it was adopted with."""
    from . import formats
    from .formats import adoption

    # Its checksums say that it is what it was, whatever its library notes about it by now.
    found = formats.find_at(path, finished=False) if adopted["of_root"] else formats.find(path)
    if found is None:
        raise StepNotFound(f"no checkpoint of another library is at {path}")
    known = found.adoption
    checksums = adopted["checksums"]
    if known is None or not adoption.begins_with(known, checksums["length"], checksums["crc32c"]):
        raise CorruptCheckpoint(
            f"the checksums of {path} are missing or were replaced: "
            f"{'none were found' if known is None else known.file}"
        )
    return found


def reference(found: Description, path: str, known: Adoption, root: str) -> str:
    """The part of a manifest that names the files of a step to be adopted."""
    adopted: ManifestAdopted = {
        "path": _relative(path, root),
        "of_root": found.of_root,
        "family": found.family,
        "bytes": known.nbytes_of(path),
        "checksums": {"path": _relative(known.file, root), "length": known.length, "crc32c": known.crc},
    }
    return json.dumps(adopted)


def _relative(path: str, root: str) -> str:
    """A path as the manifests in a root name it: relative to the root if it is in the root's parent
    directory, so that both can be moved together."""
    root = os.path.realpath(root)
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    try:
        real.encode()
    except UnicodeEncodeError:
        raise MisuseError(f"{path!a} is not UTF-8, and cannot be named by a step. Rename it") from None
    above = os.path.dirname(root)
    if above != os.sep and real.startswith(above + os.sep):
        return os.path.relpath(real, root)
    return real
