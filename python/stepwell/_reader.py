"""Restores of the steps of a root, by one process or by all of them together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._checkpoint import Checkpoint
from ._distributed import transports
from ._distributed.agreement import Together, Unasked
from ._distributed.exchange import Exchange
from ._locations import explaining
from ._restore import plan
from ._restore import restore as restoring
from ._restore.fallback import newest_intact
from ._restore.options import RestoreKeywords, RestoreOptions
from ._restore.plan import RestorePlan
from ._state.specs import current_rank
from .errors import CorruptCheckpoint, MisuseError, StepNotFound, StepwellError
from .events import OnEvent, telling_restore


@final
class Reader:
    """Opens and restores the steps of one root.

    Args:
        core: the engine's manager.
        root: the root, for messages.
        coordinator: the coordinator of the ranks, if there is one.
        stall: the stall timeout in seconds.
        on_event: see :mod:`stepwell.events`.
        pending: returns the steps that are being saved.
    """

    def __init__(
        self,
        core: _core.Manager,
        root: str,
        coordinator: coordinators.Coordinator | None,
        stall: float,
        on_event: OnEvent | None,
        pending: Callable[[], list[int]],
    ) -> None:
        self._core = core
        self._root = root
        self._coordinator = coordinator
        self._stall = stall
        self._on_event = on_event
        self._pending = pending

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Says what is being saved, where a step was not found: that is the usual reason right
        after a save."""
        pending = self._pending()
        try:
            with explaining(self._root):
                yield
        except StepNotFound as error:
            if pending:
                steps = ", ".join(map(str, pending))
                error.args = (f"{error}; still being saved: {steps}: wait_until_finished() first",)
            raise

    def open(self, step: int | None) -> Checkpoint:
        """Opens a step (``None``: the newest) under a lease."""
        with self.explaining():
            return Checkpoint(self._core.checkpoint(step))

    def plan(self, step: int | None, options: RestoreKeywords) -> RestorePlan:
        """Plans this rank's part of a restore, without asking the others."""
        checked = RestoreOptions.of(options, "plan").reading_alone()
        ranks = self._core.ranks()
        token = current_rank.set(ranks)
        try:
            with self.open(step) as checkpoint:
                others = None if ranks[1] == 1 else Unasked()
                return plan.plan(checkpoint._open(), checked, checkpoint.manifest["items"], others)
        finally:
            current_rank.reset(token)

    def restore(self, step: int | None, fallback: bool, options: RestoreKeywords) -> Any:
        """Restores a step (``None``: the newest; with ``fallback`` the newest that is intact)."""
        if not fallback:
            try:
                return self._restore(step, options)[0]
            except CorruptCheckpoint as failure:
                if step is None:
                    failure.args = (f"{failure}. fallback=True restores the newest step that is intact",)
                raise
        if step is not None:
            raise MisuseError("fallback= looks for the newest intact step: pass no step and no best= with it")
        core, alone = self._core, self._core.ranks()[1] == 1
        answer, passed = newest_intact(
            self._root,
            lambda one: self._restore(core.latest_step() if alone and one is None else one, options),
            core.all_steps,
            lambda: json.loads(core.report()),
            lambda mine: alone or Together(core).same(f"pass over: {mine}"),
        )
        if options.get("return_report"):
            answer[1].passed_over = passed
        return answer

    def _restore(self, number: int | None, options: RestoreKeywords) -> tuple[object, int]:
        """Restores one step, and returns its number too."""
        alone = self._core.ranks()[1] == 1
        with telling_restore(self._on_event, self._root, number) as told:
            together = None if alone else Together(self._core)
            if together is not None:
                with self.explaining():
                    number = together.choose(number)
            try:
                checked = RestoreOptions.of(options)
                if checked.fill:
                    # It may be the state that is being captured.
                    lifecycle.wait_captured()
                if alone:
                    checked = replace(checked, broadcast=False)
                with self.open(number) as checkpoint:
                    told.opened(checkpoint.step)
                    if together is None:
                        answer = restoring.run(checkpoint._open(), checked)
                    else:
                        answer = self._restored_by_all(checkpoint._open(), checked, together)
                    self._core.restored(checkpoint.step)
                    return answer, checkpoint.step
            except BaseException as failure:
                if isinstance(failure, StepwellError) and failure.step is None:
                    failure.step = told.step if number is None else number
                if together is not None:
                    together.fail(failure)
                raise

    def _restored_by_all(self, core: _core.Checkpoint, options: RestoreOptions, together: Together) -> object:
        """Restores this rank's part, in two steps: no rank writes anything before all match, and
        none continues if another could not read."""
        together.how = f"broadcast={options.broadcast!r}"
        token = current_rank.set(self._core.ranks())
        try:
            exchange = None
            if options.broadcast:
                transport = transports.find(self._coordinator, self._stall)
                exchange = Exchange(core, transport, together, options.broadcast == "gather")
            answer = restoring.run(core, options, together, exchange)
            together.end()
        finally:
            current_rank.reset(token)
        return answer
