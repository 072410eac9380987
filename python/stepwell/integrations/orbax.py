"""The ``CheckpointManager`` of Orbax (v0), with checkpoints of stepwell.

    from stepwell.integrations import orbax as ocp

    mngr = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=3))
    mngr.save(step, args=ocp.args.StandardSave(state))
    state = mngr.restore(mngr.latest_step(), args=ocp.args.StandardRestore(state))

The directory ``stepwell`` in it is the root of our steps. Steps that Orbax has written to the
directory are listed and restored too, and never deleted. Neither Orbax nor JAX is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, cast

from .. import _policies as policies
from .. import _retention as rules
from .._checks import instance, shown
from .._locations import GUEST, absolute
from .._manager import CheckpointManager as Manager
from .._opening import open as open_checkpoint
from .._restore.options import ChoiceKeywords
from .._roots import RootStep, open_root
from ..errors import MisuseError, StepNotFound
from ._terms import Terms, in_terms

if TYPE_CHECKING:
    from types import TracebackType

#: The metric of a step that has the value of ``best_fn``.
_BEST = "best_fn"
#: The caller makes the state, and has ``read_only=``.
_TERMS = Terms(
    missing="leave these out of the target of the restore",
    mismatch="give the target what is stored, or leave args= out",
    differs=None,
    per_rank=None,
    exists="Call delete() of that step first",
    locked=None,
)


def _refuse(call: str, given: Mapping[str, object]) -> None:
    """Raises if there are arguments that only Orbax has."""
    for name, value in given.items():
        raise MisuseError(f"{call} does not take {name}={shown(value)}: leave it out, or stay with Orbax")


class _Args:
    """An item that is saved, or the target of a restore."""

    def __init__(self, item: object = None, **others: object) -> None:
        _refuse(f"args.{type(self).__name__}", others)
        self.item = item


class StandardSave(_Args):
    """Saves a state of any kind."""


class StandardRestore(_Args):
    """Restores into a tree of arrays, or of their shapes, dtypes and shardings. Without one,
    arrays come back as they are stored."""


class PyTreeSave(StandardSave):
    """The same as :class:`StandardSave`."""


class PyTreeRestore(StandardRestore):
    """The same as :class:`StandardRestore`."""


class JsonSave(StandardSave):
    """Saves values of JSON."""


class JsonRestore(StandardRestore):
    """Restores values of JSON."""


class Composite(dict[str, object]):
    """Items by name, also as attributes."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no item {name}: there are {sorted(self)}") from None


#: The classes of ``ocp.args``.
args = SimpleNamespace(
    **{
        kind.__name__: kind
        for kind in (
            StandardSave,
            StandardRestore,
            PyTreeSave,
            PyTreeRestore,
            JsonSave,
            JsonRestore,
            Composite,
        )
    }
)


class CheckpointManagerOptions:
    """The options of a manager that have the same meaning here. Others are refused by name.

    Args:
        save_interval_steps: every so many steps are saved, and the first one.
        max_to_keep: how many of the newest steps stay, or of the best ones with ``best_fn``. The
            newest step always stays.
        keep_time_interval: steps that are so far apart stay.
        keep_period: steps that are divisible by it stay.
        best_fn: a function of a step's metrics that returns a number.
        best_mode: ``"max"`` or ``"min"``.
        save_on_steps: these steps are saved too.
        should_save_fn: decides alone, from the step and the newest step.
        create: create the directory.
        read_only: save and delete nothing.
        enable_async_checkpointing: ``False``: ``save`` returns when the step is durable.
    """

    def __init__(
        self,
        save_interval_steps: int = 1,
        max_to_keep: int | None = None,
        keep_time_interval: timedelta | None = None,
        keep_period: int | None = None,
        best_fn: Callable[[Mapping[str, float]], float] | None = None,
        best_mode: Literal["max", "min"] = "max",
        save_on_steps: Iterable[int] | None = None,
        should_save_fn: Callable[[int, int | None], bool] | None = None,
        create: bool = True,
        read_only: bool = False,
        enable_async_checkpointing: bool = True,
        **others: object,
    ) -> None:
        _refuse("CheckpointManagerOptions", others)
        self.best_fn, self.best_mode = best_fn, best_mode
        self.create, self.read_only = create, read_only
        self.enable_async_checkpointing = enable_async_checkpointing
        self.policy = policies.every_steps(save_interval_steps)
        if save_on_steps is not None:
            self.policy |= policies.at_steps(save_on_steps)
        if should_save_fn is not None:
            self.policy = policies.when(should_save_fn)
        self.retention = rules.keep_all()
        if max_to_keep is not None:
            self.retention = rules.keep_latest(max_to_keep)
            if best_fn is not None:
                self.retention = rules.keep_best(max_to_keep, _BEST, best_mode)
            if keep_period is not None:
                self.retention |= rules.keep_every(keep_period)
            if keep_time_interval is not None:
                self.retention |= rules.keep_every(seconds=keep_time_interval.total_seconds())


