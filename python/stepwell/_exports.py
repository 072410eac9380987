"""Exports while training: committed steps, written for other libraries in the background.

One thread of a manager runs its exports, one after the other. The bytes are read and written by
threads of the engine at low priority, which pause for saves. Ranks share each export.
"""

from __future__ import annotations

import json
import os
import re
import string
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, final

from . import _core
from . import _lifecycle as lifecycle
from ._checkpoint import Checkpoint
from ._checks import instance, listed, shown, whole
from ._choice import choice_of
from ._convert import Conversion, ConversionResult, Target, is_directory, write
from ._locations import Path, absolute
from ._opening import opened
from ._options import reader_json
from ._passed_along import Files, passed_along
from ._public import public
from ._restore.options import Globs
from ._save_result import Save
from .errors import MisuseError, StepwellError
from .events import ExportEvent, OnEvent, tell
from .formats.files import read
from .formats.writers import OutputFile

if TYPE_CHECKING:
    from .maps import MapLike

#: The file in the directory of an export that says which step it is.
RECORD: Final = "stepwell_export.json"
_MAX_RECORD_BYTES: Final = 1 << 20
#: ``{step}``, ``{step:08}`` and the like.
_FORMAT: Final = re.compile(r"(0?[1-9]\d*)?d?")
_ERROR, _WARNING, _INFO = 40, 30, 20

#: The leader's decision about an export.
_Decision: TypeAlias = Literal["write", "skip", "done"]


@public
@final
@dataclass(frozen=True, slots=True)
class Export:
    """An export of committed steps, for ``CheckpointManager(exports=[…])``.

    Args:
        destination: the path of an export, with ``{step}`` in its last part: ``"hf/{step}"`` or
            ``"weights/{step:08}.safetensors"``. Relative to the working directory.
        every: the steps to export are multiples of it.
        keep: exports that stay: the newest ones. Older ones of this root are deleted. ``None``:
            all. For directories only.
        to: the format, as of :func:`convert`, except ``"stepwell"``.
        map: as of :func:`convert`; also ``include``, ``exclude``, ``subtree``, ``cast``,
            ``objects``, ``shard_size`` and ``files``.

    Raises:
        MisuseError: an argument is invalid.
    """

    destination: Path
    every: int = 1
    keep: int | None = None
    to: Target = "safetensors"
    map: MapLike | None = None
    include: Globs = None
    exclude: Globs = None
    subtree: str = ""
    cast: object = None
    objects: Literal["error", "skip"] = "error"
    shard_size: int | str | None = None
    files: Files | None = None

    def __post_init__(self) -> None:
        if self.to == "stepwell":
            raise MisuseError('to="stepwell" is no format of another library. Use a second manager')
        _Template.of(self.destination)
        whole(self.every, "every", 1)
        name = self._conversion().file_options(self._path(0)).name
        if self.keep is not None:
            whole(self.keep, "keep", 1)
            if not self._is_directory():
                raise MisuseError(f"keep= is for directories, and {name} is one file. Leave it out")
        if self.map is not None:
            from .maps import Map

            object.__setattr__(self, "map", Map.of(self.map))

    def _conversion(self) -> Conversion:
        choice, files = choice_of(self.include, self.exclude, self.cast), passed_along(self.files)
        return Conversion(self.to, choice, self.subtree, self.objects, self.shard_size, files)

    def _path(self, step: int) -> str:
        return _Template.of(self.destination).path(step)

    def _is_directory(self) -> bool:
        return is_directory(self.to, self._path(0))


@dataclass(frozen=True, slots=True)
class _Template:
    """The names of exports."""

    folder: str
    before: str
    spec: str
    after: str

    @classmethod
    def of(cls, destination: Path) -> _Template:
        folder, name = os.path.split(absolute(destination, "the destination of an export"))
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
        return os.path.join(self.folder, self.name(step))

    def step(self, name: str) -> int | None:
        """The step of a name; ``None``: it is no export's."""
        digits = name[len(self.before) : len(name) - len(self.after)]
        if not digits.isdecimal() or not digits.isascii() or len(digits) > 32:
            return None
        return int(digits) if self.name(int(digits)) == name else None


def checked(exports: Sequence[Export], root: str) -> Sequence[Export]:
    """Checks the exports of a manager.

    Raises:
        MisuseError: two write to one path, or one writes where steps are.
    """
    found = [
        instance(one, Export, "an element of exports", "sw.Export(…)") for one in listed(exports, "exports")
    ]
    paths = [one._path(0) for one in found]
    for path in paths:
        if os.path.dirname(path) == root:
            raise MisuseError(f"the export to {path} would be beside the steps. Pass a directory in between")
        if paths.count(path) > 1:
            raise MisuseError(f"two exports write {path}. Pass different destinations")
    return found


