"""Steps over time: :class:`CheckpointManager`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, final, get_args

from . import _adapters as adapters
from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._attached import Attached, Updates
from ._checkpoint import Checkpoint
from ._checks import (
    MANAGER_WORDS,
    SAVE_WORDS,
    flag,
    instance,
    metadata_json,
    one_of,
    other_words,
    real_numbers,
    shown,
    step_number,
    text,
    whole,
)
from ._choice import Unsupported, copied_part, log_dropped, saved_choice
from ._ending import Ending, end_earlier
from ._holds import Hold, Rewound
from ._locations import Location, Path, check_root, explaining, is_store, location
from ._opening import check_not_foreign
from ._options import Options, StepName, to_json
from ._policies import SavePolicy, as_policy
from ._preemption import Preemption
from ._public import public
from ._reading import Reading
from ._restore import template
from ._restore.options import Globs
from ._retention import Retention, as_retention
from ._save_costs import SaveCosts
from ._save_result import Save, TierWaits
from ._state.specs import as_rank
from ._state.stateful import is_callable_state
from ._store import StoreUrl
from ._timeouts import finite_seconds, seconds, stall_seconds
from ._types import Metrics
from .errors import ClosedError, MisuseError
from .events import OnEvent, tell_save

if TYPE_CHECKING:
    from types import TracebackType

    from torch.optim import Optimizer

    from ._exports import Export
    from ._tiers import Tier, Tiers, TierStatus
    from ._trace.tracer import Tracer
    from .torch import TrainState

Exists = Literal["error", "skip", "replace"]
_EXISTS = get_args(Exists)
#: The most steps that are traced after a save. Each is a file beside the step.
MAX_TRACED_STEPS = 1000


def _end_session(manager: object, error: Exception) -> None:
    """Ends the session of several ranks: a call that all ranks make failed on this one before they
    exchanged anything."""
    if isinstance(manager, CheckpointManager) and manager._core is not None:
        manager._core.end_session(f"{type(error).__name__}: {error}")


def _checked(exports: Sequence[Export], root: str, read_only: object) -> Sequence[Export]:
    """Returns the exports of a manager, which has none if it is read-only."""
    if not exports:
        return ()
    from ._exports import checked

    if read_only is True:
        raise MisuseError("exports= is for the manager that saves, and read_only=True. Leave one out")
    return checked(exports, root)


def _placed(
    root: Location | None, retention: Retention | int | None, tiers: Sequence[Tier]
) -> tuple[str, Retention | int | None, Tiers | None]:
    """Returns the root that saves go to, its retention, and the tiers if there are several."""
    if isinstance(tiers, (str, bytes)) or not isinstance(tiers, Sequence):
        raise MisuseError(f"tiers= is a list of sw.Tier(…), not {shown(tiers)}")
    if not tiers:
        if root is None:
            raise MisuseError("a manager needs a root, or tiers=")
        return location(root, "the root"), retention, None
    if root is not None or retention is not None:
        given = "root" if root is not None else "retention="
        raise MisuseError(
            f"with tiers=, each Tier has a location and a retention= of its own; leave {given} out"
        )
    from ._tiers import Tiers

    found = Tiers(tiers)
    return found.roots[0], found.all[0].retention, found


@public
@final
class CheckpointManager(Reading):
    """The checkpoints of one run: saves steps without stalling training, never shows one that is
    not whole, restores any of them.

    Defaults: every call of :meth:`save` saves, nothing is deleted. As a context manager it closes
    at the end of the block, which waits for pending saves.

    Args:
        root: the directory of the run. Created if it is missing, unless ``Options(create=False)``.
        save_policy: which calls of :meth:`save` write: ``100`` (every 100 steps), or
            :func:`every_steps` and the like.
        retention: which steps stay: ``3`` (the latest three), or :func:`keep_latest` and the like.
        step_name: the names of step directories; default: the root's, else ``step_00000000``.
        staging_bytes: the memory that saves pass through, in bytes. ``"auto"``: the size of the
            state, at most a quarter of the free memory.
        max_pending: how many saves may wait beside the one that is being written. One more
            :meth:`save` waits for the oldest.
        coordinator: how the processes of a job agree, if several of them use the manager:
            :class:`~stepwell.coordinators.SharedDirectory`,
            :class:`~stepwell.coordinators.TorchStore`, :class:`~stepwell.coordinators.JaxService`,
            :class:`~stepwell.coordinators.MPI`. ``"auto"``: torch's or JAX's, if it is initialised.
            ``None``: this process alone uses the manager, although it is one of several.
            A read-only manager needs none.
        read_only: write nothing. :meth:`save` then does nothing, and logs a warning.
        on_save_error: ``"raise"``: the next call raises the error of a background save, and the
            process ends with an error if nobody looked. ``"warn"``: the error is logged.
        on_event: a function, or :class:`stepwell.events.JsonLines`, called with a
            :class:`~stepwell.events.SaveEvent`, :class:`~stepwell.events.RestoreEvent` or
            :class:`~stepwell.events.ExportEvent` for each that has finished, and with a
            :class:`~stepwell.events.TraceEvent` for each step that is compared.
        prove_resume: after each save, trace so many steps: those of the next calls of :meth:`save`
            (also where the policy refuses) and :meth:`trace`. A run that restores the step compares
            its own steps with them.
        on_resume_difference: ``"warn"``: a step that differs is a warning
            (:class:`~stepwell.errors.ResumeDiffers`). ``"raise"``: it raises.
        exports: exports of committed steps for other libraries, in the background.
        tiers: several places for the steps, in place of a root: a fast one that saves go to, and
            slower, safer ones that get copies (:class:`stepwell.Tier`).
        options: rarely needed options.

    Raises:
        LockedError: another live process writes to this root.
        StorageError: the root cannot be created or opened.
        MisuseError: an argument is invalid; or this is one of several processes, and no coordinator
            is initialised.
        CoordinationTimeout: not all processes have arrived.
    """

    @other_words("CheckpointManager", MANAGER_WORDS)
    def __init__(
        self,
        root: Location | None = None,
        *,
        save_policy: SavePolicy | int | None = None,
        retention: Retention | int | None = None,
        step_name: StepName | None = None,
        staging_bytes: int | Literal["auto"] = "auto",
        max_pending: int = 1,
        coordinator: coordinators.Coordinator | Literal["auto"] | None = "auto",
        read_only: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        on_event: OnEvent | None = None,
        prove_resume: int = 0,
        on_resume_difference: Literal["warn", "raise"] = "warn",
        exports: Sequence[Export] = (),
        tiers: Sequence[Tier] = (),
        options: Options | None = None,
    ) -> None:
        self._core: _core.Manager | None = None
        self._owner = lifecycle.Owner("manager")
        self._lock = threading.RLock()
        self._saves = []
        self._costs = SaveCosts(self._saves)
        self._tracer: Tracer | None = None
        #: Paths of the leaves that a warning has named.
        self._dropped: set[str] = set()
        #: The engine's part of each :class:`Hold`, without which it would end with the object that
        #: :meth:`hold` returned.
        self._held: set[_core.Held] = set()
        self._restoring = None
        self._policy = as_policy(save_policy)
        options = Options() if options is None else instance(options, Options, "options", "sw.Options(…)")
        if step_name is not None:
            instance(step_name, StepName, "step_name", "sw.StepName(…)")
        root, retention, self._tiers = _placed(root, retention, tiers)
        rules = as_retention(retention)
        self._coordinator = coordinators.find(coordinator, read_only is True)
        if on_event is not None and not callable(on_event):
            raise MisuseError(f"on_event is a function of one event, not {shown(on_event)}")
        self._on_event = on_event
        self._stall = stall_seconds(options.stall_timeout)
        if self._policy.signals and threading.current_thread() is not threading.main_thread():
            raise MisuseError(
                "on_preemption() listens to signals: make the manager on the main thread, or pass signals=()"
            )
        self._root = root
        self._read_only = flag(read_only, "read_only")
        self._told_read_only = False
        traced_steps = whole(prove_resume, "prove_resume", 0, MAX_TRACED_STEPS)
        one_of(on_resume_difference, "on_resume_difference", ("warn", "raise"))
        if not is_store(self._root):
            check_root(self._root)
            if not self._read_only:
                check_not_foreign(self._root)
        exports = _checked(exports, self._root, read_only)
        spread = self._tiers is not None and self._tiers.per_machine
        if spread and self._read_only:
            raise MisuseError(
                f"per_machine=True is for the processes that save: {self._root} has one machine's part of each step. With read_only=True, open another tier"
            )
        if exports and spread:
            raise MisuseError(
                f"exports= read whole steps from {self._root}, and each machine has a part of them there. Export from another tier, with `stepwell export`"
            )
        text = to_json(
            options,
            self._policy,
            rules,
            step_name,
            staging_bytes,
            max_pending,
            read_only,
            on_save_error,
            0 if self._tiers is None else self._tiers.machine_copies,
        )
        further = [] if self._tiers is None else self._tiers.further(options, step_name, self._read_only)
        lifecycle.notifier.start()  # for log lines of the engine
        ranks, service = coordinators.connected(self._coordinator)
        if not self._read_only:
            end_earlier(self._root)
        try:
            with explaining(self._root):
                self._core = core = _core.Manager(self._root, text, ranks, further)
        except BaseException:
            if service is not None:
                service.close()
            raise
        self._updates = Updates(core)
        self._ending = Ending(core, self._root, self._owner, self._stall, service)
        lifecycle.watch(self._ending)
        # From here on somebody closes it, whatever its user does.
        weakref.finalize(self, self._ending.abandoned).atexit = False
        if traced_steps:
            from ._trace.tracer import Tracer

            self._ending.tracer = self._tracer = Tracer(
                self._root, core, traced_steps, on_resume_difference, on_event, not self._read_only
            )
        if exports:
            from ._exporter import Exporter

            self._ending.exporter = Exporter(self._root, core, exports, on_event)
        self._ending.preemption = Preemption(self._policy.signals, weakref.WeakMethod(self._preempt))

    # ---- saving ----

    @other_words("save", SAVE_WORDS, _end_session)
    def save(
        self,
        step: int,
        state: object,
        *,
        metrics: Metrics | None = None,
        custom_metadata: object = None,
        include: Globs = None,
        exclude: Globs = None,
        cast: object = None,
        unsupported: Unsupported = "refuse",
        force: bool = False,
        exists: Exists = "error",
        snapshot: Literal["auto", "lazy", "eager"] = "auto",
    ) -> Save:
        """Saves ``state`` as ``step`` if the policy says so (``force``: in any case), and returns
        when the state may be changed again (what an attached optimizer owns: by its ``step()``).

        Errors of the state raise here, by leaf path, and leave nothing behind. The result raises
        later errors.

        Args:
            step: its number, 0 or more, and not below the newest one.
            state: the state, or a callable that returns it and runs only if the policy says yes.
            metrics: real numbers by name, for retention.
            custom_metadata: JSON that belongs to the step.
            include: leaves of the state to save, by glob over rendered paths, as on a restore;
                default: all. A list is saved whole or not at all.
            exclude: leaves to leave out, though ``include`` has them. They may be of any type.
            cast: the stored dtype of floating-point arrays: ``"bfloat16"`` for all of them, or
                ``{glob: dtype}``. Arrays without dimensions keep theirs. Arrays are cast piece by
                piece as they are copied, so no second copy is made. Only arrays in host memory.
            unsupported: what to do with a leaf that cannot be stored, such as a function.
                ``"refuse"``: raise :class:`UnsupportedLeaf`. ``"drop"``: leave it out. A warning
                names it, and so do the event and ``metadata(step).unsupported``. An element of a
                list takes the list along. Or a function of path and value that returns what is
                stored in its place.
            force: skip the policy (and nothing else).
            exists: for an existing step: ``"error"``, ``"skip"`` (returns the pending save of that
                step, if any) or ``"replace"`` (the new one is written first).
            snapshot: when arrays are copied. ``"auto"``: before this returns, with two exceptions.
                Immutable arrays (JAX) are held and copied later. Arrays on CUDA devices are copied
                later too: the ``step()`` of an attached optimizer (:meth:`attach`) waits for its
                own, and your next work on the device waits for the rest. ``"lazy"``: all are copied
                later; change them only inside :meth:`update_guard` or after
                ``save.wait_captured()``. ``"eager"``: all are copied before this returns, so a
                donated array needs no second buffer.

        Returns:
            A future of the save. It is falsy and has a ``reason`` if the policy refused, and always
            for a manager with ``read_only=True``.

        Raises:
            UnsupportedLeaf: a value of the state cannot be stored.
            StepExists: the step exists.
            StepOrder: the step is below the newest one.
            DonatedBuffer: a JAX array was donated before it was captured.
            SaveFailed: an earlier save failed, and nobody had asked. This save was not started; the
                next one is.
        """
        core = self._open()
        begun = time.perf_counter()
        step = self._common_step(step)
        alone = core.ranks()[1] == 1
        with self._lock, self._costs.call(step):
            failure: BaseException | None = None
            answers: dict[str, bool] = {}
            try:
                # First of all: it is a call that all make.
                answers = self._answers(step)
                one_of(exists, "exists", _EXISTS)
                one_of(snapshot, "snapshot", ("auto", "lazy", "eager"))
                force = flag(force, "force")
                numbers = real_numbers(metrics)
                metadata = metadata_json(custom_metadata)
                choice = saved_choice(include, exclude, cast, unsupported)
            except BaseException as error:
                if alone:
                    raise
                # The others make this call all the same.
                failure, force = error, force is True
                exists = exists if isinstance(exists, str) and exists in _EXISTS else "error"
            ticket = core.decide(step, force, exists, answers)
            try:
                if failure is not None:
                    # The others may have begun this save all the same.
                    raise failure
                if isinstance(ticket, _core.Ticket) and is_callable_state(state):
                    state = state()
                    # It may have taken long, and saved something itself.
                    if alone:
                        ticket = core.decide(step, True, exists, answers)
                if isinstance(ticket, str):
                    self._tell_read_only()
                    if self._tracer is not None and not is_callable_state(state):
                        self._tracer.announce(step, state, choice, None)
                    return Save(step, None, ticket)
                if isinstance(ticket, _core.SaveHandle):
                    # It shares the result of the pending save: its waiter returns when the step is
                    # durable.
                    return Save(step, ticket, tiers=self._waiting())
                if snapshot == "lazy" and self._updates.is_running:
                    snapshot = "auto"
                with as_rank(core.ranks()):
                    handle = ticket.save(
                        adapters.as_saved(state),
                        choice,
                        numbers,
                        metadata,
                        snapshot,
                        self._updates.on_devices,
                        lifecycle.notifier.events,
                    )
            except BaseException as error:
                if isinstance(ticket, _core.Ticket):
                    # The other ranks may have begun this save, and wait for this one.
                    ticket.fail(f"{type(error).__name__}: {error}")
                    if self._ending.exporter is not None:
                        self._ending.exporter.add_failed(step)
                raise
            save = Save(step, handle, tiers=self._waiting())
            self._saves[:] = [*(one for one in self._saves if not one.done()), save]
            self._costs.saved(begun)
            log_dropped(self._root, [one for one in handle.unsupported if one[0] not in self._dropped])
            self._dropped.update(path for path, _ in handle.unsupported)
        if self._ending.exporter is not None:
            self._ending.exporter.add(save)
        if self._on_event is not None:
            tell_save(self._on_event, self._root, save, time.perf_counter() - begun, self._costs)
        if self._tracer is not None:
            self._tracer.announce(step, state, choice, save)
        return save

    def trace(
        self,
        step: int,
        state: object,
        *,
        include: Globs = None,
        exclude: Globs = None,
        unsupported: Unsupported = "refuse",
    ) -> None:
        """Announces the state of a step that is not saved. With ``prove_resume=``, its digests are
        written beside the last saved step, or compared with those of an earlier run. Without, or
        when enough steps are traced, it does nothing. A trace that fails is logged.

        Args:
            step: its number. Call it where :meth:`save` is called, after the step.
            state: the state of :meth:`save`.
            include: as of :meth:`save`.
            exclude: as of :meth:`save`.
            unsupported: as of :meth:`save`.

        Raises:
            ResumeDiffers: the step differs, and ``on_resume_difference="raise"``.
        """
        self._open()
        number, choice = step_number(step), saved_choice(include, exclude, None, unsupported)
        if self._tracer is not None:
            self._tracer.announce(number, state, choice, None)

    def _was_restored(self, step: int) -> None:
        if self._tracer is not None:
            self._tracer.restored(step)

    def _tell_read_only(self) -> None:
        """Says once that this manager saves nothing: a training that goes on like that would not be
        missed before it is needed."""
        if self._read_only and not self._told_read_only:
            self._told_read_only = True
            lifecycle.log(
                30,
                "stepwell",
                f"this manager of {self._root} was opened with read_only=True: save() writes nothing, and what it returns is falsy",
            )

    def check(
        self,
        state: object,
        *,
        include: Globs = None,
        exclude: Globs = None,
        cast: object = None,
        unsupported: Unsupported = "refuse",
    ) -> None:
        """Raises what :meth:`save` with these keywords would raise about ``state``, without saving
        or copying it: for the start of a run.

        Args:
            state: the state of :meth:`save`.
            include: as of :meth:`save`.
            exclude: as of :meth:`save`.
            cast: as of :meth:`save`.
            unsupported: as of :meth:`save`.
        """
        core = self._open()
        choice = saved_choice(include, exclude, cast, unsupported)
        state = state() if is_callable_state(state) else state
        with as_rank(core.ranks()):
            core.check(adapters.as_saved(state), choice, lifecycle.notifier.events)

    def should_save(self, step: int) -> bool:
        """True if :meth:`save` would save that step."""
        core = self._open()
        number = self._common_step(step)
        try:
            answers = self._answers(number)
        except BaseException:
            if core.ranks()[1] > 1:
                core.should_save(number, {})  # as the others do
            raise
        return bool(core.should_save(number, answers))

    def reached_preemption(self, step: int) -> bool:
        """True if this job is to be preempted, so that the loop should leave: a signal came before
        the policy was asked about ``step``, which is saved then."""
        core = self._open()
        return bool(core.reached_preemption(self._common_step(step)))

    def _preempt(self) -> bool:
        """Announces a preemption to the engine. Returns false if the manager is closed."""
        if self._core is None:
            return False
        self._core.request_preemption()
        return True

    def update_guard(self) -> AbstractContextManager[None]:
        """Guards an update of the state: it waits for pending captures (of an attached optimizer,
        or ``snapshot="lazy"``). On a CUDA device the current stream waits. This thread waits only
        for host memory, and for copies that could not start because the staging ring is full.
        Without pending captures it costs nothing. A save inside the guard is copied or fenced when
        ``save`` returns, because the update may follow it.

        Raises:
            StalledError: no progress for ``Options.stall_timeout``.
            DeviceError: the device reports an error.
            MisuseError: the current stream captures a CUDA graph (put the guard around its replay).
        """
        return self._updates.guard()

    def attach(self, optimizer: Optimizer | TrainState, *, host: Literal["now", "lazy"] = "now") -> Attached:
        """Makes a torch optimizer (or those of a :class:`stepwell.torch.TrainState`) wait before
        each ``step()`` for pending captures, as :meth:`update_guard` does. From then on, its
        parameters and state on CUDA devices are captured during the next forward and backward pass,
        so nothing but its steps may change them. Returns an object whose
        :meth:`stepwell.results.Attached.remove` ends this. Optimizers that step inside
        ``backward()`` are refused. A replayed CUDA graph runs no hooks, and needs
        :meth:`update_guard` around it.

        Args:
            optimizer: the optimizer, or a TrainState for all of its optimizers. For a wrapper, pass
                the optimizer inside it, whose ``step()`` must be its class's.
            host: when state in host memory (such as offloaded state) is captured. ``"now"``: before
                ``save`` returns. ``"lazy"``: later, as on devices; ``step()`` waits for it on the
                host.
        """
        self._open()
        return self._updates.attach(optimizer, host)

    def _common_step(self, step: object) -> int:
        """Returns the step of a call that all ranks make. A wrong number ends the session: the
        other ranks wait in their call."""
        try:
            return step_number(step)
        except MisuseError as error:
            _end_session(self, error)
            raise

    def _answers(self, step: int) -> dict[str, bool]:
        """Returns the answers of the policy's callables on the first process, which count for
        all."""
        if not self._policy._predicates:
            return {}
        core = self._open()
        latest = core.latest_step()  # which all processes ask for
        return self._policy.answers(step, latest, self._costs) if core.ranks()[0] == 0 else {}

    def _waiting(self) -> TierWaits | None:
        """What a save needs to wait for its tiers."""
        return None if self._tiers is None else TierWaits(self._tiers, self._open())

    # ---- steps ----

    def pending(self) -> list[Save]:
        """Saves that are not over."""
        self._open()
        return [save for save in self._saves if not save.done()]

    def rewind(self, step: int, branch: str | None = None) -> Rewound:
        """Goes back to ``step``: newer steps are moved to a kept branch (``.branch-<name>.…``),
        whose name is drawn where none is given. Returns those steps, newest first, and the branch's
        name: :class:`stepwell.results.Rewound`."""
        branch = None if branch is None else text(branch, "the name of a branch")
        core = self._open()
        number = self._common_step(step)
        if self._tracer is not None:
            # A branch takes along the traces that its steps have by now.
            self._tracer.wait(self._stall)
        name, moved = core.rewind(number, branch)
        if self._tracer is not None:
            self._tracer.rewound(number)
        return Rewound(moved, name if moved else None)

    def add(
        self,
        checkpoint: Checkpoint,
        *,
        include: Globs = None,
        exclude: Globs = None,
        metrics: Metrics | None = None,
        compress: bool | Globs = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Copies an open checkpoint into this root, byte for byte, as the step that it is. The copy
        is verified and durable before it gets its name.

        Args:
            checkpoint: an open checkpoint of stepwell, or a step that was adopted.
            include: items to copy, as of :meth:`Checkpoint.copy`.
            exclude: items to leave out.
            metrics: metrics that were added later, as of :meth:`Checkpoint.copy`.
            compress: tensors to compress, as of :meth:`Checkpoint.copy`.
            progress: as of :meth:`Checkpoint.verify`.

        Raises:
            StepExists: the root has that step. :meth:`delete` it first.
        """
        instance(checkpoint, Checkpoint, "checkpoint", "sw.open(…)")
        core = self._open()
        part = copied_part(include, exclude, metrics, compress)
        if checkpoint.adopted is None:
            core.add(checkpoint._of_ours(), part, progress)
        else:
            name = core.free_name(checkpoint.step)
            root = self._root
            place = root.below(name) if isinstance(root, StoreUrl) else os.path.join(root, name)
            checkpoint._copy(place, part, progress)

    def adopt(
        self,
        path: Path,
        step: int | None = None,
        *,
        from_step: int | str | None = None,
        metrics: Metrics | None = None,
        custom_metadata: object = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Makes a checkpoint of another library a step of this root, and returns its number.
        Nothing is copied: the step names the path of the files. If they have no checksums, this
        call writes them first, as :func:`stepwell.adopt` does. All functions read such a step as
        any other. When it is retired or deleted, the files stay as they are.

        The step keeps a path relative to the root if the files are in the root's parent directory.
        Then both can be moved together. The number may be below the newest step, so the history of
        a run can be adopted later.

        Args:
            path: a checkpoint of another library, a step's path in a root of one, or the root.
            step: the number in this root; default: the number in the other one.
            from_step: the number or the name of a step in the other root; default: its newest
                complete one.
            metrics: real numbers by name, for retention.
            custom_metadata: JSON that belongs to the step.
            progress: as in :meth:`Checkpoint.verify`, while checksums are computed.

        Raises:
            StepExists: this root has that step.
            StepNotFound: there is no checkpoint of another library.
            CorruptCheckpoint: it is damaged or incomplete, or changes meanwhile.
            MisuseError: it is a checkpoint of stepwell, it has no number, or this manager has
                several processes.
        """
        from ._adopt import adopt_step

        number = None if step is None else step_number(step)
        numbers, metadata = real_numbers(metrics), metadata_json(custom_metadata)
        return adopt_step(self._open(), self._root, path, number, from_step, numbers, metadata, progress)

    def delete(self, step: int) -> None:
        """Deletes a step, also the newest or the only one: who names a step means it. (Retention
        never takes the newest; :meth:`rewind` sets steps aside and keeps them.) Raises
        :class:`LockedError` as long as somebody holds or reads it."""
        core = self._open()
        core.delete(self._common_step(step))

    def delete_branch(self, branch: str) -> list[str]:
        """Deletes the steps that a rewind moved to ``branch``. Returns the names that they had."""
        return list(self._open().delete_branch(text(branch, "the name of a branch")))

    def hold(self, step: int) -> Hold:
        """Keeps a step from being removed, replaced or rewound, from this call on: for the length
        of a ``with`` block, or until :meth:`Hold.close <stepwell.results.Hold.close>`; at the
        latest until the manager is closed.

        Raises:
            StepNotFound: there is no such committed step.
        """
        number = step_number(step)
        return Hold(number, self._open().hold(number), self._held)

    def apply_retention(self) -> list[int]:
        """Applies retention now, as after each commit. Returns the steps that were deleted: their
        names are gone, and their files go until :meth:`close` returns."""
        return list(self._open().apply_retention())

    def prepare(self, like: object) -> int:
        """Makes the staging memory that a state like this needs, so that the first save does not
        pay for it. Returns the bytes of its arrays. ``like`` is a state, or has an
        :class:`ArraySpec` (of shape and dtype) in place of arrays that are not there yet."""
        flat = _core.flatten(template.as_state(like))
        self._open().prepare(flat.nbytes, list(flat.devices()))
        return flat.nbytes

    # ---- ending ----

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Waits until no save is pending; raises a failure that nobody has seen."""
        self._open().wait_until_finished(seconds(timeout))

    def wait_for_exports(self, timeout: float | None = None) -> None:
        """Waits until no export of a committed step is pending. Failures of exports are logged and
        given to ``on_event``.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
        """
        self._open()
        limit = seconds(timeout)
        if self._ending.exporter is not None:
            self._ending.wait_for_exports(self._ending.exporter.wait, limit)

    def tiers(self) -> list[TierStatus]:
        """Returns the state of each tier, nearest first: its steps, and what is on its way there
        (:class:`stepwell.results.TierStatus`). Empty without ``tiers=``."""
        core = self._open()
        return [] if self._tiers is None else self._tiers.status(core)

    def wait_until_carried(self, timeout: float | None = None) -> None:
        """Waits until no step is on its way to a tier. Call it on rank 0.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
            StalledError: without a timeout: nothing has arrived for ``Options.stall_timeout``.
        """
        core, limit = self._open(), seconds(timeout)
        if self._tiers is not None and not _core.wait_until_carried(core, limit):
            raise TimeoutError(
                f"waited {limit:.1f} s for the tiers of {self._root}; their steps are still on the way"
            )

    def carry_within(self, time_left: float) -> list[TierStatus]:
        """Makes the best of the time before this machine is taken away: commits pending saves, then
        carries the newest step to every tier, also to one whose ``every=`` leaves it out. Returns
        the states of the tiers, at the latest after ``time_left`` seconds.

        The carriers make no pauses, and ``bytes_per_second`` does not limit them. Older steps that
        are due are passed over. If the newest step does not fit into the time, and one that is on
        its way has fewer bytes left, that one is carried instead. Call it on rank 0, after the
        last save.
        """
        core, limit = self._open(), finite_seconds(time_left, "time_left")
        _core.carry_within(core, limit)
        return self.tiers()

    def check_for_errors(self) -> None:
        """Raises a failure of a background save that nobody has seen."""
        self._open().check_for_errors()

    def close(self, timeout: float | None = None) -> None:
        """Commits what is pending, gives everything back, and raises a failure that nobody has
        seen. Closing twice is fine. After a ``TimeoutError`` or an interrupt it goes on: call it
        again to wait on, or leave that to the end of the process."""
        self._owner.check()
        limit = seconds(timeout)
        if self._core is None:
            return
        if self._restoring is not None:
            self._restoring.wait(limit)
        try:
            self._ending.close(limit)
        finally:
            if self._ending.is_over():
                self._core = None
                for held in list(self._held):
                    held.close()
                self._held.clear()
        self._settle()

    def _open(self) -> _core.Manager:
        self._owner.check()
        if self._core is None:
            raise ClosedError(f"this manager of {self._root} is closed; make a new one")
        self._settle()
        return self._core

    def _settle(self) -> None:
        """Waits for a restore in the background."""
        if self._restoring is not None:
            self._restoring.settle()
            self._restoring = None

    def __enter__(self) -> CheckpointManager:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        ends_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not ends_well and self._core is not None:
            # Other processes may never come to their close.
            self._core.leave_at_once()
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # The block's own exception goes on; what it hides is not lost.
            error.add_note(
                f"and closing the manager of {self._root} raised {type(failure).__name__}: {failure}"
            )

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._root}{', closed' if self._core is None else ''}>"
