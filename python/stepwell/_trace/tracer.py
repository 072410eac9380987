"""The traces of a manager: it digests the state after each save, writes the traces, and compares
those of a restored step."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from dataclasses import dataclass, replace
from typing import Literal, final

from .. import _adapters as adapters
from .. import _core
from .. import _lifecycle as lifecycle
from .._caller import levels_to_caller
from .._save_result import Save
from .._state.specs import as_rank
from ..errors import ResumeDiffers
from ..events import OnEvent, TraceEvent, now, tell
from .causes import causes
from .compare import Compared, compare
from .record import Trace, TracedLeaf, decoded, encoded, versions

OnDifference = Literal["warn", "raise"]
_WARNING, _INFO = 30, 20
#: Traces in memory at a time. Each takes about 200 bytes for each leaf.
_MAX_UNWRITTEN = 64


@dataclass(slots=True)
class _Window:
    """The steps to trace after a base step."""

    base: int
    #: The save of the base. ``None`` if the base was restored.
    save: Save | None
    #: Steps to come.
    left: int
    #: The last traced step.
    last: int


@final
@dataclass(frozen=True, slots=True)
class TraceDifference:
    """A step of a resumed run whose state is not that of the run which it resumes."""

    #: The restored step, and the first step that differs.
    base: int
    step: int
    #: This process.
    rank: int
    #: The path of the first leaf that differs, and those of all that do.
    leaf: str
    leaves: tuple[str, ...]
    #: Likely causes, most likely first.
    causes: tuple[str, ...]

    def __str__(self) -> str:
        after = (
            f"{self.step - self.base} after the restored step {self.base}"
            if self.step > self.base
            else "the restored step"
        )
        near = "; ".join(f"({number}) {cause}" for number, cause in enumerate(self.causes, 1))
        return (
            f"step {self.step}, {after}, is not the step of the earlier run: leaf {self.leaf} differs on rank "
            f"{self.rank} ({len(self.leaves)} in all). Likely causes: {near}"
        )


class Tracer:
    """Traces for one manager. All calls come from the thread that trains."""

    def __init__(
        self,
        root: str,
        core: _core.Manager,
        steps: int,
        on_difference: OnDifference,
        on_event: OnEvent | None,
        writes: bool,
    ) -> None:
        self._root = root
        self._core = core
        self._steps = steps
        self._raises = on_difference == "raise"
        self._on_event = on_event
        self._writes = writes
        self._windows: list[_Window] = []
        #: The traces of the restored step, by the step of their digests.
        self._earlier: dict[int, list[Trace]] = {}
        self._base = 0
        self._changed = threading.Condition()
        #: Traces that are not written yet.
        self._unwritten = 0
        #: Changes as traces are written.
        self.progress = 0
        self._queue: queue.SimpleQueue[Trace | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ---- announcements ----

    def restored(self, step: int) -> None:
        """The next steps are compared with those that followed this step before."""
        self._base, self._earlier, self._windows = step, {}, []
        if self._writes:
            self._windows.append(_Window(step, None, self._steps, step - 1))
        try:
            rows = self._core.traces(step)
        except Exception as error:
            self._log(_WARNING, f"the traces of step {step} cannot be read, so nothing is compared: {error}")
            return
        found: dict[int, list[Trace]] = {}
        for row in rows:
            trace = decoded(row)
            if isinstance(trace, str):
                self._log(_WARNING, f"ignoring the trace {row[2]} of step {step}: {trace}")
            else:
                found.setdefault(trace.step, []).append(trace)
        for number, traces in found.items():
            # The run that was there first.
            run = min(traces, key=lambda trace: trace.unix_ns).run
            self._earlier[number] = [trace for trace in traces if trace.run == run]
        if not found:
            self._log(
                _WARNING,
                f"step {step} has no traces, so nothing is compared: its run had no prove_resume=, "
                "or ended before it wrote them",
            )

    def rewound(self, step: int) -> None:
        """Steps after this one are gone."""
        self._windows = [window for window in self._windows if window.base <= step]

    def announce(self, step: int, state: object, choice: _core._SaveChoice, save: Save | None) -> None:
        """Traces a step, if a window is open or an earlier trace is there. ``save``: it is saved.
        Only a difference raises, and only if it should."""
        due = [window for window in self._windows if step > window.last]
        if save is not None and self._writes:
            self._windows = [window for window in self._windows if window.base != step]
            due.append(_Window(step, save, self._steps + 1, step - 1))
            self._windows.append(due[-1])
        earlier = self._earlier.pop(step, None)
        if not due and earlier is None:
            return
        try:
            trace = self._traced(step, state, choice)
            for window in due:
                window.left, window.last = window.left - 1, step
                self._add(window, trace)
        except Exception as error:
            self._log(_WARNING, f"step {step} is not traced: {type(error).__name__}: {error}")
            return
        finally:
            self._windows = [window for window in self._windows if window.left > 0]
        if earlier is not None:
            self._compare(earlier, trace)

    def _traced(self, step: int, state: object, choice: _core._SaveChoice) -> Trace:
        ranks = self._core.ranks()
        include, exclude, _, unsupported = choice
        with as_rank(ranks):
            flat = _core.flatten(adapters.as_saved(state), (include, exclude, [], unsupported), ranks[1] == 1)
        streams = adapters.streams(flat.devices())
        rows = self._core.digests(flat, streams, lifecycle.notifier.events)
        leaves = {
            path: TracedLeaf(
                kind, drifts, {(tuple(offset), tuple(extent)): digest for offset, extent, digest in parts}
            )
            for path, kind, drifts, parts in rows
        }
        rank, world_size = ranks
        run = self._core.session()
        return Trace(step, "", step, rank, world_size, run, time.time_ns(), versions(), leaves)

    # ---- comparing ----

    def _compare(self, earlier: list[Trace], trace: Trace) -> None:
        compared = compare(earlier, trace)
        difference = self._difference(earlier, trace, compared)
        outcome: Literal["same", "differs", "unknown"] = "unknown" if compared.unknown else "same"
        if difference is not None:
            outcome, self._earlier = "differs", {}
        elif compared.unknown:
            self._log(
                _INFO,
                f"{len(compared.unknown)} leaves of step {trace.step} are cut in another way on this rank. "
                f"`stepwell trace {self._root}` compares them",
            )
        if self._on_event is not None:
            tell(
                self._on_event,
                TraceEvent(
                    self._root,
                    trace.step,
                    now(),
                    outcome,
                    None if difference is None else str(difference),
                    self._base,
                    trace.rank,
                    None if difference is None else difference.leaf,
                    () if difference is None else difference.causes,
                ),
            )
        if difference is not None:
            error = ResumeDiffers(f"{difference}. `stepwell trace {self._root}` shows all ranks and steps")
            error.leaf, error.step, error.rank = difference.leaf, difference.step, difference.rank
            error.difference = difference
            if self._raises:
                raise error
            warnings.warn(error, stacklevel=levels_to_caller())

    def _difference(self, earlier: list[Trace], trace: Trace, compared: Compared) -> TraceDifference | None:
        if not compared.differing:
            return None
        paths = tuple(one.path for one in compared.differing)
        near = tuple(causes(earlier, trace, compared))
        return TraceDifference(self._base, trace.step, trace.rank, paths[0], paths, near)

    # ---- writing ----

    def _add(self, window: _Window, trace: Trace) -> None:
        """Writes a trace once its base is committed."""
        of_base = replace(trace, base=window.base)
        with self._changed:
            if self._unwritten >= _MAX_UNWRITTEN:
                raise RuntimeError(f"{_MAX_UNWRITTEN} traces wait for their saves or for the disk")
            self._unwritten += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stepwell-trace", daemon=True)
            self._thread.start()
        if window.save is None:
            self._queue.put(of_base)
        else:
            window.save.add_done_callback(lambda save: self._base_is_over(save, of_base))

    def _base_is_over(self, save: Save, trace: Trace) -> None:
        if save._is_committed():
            self._queue.put(trace)
        else:
            self._written()

    def _written(self) -> None:
        with self._changed:
            self._unwritten -= 1
            self.progress += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while (trace := self._queue.get()) is not None:
            try:
                self._core.add_trace(trace.base, encoded(trace))
            except Exception as error:
                # Retention may have deleted the base meanwhile.
                self._log(_INFO, f"step {trace.step}: a trace for step {trace.base} was not written: {error}")
            self._written()

    def wait(self, limit: float | None) -> bool:
        """Waits until all traces are written; ``False``: the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, limit)

    def close(self, limit: float | None) -> bool:
        """Ends the thread when all traces are written; ``False``: the time is over."""
        if not self.wait(limit):
            return False
        self._queue.put(None)
        return True

    def _log(self, level: int, text: str) -> None:
        lifecycle.log(level, "stepwell.trace", f"{self._root}: {text}")
