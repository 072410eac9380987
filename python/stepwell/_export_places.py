"""Places of exports: their names, the records that say whose they are, and their removal.

On a disk, an export has a temporary name until it is complete. In a store, the record is written
first. It says that the export has begun, until one that does not say so replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import string
from dataclasses import dataclass
from typing import Final, TypeAlias

from . import _core
from . import _lifecycle as lifecycle
from ._checkpoint import Checkpoint
from ._checks import shown
from ._locations import Location, is_store, location
from ._store import StoreUrl
from .errors import MisuseError, StepwellError
from .formats.files import read
from .formats.writers import OutputFile

_MAX_RECORD_BYTES: Final = 1 << 20
#: ``{step}``, ``{step:08}`` and the like.
_FORMAT: Final = re.compile(r"(0?[1-9]\d*)?d?")
_WARNING: Final = 30

#: The root, the step, and when the step was committed.
Record: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Template:
    """The names of exports."""

    folder: str
    before: str
    spec: str
    after: str

    @classmethod
    def of(cls, destination: Location) -> Template:
        where = location(destination, "the destination of an export")
        folder, name = os.path.split(where)
        if isinstance(where, StoreUrl):
            folder = where.above()
        wrong = MisuseError(
            f'the destination of an export has {{step}} once, in its last part, such as "hf/{{step}}" or "hf/{{step:08}}"; this one is {shown(destination)}'
        )
        try:
            parts = list(string.Formatter().parse(name))
        except ValueError:
            raise wrong from None
        fields = [part for part in parts if part[1] is not None]
        if "{" in folder or len(fields) != 1 or fields[0][1] != "step" or fields[0][3] is not None:
            raise wrong
        at, spec = parts.index(fields[0]), fields[0][2] or ""
        if _FORMAT.fullmatch(spec) is None:
            raise wrong
        before = "".join(part[0] for part in parts[: at + 1])
        return cls(folder, before, spec, "".join(part[0] for part in parts[at + 1 :]))

    def name(self, step: int) -> str:
        return f"{self.before}{step:{self.spec}}{self.after}"

    def path(self, step: int) -> str:
        return _below(self.folder, self.name(step))

    def step(self, name: str) -> int | None:
        """The step of a name; ``None``: it is no export's."""
        digits = name[len(self.before) : len(name) - len(self.after)]
        if not digits.isdecimal() or not digits.isascii() or len(digits) > 32:
            return None
        return int(digits) if self.name(int(digits)) == name else None


