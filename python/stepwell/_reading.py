"""The reading half of a manager: restores of steps, by one process or by all of them together, and
questions about the root."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Unpack, cast, overload

from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._adopted_step import of_step
from ._checkpoint import Checkpoint, Metadata
from ._checks import flag, given_step, one_of, real_numbers, shown, step_number, text
from ._distributed import transports
from ._distributed.agreement import Together, Unasked
from ._distributed.exchange import Exchange
from ._locations import Path, explaining
from ._restore.fallback import newest_intact
from ._restore.options import ChoiceKeywords, RestoreKeywords, RestoreOptions, ResumeKeywords, spelled_out
from ._restore.plan import RestorePlan
from ._restore.report import RestoreReport
from ._restore.restore import Restored
from ._retention import RetentionDecision, decisions
from ._save_result import Save
from ._start import Start
from ._state.specs import as_rank
from ._steps import StepInfo, damaged, steps
from ._types import Metrics
from .errors import CorruptCheckpoint, MisuseError, StepNotFound, StepwellError
from .events import OnEvent, telling_restore

if TYPE_CHECKING:
    from ._background import Restore

Best: TypeAlias = tuple[str, Literal["min", "max"]]
_T = TypeVar("_T")
_WARNING = 30


def _check_same_start(checkpoint: Checkpoint, together: Together) -> None:
    """Raises on all ranks if they have opened different checkpoints. Their paths may differ."""
    facts = (checkpoint.manifest["writer"], checkpoint.step, checkpoint.paths())
    if not together.same(f"start {hashlib.sha256(repr(facts).encode()).hexdigest()}"):
        raise MisuseError(
            f"the ranks start from different checkpoints, this one from {checkpoint.path}: pass one start= to all of them"
        )


class Reading:
    """The steps of a root, for :class:`stepwell.CheckpointManager` to add saves to."""

    _root: str
    _read_only: bool
    _coordinator: coordinators.Coordinator | None
    #: The stall timeout in seconds.
    _stall: float
    _on_event: OnEvent | None
    _saves: list[Save]
    #: The last restore in the background, until another call has waited for it.
    _restoring: Restore[object] | None

    def _open(self) -> _core.Manager:
        raise NotImplementedError

    def _was_restored(self, step: int) -> None:
        """A step of this root was restored."""

    def _saving(self) -> list[int]:
        """Returns the steps that are being saved."""
        return [save.step for save in self._saves if not save.done()]

    # ---- restoring ----

    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        into: _T,
        best: Best | None = None,
        fallback: bool = False,
        return_report: Literal[False] = False,
        **options: Unpack[ResumeKeywords],
    ) -> _T: ...
    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        into: _T,
        best: Best | None = None,
        fallback: bool = False,
        return_report: Literal[True],
        **options: Unpack[ResumeKeywords],
    ) -> tuple[_T, RestoreReport]: ...
    @overload
    def restore(
        self,
        step: int | None = None,
        *,
        best: Best | None = None,
        fallback: bool = False,
        return_report: bool = False,
        **options: Unpack[ChoiceKeywords],
    ) -> Any: ...  # the stored structure, or that of like=
    @spelled_out
    def restore(
        self,
        step: int | None = None,
        *,
        best: Best | None = None,
        fallback: bool = False,
        **options: Unpack[RestoreKeywords],
    ) -> object:
        """Restores a step.

        ``like`` describes the result and is never changed. ``into`` is filled where possible, and
        returned with new values elsewhere. Without either, everything comes back as it is stored.
        All differences are reported at once, before anything is written. Unfilled memory is never
        returned. If several processes have opened the manager, all of them make this call. Each
        reads what it wants; with ``broadcast=``, one reads for all that want the same.

        Args:
            step: its number; ``None``: the newest committed one.
            best: the best step by a metric and a mode, such as ``("loss", "min")``. NaN never is
                the best.
            fallback: pass over a damaged newest step, and restore the newest step that can be
                restored. A warning and ``report.passed_over`` say which steps were passed over and
                why. Only the bytes that this restore reads are checked. To save newer steps
                afterwards, :meth:`rewind` to the restored step first.

        Raises:
            StepNotFound: the committed step does not exist.
            MismatchError: the wanted and the stored leaves do not match; nothing was written.
            CorruptCheckpoint: a stored block is damaged; ``overwritten`` lists the leaves of
                ``into`` that were already filled.
            RankFailed: another rank could not restore; ``overwritten`` as above.
            MisuseError: no library is initialised for the exchange of ``broadcast=``.
            CoordinatorError: an exchange failed, usually because another rank is gone.
        """
        core = self._open()
        number = self._best(best, step) if best is not None else given_step(step)
        return self._restore(core, number, flag(fallback, "fallback"), options).answer(options)

    @spelled_out
    def resume(
        self,
        state: _T,
        *,
        fallback: bool = False,
        start: Path | Start | None = None,
        **options: Unpack[ResumeKeywords],
    ) -> tuple[_T, int]:
        """Restores the newest committed step into ``state``, and returns the state and the number
        of the next step. Without a committed step it returns ``state`` as it is, and the number
        0::

            state, first = mgr.resume(state)
            for step in range(first, steps):
                ...

        It fills the state and raises as :meth:`restore` with ``into=state`` does. If several
        processes have opened the manager, all of them make this call.

        Args:
            fallback: as of :meth:`restore`. The newer steps that were passed over are moved into a
                branch, as by :meth:`rewind`, so that the run can save these steps again. A
                read-only manager leaves them where they are.
            start: a root or checkpoint, also of another library, or a :class:`stepwell.Start` with
                keywords of its own. It is restored if this root has no committed step. The run goes
                on after the step's number, or with step 0 if it has none.
        """
        for name in options:
            if name not in ResumeKeywords.__annotations__:
                RestoreOptions.of({name: None}, "resume")  # type: ignore[misc]  # raises for most
                raise MisuseError(f"resume() fills the state that it is given; {name}= goes with restore()")
        given = cast(RestoreKeywords, {**options, "into": state})
        if self.latest_step() is not None:
            restored = self._restore(self._open(), None, flag(fallback, "fallback"), given, resuming=True)
            state = cast(_T, restored.state)
            if fallback and not self._read_only:
                self._set_newer_aside(self.next_step() - 1)
            return state, self.next_step()
        if start is None:
            return state, 0
        one = Start.of(start)
        given = {**given, **one.options}
        restored, number = self._restore_one(self._open(), None, given, one.open)
        return cast(_T, restored.state), number + 1

    def _set_newer_aside(self, restored: int) -> None:
        """Moves the steps that a fallback passed over into a branch. All ranks make this call."""
        core = self._open()
        if core.latest_step() == restored:
            return
        branch, moved = core.rewind(restored, None)
        steps = ", ".join(map(str, moved))
        lifecycle.log(
            _WARNING,
            "stepwell.restore",
            f"moved {steps} of {self._root} into the branch {branch}: the run goes on from step {restored}",
        )

    @overload
    def restore_async(
        self,
        step: int | None = None,
        *,
        into: _T,
        best: Best | None = None,
        fallback: bool = False,
        return_report: Literal[False] = False,
        **options: Unpack[ResumeKeywords],
    ) -> Restore[_T]: ...
    @overload
    def restore_async(
        self,
        step: int | None = None,
        *,
        into: _T,
        best: Best | None = None,
        fallback: bool = False,
        return_report: Literal[True],
        **options: Unpack[ResumeKeywords],
    ) -> Restore[tuple[_T, RestoreReport]]: ...
    @overload
    def restore_async(
        self,
        step: int | None = None,
        *,
        best: Best | None = None,
        fallback: bool = False,
        return_report: bool = False,
        **options: Unpack[ChoiceKeywords],
    ) -> Restore[Any]: ...  # the stored structure, or that of like=
    @spelled_out
    def restore_async(
        self,
        step: int | None = None,
        *,
        best: Best | None = None,
        fallback: bool = False,
        **options: Unpack[RestoreKeywords],
    ) -> Restore[Any]:  # as the overloads say
        """Starts :meth:`restore` on another thread, and returns a future of its result
        (:class:`stepwell.results.Restore`): build or compile the model meanwhile. Nothing may use
        the arrays of ``into`` before ``result()`` has returned.

        Every other call of the manager waits for the restore. If it has failed and nobody has
        looked, that call raises its error. ``broadcast=`` is refused: it exchanges on the calling
        thread.

        Args:
            step: as of :meth:`restore`.
            best: as of :meth:`restore`.
            fallback: as of :meth:`restore`.
        """
        core = self._open()
        if RestoreOptions.of(options, "restore_async").broadcast:
            raise MisuseError("broadcast= exchanges on the thread that calls; use restore()")
        number = self._best(best, step) if best is not None else given_step(step)
        flagged = flag(fallback, "fallback")
        from ._background import Restore  # costs the import of concurrent.futures

        restoring = Restore(
            f"a restore of {self._root}",
            lambda: self._restore(core, number, flagged, options).answer(options),
        )
        self._restoring = restoring
        return restoring

    def _best(self, best: Best, step: int | None) -> int:
        """Resolves ``restore(best=)``."""
        if step is not None:
            raise MisuseError("pass a step or best=, not both")
        if not isinstance(best, (tuple, list)) or len(best) != 2:
            raise MisuseError(f'best= takes a metric and a mode, such as ("loss", "min"), not {shown(best)}')
        found = self.best_step(*best)
        if found is None:
            with self._explaining():
                raise StepNotFound(f"{self._root} has no committed step, so none is the best")
        return found

    @spelled_out
    def plan(self, step: int | None = None, **options: Unpack[RestoreKeywords]) -> RestorePlan:
        """Returns what :meth:`restore` with these keywords would read and do: bytes, blocks and
        files, by item and in total, and the treatment of each leaf. Reads no array and changes
        nothing. Raises the errors that ``restore`` would raise about the match.

        With several processes, each plans its own reads without asking the others. Leaves that it
        does not want itself are listed as left to them (``report.left_out``). ``restore`` raises if
        no process wants them.

        Args:
            step: its number; ``None``: the newest committed one."""
        return self._plan(self._open(), step, options)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Opens a step (``None``: the newest) for reading, under a lease."""
        return self._open_step(self._open(), None if step is None else step_number(step))

    def metadata(self, step: int | None = None) -> Metadata:
        """Returns facts about a step without reading an array."""
        with self.checkpoint(step) as checkpoint:
            found = checkpoint.metadata()
            stored = checkpoint._adopted_step or checkpoint._open()
            return replace(found, metrics=self._open().metrics_of(stored))

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of a step, those that came after the commit included."""
        return self._open().metrics(step_number(step))

    def add_metrics(self, step: int, metrics: Metrics) -> None:
        """Adds metrics to a committed step (an evaluator's); retention counts them."""
        self._open().add_metrics(step_number(step), real_numbers(metrics))

    # ---- the root ----

    def latest_step(self) -> int | None:
        """The newest committed step."""
        return self._open().latest_step()

    def all_steps(self) -> list[int]:
        """All committed steps, in order."""
        return self._open().all_steps()

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] | None = None) -> int | None:
        """Returns the best committed step by a metric (default: the one that retention ranks by).
        A step whose value is NaN never is the best. ``None`` without a step, or if no step has a
        number for the metric of retention yet.

        Raises:
            MisuseError: no step has a number for the given metric. The error lists the metrics of
                the steps.
        """
        if (metric is None) is not (mode is None):
            raise MisuseError(
                'best_step takes a metric and a mode, such as ("loss", "min"), or neither: then both are those of the retention'
            )
        if mode is not None:
            text(metric, "a metric")
            one_of(mode, "mode", ("min", "max"))
        return self._open().best_step(metric, mode)

    def next_step(self) -> int:
        """The step to go on with: the last restored or saved step + 1, else the latest + 1, else
        0."""
        return self._open().next_step()

    def inspect(self) -> list[StepInfo]:
        """Returns facts about every directory with a step's name, whole, damaged, or not a step, in
        order: see :class:`stepwell.results.StepInfo`."""
        return steps(self._open().report(), self._root)

    def quarantined(self) -> dict[str, str]:
        """Directories that have a step's name and are none, and why. They are never chosen and
        never deleted."""
        return dict(self._open().quarantined())

    def plan_retention(self) -> list[RetentionDecision]:
        """Returns the decisions of retention now, with reasons, in the order of the steps:
        :class:`stepwell.results.RetentionDecision`."""
        return decisions(self._open().plan_retention())

    @property
    def root_metadata(self) -> Any:  # the user's own JSON
        """The JSON that belongs to the root (``Options.root_metadata`` of its first writer), or
        ``None``."""
        text: str | None = self._open().root_metadata()
        return None if text is None else json.loads(text)

    def reload(self) -> None:
        """Reads the root again, to find what others have removed or added."""
        self._open().reload()

    @property
    def root(self) -> str:
        """The directory of the run."""
        return self._root

    # ---- how it is done ----

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says what is being saved, where a step was not found: that is the usual reason right
        after a save."""
        pending = self._saving()
        try:
            with explaining(self._root):
                yield
        except StepNotFound as error:
            if pending:
                steps = ", ".join(map(str, pending))
                error.args = (f"{error}; still being saved: {steps}: wait_until_finished() first",)
            raise

    def _open_step(self, core: _core.Manager, step: int | None) -> Checkpoint:
        """Opens a step (``None``: the newest) under a lease."""
        with self._explaining():
            return of_step(core.checkpoint(step))

    def _plan(self, core: _core.Manager, step: int | None, options: RestoreKeywords) -> RestorePlan:
        """Plans this rank's part of a restore, without asking the others."""
        checked = RestoreOptions.of(options, "plan").reading_alone()
        ranks = core.ranks()
        with as_rank(ranks), self._open_step(core, step) as checkpoint:
            others = None if ranks[1] == 1 else Unasked()
            return checkpoint._planned(checked, others)

    def _restore(
        self,
        core: _core.Manager,
        step: int | None,
        fallback: bool,
        options: RestoreKeywords,
        resuming: bool = False,
    ) -> Restored:
        """Restores a step (``None``: the newest; with ``fallback`` the newest that is intact)."""
        if not fallback:
            try:
                return self._restore_one(core, step, options)[0]
            except CorruptCheckpoint as failure:
                if step is None:
                    failure.args = (f"{failure}. fallback=True restores the newest step that is intact",)
                raise
        if step is not None:
            raise MisuseError("fallback= looks for the newest intact step: pass no step and no best= with it")
        alone = core.ranks()[1] == 1
        restored, passed = newest_intact(
            self._root,
            lambda one: self._restore_one(
                core, core.latest_step() if alone and one is None else one, options
            ),
            core.all_steps,
            lambda: damaged(core.report(), self._root),
            lambda mine: alone or Together(core).same(f"pass over: {mine}"),
            can_rewind=not resuming,
        )
        restored.report.passed_over = passed
        return restored

    def _restore_one(
        self,
        core: _core.Manager,
        number: int | None,
        options: RestoreKeywords,
        start: Callable[[], Checkpoint] | None = None,
    ) -> tuple[Restored, int]:
        """Restores one step, and returns its number too (-1 without one). ``start`` opens what is
        restored in its place."""
        alone = core.ranks()[1] == 1
        with telling_restore(self._on_event, self._root, number) as told:
            together = None if alone else Together(core)
            if together is not None and start is None:
                with self._explaining():
                    number = together.choose(number)
            try:
                checked = RestoreOptions.of(options)
                if checked.fill:
                    # It may be the state that is being captured.
                    lifecycle.wait_captured()
                if alone:
                    checked = replace(checked, broadcast=False)
                with self._open_step(core, number) if start is None else start() as checkpoint:
                    told.opened(checkpoint.step)
                    if start is not None and together is not None:
                        _check_same_start(checkpoint, together)
                    if together is None:
                        restored = checkpoint._restored(checked)
                    else:
                        restored = self._restored_by_all(core, checkpoint, checked, together)
                    if checkpoint._number is None:
                        return restored, -1
                    core.restored(checkpoint.step)
                    self._was_restored(checkpoint.step)
                    return restored, checkpoint.step
            except BaseException as failure:
                if isinstance(failure, StepwellError) and failure.step is None:
                    failure.step = told.step if number is None else number
                if together is not None:
                    together.fail(failure)
                raise

    def _restored_by_all(
        self, manager: _core.Manager, checkpoint: Checkpoint, options: RestoreOptions, together: Together
    ) -> Restored:
        """Restores this rank's part, in two steps: no rank writes anything before all match, and
        none continues if another could not read."""
        together.how = f"broadcast={options.broadcast!r}"
        with as_rank(manager.ranks()):
            exchange = None
            if options.broadcast:
                transport = transports.find(self._coordinator, self._stall)
                exchange = Exchange(checkpoint._open(), transport, together, options.broadcast == "gather")
            restored = checkpoint._restored(options, together, exchange)
            together.end()
            return restored