class CheckpointManager:
    """The calls of Orbax's manager. All processes make them, as with Orbax.

    Args:
        directory: the directory of the run.
        options: options that stepwell has too.
        item_names: is not needed: a save names its items.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        options: CheckpointManagerOptions | None = None,
        item_names: Iterable[str] | None = None,
        **others: object,
    ) -> None:
        _refuse("CheckpointManager", others)
        self._options = options = (
            CheckpointManagerOptions()
            if options is None
            else instance(
                options, CheckpointManagerOptions, "options", "stepwell's CheckpointManagerOptions(…)"
            )
        )
        self.directory = absolute(directory)
        if not options.create and not os.path.isdir(self.directory):
            raise StepNotFound(f"{self.directory} does not exist, and create=False")
        self._old: dict[int, RootStep] = {}
        with in_terms(_TERMS):
            self._mgr = Manager(
                os.path.join(self.directory, GUEST),
                save_policy=options.policy,
                retention=options.retention,
                read_only=options.read_only,
            )
        self.reload()

    # ---- saves

    def save(
        self,
        step: int,
        *,
        args: object = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        custom_metadata: object = None,
        **others: object,
    ) -> bool:
        """Begins a save if the options say so, or with ``force``. Returns true if it did."""
        _refuse("save", others)
        if not force and not self.should_save(step):
            return False
        options, numbers = self._options, dict(metrics or {})
        if options.best_fn is not None:
            if metrics is None:
                raise MisuseError(f"save({step}) needs metrics=, because the options have best_fn")
            numbers[_BEST] = options.best_fn(metrics)
        state: object
        if isinstance(args, Composite):
            state = {name: _saved(one) for name, one in args.items()}
        else:
            state = _saved(args)
        with in_terms(_TERMS):
            save = self._mgr.save(
                step,
                state,
                metrics=numbers,
                force=True,
                custom_metadata=custom_metadata,
            )
            if save and not options.enable_async_checkpointing:
                save.result()
        return bool(save)

    def should_save(self, step: int) -> bool:
        """True if ``save`` would save that step: it is newer than all others, and due."""
        newest = max([*self.all_steps(), *(one.step for one in self._mgr.pending())], default=-1)
        return newest < step and self._mgr.should_save(step)

    def wait_until_finished(self) -> None:
        """Waits until no save is pending, and raises a failure."""
        with in_terms(_TERMS):
            self._mgr.wait_until_finished()

    def is_saving_in_progress(self) -> bool:
        """True while a save is pending."""
        return bool(self._mgr.pending())

    def check_for_errors(self) -> None:
        """Raises the failure of a save that nobody has seen."""
        with in_terms(_TERMS):
            self._mgr.check_for_errors()

    def delete(self, step: int) -> None:
        """Deletes a step. A step that Orbax has written is refused."""
        if step in self._old:
            raise MisuseError(f"Orbax has written step {step}: delete {self._old[step].path} yourself")
        self._mgr.delete(step)

    # ---- restores

    def restore(self, step: int | None = None, *, args: object = None, **others: object) -> object:
        """Restores a step; ``None``: the newest. With ``Composite``, the items that it names.
        Without arguments, everything as it is stored: several items are a dict."""
        _refuse("restore", others)
        step = self.latest_step() if step is None else step
        if step is None:
            raise StepNotFound(f"no steps in {self.directory}")
        if args is None:
            return self._read(step, {})
        if not isinstance(args, Composite):
            target = _target(args)
            return self._read(step, {} if target is None else {"like": target})
        found = Composite()
        for name, one in args.items():
            chosen: ChoiceKeywords = {"include": name}
            if (target := _target(one)) is not None:
                chosen["like"] = {name: target}
            found[name] = self._read(step, chosen)[name]
        return found

    def _read(self, step: int, options: ChoiceKeywords) -> dict[str, object]:
        if step not in self._old:
            with in_terms(_TERMS):
                return cast("dict[str, object]", self._mgr.restore(step, **options))
        path = self._old[step].path
        single = os.path.join(path, "default")
        if "like" in options:  # Orbax stores an empty node as None
            options["unexpected"] = "ignore"
        with in_terms(_TERMS), open_checkpoint(single if os.path.isdir(single) else path) as checkpoint:
            return cast("dict[str, object]", checkpoint.restore(**options))

    # ---- steps

    def latest_step(self) -> int | None:
        """Returns the newest committed step."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Returns the committed steps, and those of Orbax, in order."""
        return sorted({*self._mgr.all_steps(), *self._old})

    def best_step(self) -> int | None:
        """Returns the best step by ``best_fn``; without it the newest one. Steps of Orbax do not
        take part."""
        if self._options.best_fn is None:
            return self.latest_step()
        return self._mgr.best_step(_BEST, self._options.best_mode)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step. Steps of Orbax have none here."""
        if step in self._old:
            return {}
        found = dict(self._mgr.metrics(step))
        found.pop(_BEST, None)
        return found

    def reload(self) -> None:
        """Reads the directory again."""
        self._mgr.reload()
        try:
            found = open_root(self.directory).steps
        except (StepNotFound, MisuseError):
            found = ()
        self._old = {one.number: one for one in found if one.number is not None and one.incomplete is None}

    def close(self) -> None:
        """Waits for pending saves, and raises a failure."""
        with in_terms(_TERMS):
            self._mgr.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mgr.__exit__(kind, error, trace)


def _saved(given: object) -> object:
    return instance(given, StandardSave, "args", "args.StandardSave(…)").item


def _target(given: object) -> object:
    return None if given is None else instance(given, StandardRestore, "args", "args.StandardRestore(…)").item
