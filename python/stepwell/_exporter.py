"""The thread of a manager that runs its exports, one after the other. Ranks share each export."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from . import _core
from . import _lifecycle as lifecycle
from ._conversion.files import write
from ._conversion.spec import ConversionResult
from ._opening import opened
from ._options import reader_json
from ._save_result import Save
from .errors import MisuseError, StepwellError
from .events import ExportEvent, OnEvent, tell

if TYPE_CHECKING:
    from ._exports import Export

_ERROR, _WARNING, _INFO = 40, 30, 20


class _Job(NamedTuple):
    """One export of one step."""

    step: int
    #: The number of the export.
    number: int


class Exporter:
    """Runs the exports of a manager.

    The ranks export in rounds, and the leader alone has a queue. All ranks make the same saves, so
    they count the same rounds: one for each export that is due of a save, whatever became of it
    on this rank. In a round, all ranks export what the leader has queued by then. The first failure
    ends the round.
    """

    def __init__(
        self, root: str, core: _core.Manager, exports: Sequence[Export], on_event: OnEvent | None
    ) -> None:
        self._root = root
        self._core = core
        self._exports = exports
        self._places = [one._places(root) for one in exports]
        self._on_event = on_event
        self._leads = core.ranks()[0] == 0
        self._changed = threading.Condition()
        #: Saves of steps to export that are not over.
        self._saves = 0
        #: Rounds to come. The first ones are for what an earlier process has left.
        self._rounds = len(exports)
        #: The leader's exports to come, in order. A line of steps is committed in order.
        self._queue: list[_Job] = []
        #: The step that the leader exports.
        self._exporting: list[int] = []
        self._is_busy = True
        self._is_closing = False
        #: Changes as an export gets on.
        self.progress = 0
        self._thread = threading.Thread(target=self._run, name="stepwell-export", daemon=True)
        self._thread.start()

    def add(self, save: Save) -> None:
        """Exports what is due of a save, once it is over and if it is committed."""
        if not self._due(save.step):
            return
        with self._changed:
            self._saves += 1
        save.add_done_callback(self._is_over)

    def add_failed(self, step: int) -> None:
        """Exports what is due of a save that failed here at once, if it is committed all the
        same."""
        with self._changed:
            self._add_rounds(step)

    def _is_over(self, save: Save) -> None:
        with self._changed:
            self._saves -= 1
            self._add_rounds(save.step)

    def _add_rounds(self, step: int) -> None:
        due = self._due(step)
        self._rounds += len(due)
        if self._leads:
            self._queue = sorted({*self._queue, *due})
            self._keep()
        self._changed.notify_all()

    def _keep(self) -> None:
        """Keeps the newest step that waits for each export from retention. Older ones will be
        skipped."""
        newest = {job.number: job.step for job in self._queue}
        self._core.keep({*newest.values(), *self._exporting})

    def _due(self, step: int) -> list[_Job]:
        return [_Job(step, number) for number, one in enumerate(self._exports) if step % one.every == 0]

    def wait(self, limit: float | None) -> bool:
        """Waits until nothing is left to do; ``False``: the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._saves or self._rounds or self._is_busy), limit)

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
        if self._leads:
            jobs = self._found_at_start()
            with self._changed:
                self._queue = sorted({*self._queue, *jobs})
        while self._begins_round():
            self._round()

    def _begins_round(self) -> bool:
        with self._changed:
            self._is_busy, self._exporting = False, []
            self._keep()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rounds or (self._is_closing and not self._saves))
            if self._rounds == 0:
                return False
            self._rounds -= 1
            self._is_busy = True
            return True

    # ---- one round ----

    def _round(self) -> None:
        """Exports what is queued, with all ranks. Each round is one meeting of theirs, so that a
        rank that misses one is there in the next."""
        try:
            sharing = self._core.sharing()
            try:
                while (job := self._agreed(sharing)) is not None:
                    if not self._export(job, sharing):
                        break
            except BaseException as error:
                sharing.fail(_said(error))
                raise
            finally:
                sharing.leave()
        except BaseException as error:  # it is reported, and hurts nothing else
            with self._changed:
                next_job = self._queue.pop(0) if self._queue else None
            if next_job is not None:
                self._report(next_job, "failed", failure=error)
            else:
                lifecycle.log(_ERROR, "stepwell", f"exporting steps of {self._root} failed: {_said(error)}")
        self.progress += 1

    def _agreed(self, sharing: _core.Sharing) -> _Job | None:
        """The leader's next export, on all ranks."""
        with self._changed:
            mine = self._queue[0] if self._queue else None
        found = json.loads(sharing.ask("find the next export", json.dumps(mine)))
        if found is None:
            return None
        job = _Job(*found)
        if self._leads:
            with self._changed:
                self._queue.remove(job)
                self._exporting = [job.step]
                self._keep()
        return job

    def _export(self, job: _Job, sharing: _core.Sharing) -> bool:
        """Exports a step, and returns true if the round goes on."""
        begun = time.monotonic()
        export, places = self._exports[job.number], self._places[job.number]
        decision: str | None = None
        try:
            decision = sharing.ask("decide about an export", self._decide(job) if self._leads else "")
            made = self._write(job, sharing) if decision == "write" else None
        except BaseException as error:  # it is reported, and hurts nothing else
            sharing.fail(_said(error))
            if self._leads:
                self._try("deleting a failed export to", job, lambda: places.discard(job.step))
                if decision == "write":
                    self._try("deleting the record of", job, lambda: places.discard_record(job.step))
            self._report(job, "failed", failure=error, seconds=time.monotonic() - begun)
            return False
        if decision != "write" and self._leads:
            self._try("deleting an interrupted export to", job, lambda: places.discard(job.step))
        if decision == "skip":
            self._report(job, "skipped")
        if made is not None:
            if self._leads and (keep := export.keep) is not None:
                self._try("deleting exports older than", job, lambda: places.remove_old(keep))
            self._report(job, "exported", made, seconds=time.monotonic() - begun)
        return True

    def _try(self, what: str, job: _Job, call: Callable[[], None]) -> None:
        try:
            call()
        except (StepwellError, OSError) as error:
            path = self._places[job.number].template.path(job.step)
            lifecycle.log(_WARNING, "stepwell", f"{what} {path}: {_said(error)}")

    def _write(self, job: _Job, sharing: _core.Sharing) -> ConversionResult:
        export, places = self._exports[job.number], self._places[job.number]

        def progress(done: int, total: int) -> None:
            self.progress += 1

        with opened(self._root, job.step, export.map) as checkpoint:
            record = places.record_for(job.step, checkpoint)
            made = write(
                *(checkpoint, places.template.path(job.step), export._conversion(), sharing),
                extra=places.files(record),
                progress=progress,
                beside=self._core,
                owner=places.owner(job.step),
            )
        if self._leads:
            places.end(job.step, record)
        return made

    def _decide(self, job: _Job) -> Literal["write", "skip", "done"]:
        """The leader's decision. A step is skipped if a newer one waits. Prepares the place of one
        that is written."""
        places, committed = self._places[job.number], self._core.all_steps()
        if job.step not in committed:
            return "done"
        with self._changed:
            queued = {one.step for one in self._queue if one.number == job.number}
        if any(step > job.step for step in queued.intersection(committed)):
            return "skip"
        record = places.record(job.step)
        with opened(self._root, job.step, None) as checkpoint:
            wanted = places.record_for(job.step, checkpoint)
        if places.is_taken(job.step):
            if record == wanted:
                return "done"
            if record is None:
                raise MisuseError(
                    f"{places.template.path(job.step)} exists already, and is no export of this root. Pass another destination, or delete what is there"
                )
            # The step was saved again, after a rewind.
            places.remove(job.step)
        places.begin(job.step, wanted)
        return "write"

    def _report(
        self,
        job: _Job,
        outcome: Literal["exported", "skipped", "failed"],
        made: ConversionResult | None = None,
        failure: BaseException | None = None,
        seconds: float = 0.0,
    ) -> None:
        step, path = job.step, self._places[job.number].template.path(job.step)
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

    def _found_at_start(self) -> list[_Job]:
        try:
            return self._left()
        except (StepwellError, OSError) as error:
            lifecycle.log(_ERROR, "stepwell", f"finding interrupted exports failed: {_said(error)}")
            return []

    def _left(self) -> list[_Job]:
        """The exports that an earlier process has left, and those of the newest due steps."""
        reader = _core.Manager(self._root, reader_json())
        try:
            steps = reader.all_steps()
        finally:
            reader.close(None)
        jobs: list[_Job] = []
        for number, (export, places) in enumerate(zip(self._exports, self._places, strict=True)):
            interrupted = places.interrupted()
            for step in interrupted.difference(steps):
                places.discard(step)
            newest = [step for step in steps if step % export.every == 0][-1:]
            wanted = interrupted.intersection(steps).union(newest)
            jobs += [_Job(step, number) for step in wanted]
        return jobs


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