@dataclass(frozen=True, slots=True)
class Places:
    """The exports of a root with the names of a template. A record names the root and the step of
    each: in a directory, or beside a file. The journal of an incomplete one names them, too.
    Nothing without its record is deleted."""

    root: str
    template: Template
    is_directory: bool

    @classmethod
    def of(cls, root: str, template: Template, is_directory: bool) -> Places:
        """The places of exports on a disk or in a store."""
        kind = StoredPlaces if is_store(template.folder) else cls
        return kind(root, template, is_directory)

    def owner(self, step: int) -> bytes:
        """Names this root and a step, in the journal of an export."""
        return hashlib.sha256(json.dumps([self.root, step]).encode()).digest()

    def record_for(self, step: int, checkpoint: Checkpoint) -> Record:
        """The record of an export to come."""
        committed = checkpoint.manifest["committed_unix_ns"]
        return {"root": self.root, "step": step, "committed_unix_ns": committed}

    def record(self, step: int) -> Record | None:
        """The record of an export of this root and step."""
        return self._read(self._record_file(step), step)

    def _record_file(self, step: int) -> str:
        if self.is_directory:
            return _below(self.template.path(step), _core.EXPORT_RECORD)
        return _below(self.template.folder, f".{self.template.name(step)}.{_core.EXPORT_RECORD}")

    def _content(self, file: str) -> bytes:
        """The bytes of a record; none without one."""
        try:
            length = read(file, 0, 0)[1]
            return read(file, 0, min(length, _MAX_RECORD_BYTES))[0]
        except (StepwellError, OSError):
            return b""

    def _read(self, file: str, step: int) -> Record | None:
        try:
            record = json.loads(self._content(file))
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or not isinstance(record.get("committed_unix_ns"), int):
            return None
        return record if (record.get("root"), record.get("step")) == (self.root, step) else None

    def files(self, record: Record) -> list[OutputFile]:
        """The files of an export that only exports have."""
        found = [OutputFile(_core.EXPORT_RECORD)] if self.is_directory else []
        for file in found:
            file.add_bytes(json.dumps(record, indent=2).encode())
        return found

    def end(self, step: int, record: Record) -> None:
        """Makes an export complete that was written and verified."""

    def is_taken(self, step: int) -> bool:
        """True if something is in the place of an export."""
        return os.path.lexists(self.template.path(step))

    def begin(self, step: int, record: Record) -> None:
        """Writes the record of a file, durably. The file does not exist yet: after a crash, a
        record alone does no harm, and a file alone would be somebody else's."""
        if not self.is_directory:
            self._write(step, record)

    def _write(self, step: int, record: Record) -> None:
        _core.write_record(self._record_file(step), json.dumps(record, indent=2))

    def remove(self, step: int) -> None:
        """Removes an export that has a record."""
        path = self.template.path(step)
        if self.is_directory:
            rest = _core.removal_of(path)
            if os.path.lexists(rest) and not self._is_rest(rest, step):
                raise MisuseError(f"{rest} is in the way of a removal. Move or delete it")
            _core.remove_conversion(path, only_rest=False)
        else:
            _core.remove_output_file(path)

    def remove_old(self, keep: int) -> None:
        """Removes all exports but those of the ``keep`` steps that were committed last."""
        found = {
            step: self.record(step) for step in map(self.template.step, self._names()) if step is not None
        }
        ours = {step: record["committed_unix_ns"] for step, record in found.items() if record is not None}
        for step in sorted(ours, key=lambda step: (ours[step], step))[:-keep]:
            self.remove(step)

    def discard(self, step: int) -> None:
        """Removes what an export of this root has written so far."""
        _core.discard_conversion(self.template.path(step), self.is_directory, self.owner(step))

    def discard_record(self, step: int) -> None:
        """Removes the record of a file that was not written."""
        if not self.is_directory and self.record(step) is not None:
            os.unlink(self._record_file(step))

    def interrupted(self) -> set[int]:
        """The steps of interrupted exports of this root. Ends interrupted removals, and removes the
        journals of complete exports."""
        steps = set()
        for name, what, owner in _core.leftover_conversions(self.template.folder, self.is_directory):
            step = self.template.step(name)
            if step is None:
                continue
            if what == "removal":
                self._end_removal(step)
            elif what == "journal":
                self.discard(step)
            elif owner == self.owner(step):
                steps.add(step)
        return steps

    def _end_removal(self, step: int) -> None:
        path = self.template.path(step)
        rest = _core.removal_of(path)
        if self._is_rest(rest, step):
            _core.remove_conversion(path, only_rest=True)
        else:
            lifecycle.log(
                *(_WARNING, "stepwell"),
                f"leaving {rest}: it has no {_core.EXPORT_RECORD} of this root and step. Move or delete it",
            )

    def _is_rest(self, path: str, step: int) -> bool:
        """True for the rest of a removed export. Its record is deleted last."""
        return self._read(os.path.join(path, _core.EXPORT_RECORD), step) is not None or (
            os.path.isdir(path) and not os.listdir(path)
        )

    def _names(self) -> list[str]:
        return os.listdir(self.template.folder) if os.path.isdir(self.template.folder) else []


#: The state that a record in a store shows while its export is not complete.
_STATE: Final = "state"
_BEGUN, _REMOVED = "begun", "removed"


@dataclass(frozen=True, slots=True)
class StoredPlaces(Places):
    """The exports in an object store."""

    def _content(self, file: str) -> bytes:
        return _core.read_object(file) or b""

    def is_taken(self, step: int) -> bool:
        return bool(_core.stored_objects(self.template.path(step)))

    def files(self, record: Record) -> list[OutputFile]:
        return []

    def begin(self, step: int, record: Record) -> None:
        self._write(step, {**record, _STATE: _BEGUN} if self.is_directory else record)

    def end(self, step: int, record: Record) -> None:
        if self.is_directory:
            self._write(step, record)

    def remove(self, step: int) -> None:
        path, record = self.template.path(step), self.record(step)
        if record is not None and self.is_directory:
            self._write(step, {**record, _STATE: _REMOVED})
        _core.remove_objects(path, self.is_directory)

    def discard(self, step: int) -> None:
        if self.is_directory and self._state(step) == _BEGUN:
            _core.remove_objects(self.template.path(step), self.is_directory)

    def discard_record(self, step: int) -> None:
        if not self.is_directory and self.record(step) is not None:
            _core.remove_objects(self._record_file(step), self.is_directory)

    def interrupted(self) -> set[int]:
        steps = set()
        for step in map(self.template.step, self._names() if self.is_directory else []):
            if step is None:
                continue
            state = self._state(step)
            if state == _BEGUN:
                steps.add(step)
            elif state == _REMOVED:
                self.remove(step)
        return steps

    def _state(self, step: int) -> object:
        record = self.record(step)
        return None if record is None else record.get(_STATE)

    def _names(self) -> list[str]:
        return _core.stored_level(self.template.folder)


def _below(folder: str, name: str) -> str:
    return folder.below(name) if isinstance(folder, StoreUrl) else os.path.join(folder, name)