class _Job(NamedTuple):
    """One export of one step."""

    #: The number of the export.
    number: int
    step: int
    #: False if the save failed here. It may be committed all the same: other ranks may know.
    is_committed: bool = True


class Exporter:
    """Runs the exports of a manager."""

    def __init__(
        self, root: str, core: _core.Manager, exports: Sequence[Export], on_event: OnEvent | None
    ) -> None:
        self._root = root
        self._core = core
        self._exports = exports
        self._on_event = on_event
        self._leads = core.ranks()[0] == 0
        self._changed = threading.Condition()
        #: Saves of steps to export that are not over.
        self._saves = 0
        self._queue: list[_Job] = []
        self._is_busy = True
        self._is_closing = False
        #: Changes as an export gets on.
        self.progress = 0
        self._thread = threading.Thread(target=self._run, name="stepwell-export", daemon=True)
        self._thread.start()

    def add(self, save: Save) -> None:
        """Exports what is due of a save, once it is committed."""
        if not self._due(save.step):
            return
        with self._changed:
            self._saves += 1
        save.add_done_callback(self._is_over)

    def add_failed(self, step: int) -> None:
        """Exports what is due of a save that failed here at once, if it is committed all the
        same."""
        with self._changed:
            self._queue += self._due(step, is_committed=False)
            self._changed.notify_all()

    def _due(self, step: int, is_committed: bool = True) -> list[_Job]:
        due = [number for number, one in enumerate(self._exports) if step % one.every == 0]
        return [_Job(number, step, is_committed) for number in due]

    def _is_over(self, save: Save) -> None:
        handle = save._handle
        is_committed = handle is not None and handle.outcome()[0] == "committed"
        with self._changed:
            self._saves -= 1
            self._queue += self._due(save.step, is_committed)
            self._changed.notify_all()

    def wait(self, limit: float | None) -> bool:
        """Waits until nothing is left to do; ``False``: the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._saves or self._queue or self._is_busy), limit)

    def close(self, limit: float | None) -> bool:
        """Ends the thread when nothing is left to do; ``False``: the time is over."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            return True  # the garbage collector closes the manager there
        self._thread.join(limit)
        return not self._thread.is_alive()

    def _run(self) -> None:
        jobs = self._interrupted()
        with self._changed:
            # Newer commits are exported after these.
            self._queue[:0] = jobs
        while (job := self._next()) is not None:
            self._export(job)

    def _next(self) -> _Job | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or (self._is_closing and not self._saves))
            self._is_busy = True
            return self._queue.pop(0) if self._queue else None

    # ---- one export ----

    def _export(self, job: _Job) -> None:
        begun, step = time.monotonic(), job.step
        export = self._exports[job.number]
        path = export._path(step)
        outcome: Literal["exported", "skipped", "failed"] = "exported"
        failure: BaseException | None = None
        made = None
        try:
            # All ranks see the same on the disk, whatever they know of the save.
            if not job.is_committed and step not in self._core.all_steps():
                return
            sharing = self._core.sharing()
            try:
                word = json.dumps([job.number, step, self._decide(job)]) if self._leads else ""
                number, step, decision = json.loads(sharing.ask("export a step", word))
                export = self._exports[number]
                path = export._path(step)
                if decision == "done":
                    return
                if decision == "skip":
                    outcome = "skipped"
                    self._discard(export, path)
                else:
                    made = self._write(export, step, path, sharing)
            except BaseException as error:
                sharing.fail(f"{type(error).__name__}: {error}")
                raise
            finally:
                sharing.leave()
            if self._leads and made is not None and export.keep is not None:
                self._delete_old(export, export.keep)
        except BaseException as error:  # it is reported, and hurts nothing else
            if made is None:
                outcome, failure = "failed", error
                self._discard(export, path)
            else:
                lifecycle.log(_WARNING, "stepwell", f"deleting exports older than {path}: {_said(error)}")
        self._report(step, path, outcome, failure, made, time.monotonic() - begun)

    def _write(self, export: Export, step: int, path: str, sharing: _core.Sharing) -> ConversionResult:
        def progress(done: int, total: int) -> None:
            self.progress += 1

        with opened(self._root, step, export.map) as checkpoint:
            what, extra = export._conversion(), []
            if export._is_directory():
                extra.append(OutputFile(RECORD))
                extra[0].add_bytes(json.dumps(self._record(step, checkpoint), indent=2).encode())
            return write(checkpoint, path, what, sharing, extra=extra, progress=progress, beside=self._core)

    def _decide(self, job: _Job) -> _Decision:
        """The leader's decision. A step is skipped if a newer one waits."""
        number, step = job.number, job.step
        committed = self._core.all_steps()
        with self._changed:
            newer = [one.step for one in self._queue if one.number == number and one.step in committed]
        if newer:
            return "done" if step in newer else "skip"
        path = self._exports[number]._path(step)
        if not os.path.lexists(path):
            return "write"
        record = self._record_at(path)
        with opened(self._root, step, None) as checkpoint:
            if record == self._record(step, checkpoint):
                return "done"
        # The step was saved again, after a rewind.
        if record is not None:
            _core.remove_conversion(path, only_rest=False)
        return "write"

    def _record(self, step: int, checkpoint: Checkpoint) -> dict[str, object]:
        committed = checkpoint.manifest["committed_unix_ns"]
        return {"root": self._root, "step": step, "committed_unix_ns": committed}

    def _record_at(self, path: str) -> dict[str, object] | None:
        """The record of an export of this root."""
        try:
            file = os.path.join(path, RECORD)
            length = read(file, 0, 0)[1]
            record = json.loads(read(file, 0, min(length, _MAX_RECORD_BYTES))[0])
        except (StepwellError, OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) and record.get("root") == self._root else None

    def _delete_old(self, export: Export, keep: int) -> None:
        template = _Template.of(export.destination)
        steps = [template.step(name) for name in os.listdir(template.folder)]
        there = sorted(step for step in steps if step is not None)
        ours = [step for step in there if self._record_at(template.path(step)) is not None]
        for step in ours[:-keep]:
            _core.remove_conversion(template.path(step), only_rest=False)

    def _discard(self, export: Export, path: str) -> None:
        """Removes what a failed export has written."""
        if self._leads:
            try:
                _core.discard_conversion(path, export._is_directory())
            except StepwellError as error:
                lifecycle.log(_WARNING, "stepwell", f"deleting a failed export to {path}: {_said(error)}")

    def _report(
        self,
        step: int,
        path: str,
        outcome: Literal["exported", "skipped", "failed"],
        failure: BaseException | None,
        made: ConversionResult | None,
        seconds: float,
    ) -> None:
        if failure is not None:
            lifecycle.log(_ERROR, "stepwell", f"exporting step {step} to {path} failed: {_said(failure)}")
        elif outcome == "skipped":
            lifecycle.log(_WARNING, "stepwell", f"skipped the export of step {step}: a newer one is due")
        elif self._leads and made is not None:
            size = f"{made.nbytes / 1e9:.3g} GB in {seconds:.3g} s"
            lifecycle.log(_INFO, "stepwell", f"exported step {step} ({size}) to {path}")
        if self._on_event is not None:
            error = None if failure is None else str(failure)
            kind = None if failure is None else getattr(failure, "kind", type(failure).__name__)
            nbytes = 0 if made is None else made.nbytes
            event = ExportEvent(
                self._root, step, datetime.now(UTC), outcome, error, kind, path, nbytes, seconds
            )
            tell(self._on_event, event)

    # ---- after a restart ----

    def _interrupted(self) -> list[_Job]:
        """The exports that an earlier process has left, and those of the newest due steps."""
        try:
            sharing = self._core.sharing()
            try:
                found = json.dumps([[job.number, job.step] for job in self._left()]) if self._leads else ""
                found = sharing.ask("resume exports", found)
            except (StepwellError, OSError) as error:
                sharing.fail(_said(error))
                raise
            finally:
                sharing.leave()
            return [_Job(number, step) for number, step in json.loads(found)]
        except (StepwellError, OSError) as error:
            lifecycle.log(_ERROR, "stepwell", f"finding interrupted exports failed: {_said(error)}")
            return []

    def _left(self) -> list[_Job]:
        reader = _core.Manager(self._root, reader_json())
        try:
            steps = reader.all_steps()
        finally:
            reader.close(None)
        jobs: list[_Job] = []
        for number, export in enumerate(self._exports):
            template = _Template.of(export.destination)
            wanted = {max((step for step in steps if step % export.every == 0), default=None)}
            for name in os.listdir(template.folder) if os.path.isdir(template.folder) else ():
                rest, partial = template.step(name.removesuffix(".removed")), None
                if name.endswith(".removed") and rest is not None:
                    _core.remove_conversion(template.path(rest), only_rest=True)
                if ".partial" in name and not name.endswith(".journal"):
                    partial = template.step(name.replace(".partial", "", 1))
                if partial is not None and partial in steps:
                    wanted.add(partial)
                elif partial is not None:
                    _core.discard_conversion(template.path(partial), export._is_directory())
            jobs += [_Job(number, step) for step in sorted(step for step in wanted if step is not None)]
        return jobs


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
