"""Steps as they come, for an evaluator (``sw.watch``).

A listing reads manifests only, and that of a mirror (``rsync``, ``cp -r``) may be there before the
files that it lists. So a step is given only when it opens and all its files have their lengths;
what is not whole yet is passed over, said once, and looked at again at every later listing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator

from . import _core
from . import _lifecycle as lifecycle
from ._checkpoint import Checkpoint
from ._locations import is_directory
from ._options import reader_json
from ._timeouts import NO_DEADLINE
from .errors import CorruptCheckpoint, FormatError, StepGone, StepNotFound

#: The level of a warning in ``logging``, which is imported only where something is said.
_WARNING = 30


def watch(
    root: str,
    open_step: Callable[[str, int], Checkpoint],
    after: int | None,
    limit: float | None,
    pause: float | None,
    which: str,
) -> Iterator[Checkpoint]:
    """See ``stepwell.watch``; the arguments are checked. ``limit`` and ``pause`` are seconds."""
    lifecycle.notifier.start()  # for what the engine has to say
    steps = _Steps(root, open_step, after)
    quiet_since = time.monotonic()
    try:
        while True:
            given = False
            for checkpoint in steps.newest() if which == "latest" else steps.all():
                with checkpoint:
                    yield checkpoint
                quiet_since = time.monotonic()
                given = True
            if given:
                continue  # others may have come meanwhile
            left = NO_DEADLINE if limit is None else quiet_since + limit - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(3600.0 if pause is None else pause, left))
    finally:
        steps.close()


class _Steps:
    """The steps of a root that were not given yet."""

    def __init__(self, root: str, open_step: Callable[[str, int], Checkpoint], after: int | None) -> None:
        self._root = root
        #: Remembers the manifests that it has read: a look costs one ``stat`` per step.
        self._reader: _core.Manager | None = None
        self._open_step = open_step
        self._after = after
        #: The steps that the caller has seen before: never yielded, also after a rewind.
        self._first = after
        #: The attempts of the steps that were given, or were too old to be.
        self._seen: dict[int, tuple[str, int]] = {}
        #: The last of them; after a rewind, the newest that still stands.
        self._last: int | None = None
        #: Of those that were given: the highest number, and when the newest was committed.
        self._highest = -1
        self._newest_commit = -1
        #: Steps up to ``_after`` that were not whole when their turn came.
        self._passed_over: set[int] = set()
        #: Steps that were said not to be whole.
        self._told: set[int] = set()

    def newest(self) -> Iterator[Checkpoint]:
        """The newest step that is whole, if it is newer than the last one."""
        for step in reversed(self._listed()):
            checkpoint = self._open(step)
            if checkpoint is None:
                continue
            self._after = step
            if self._is_old(step, checkpoint):
                self._note(step, checkpoint)
                checkpoint.close()
            else:
                yield self._give(step, checkpoint)
            return

    def all(self) -> Iterator[Checkpoint]:
        """Every step that is whole, in order; those that have become so since they were passed over
        too."""
        listed = self._listed(self._passed_over)
        self._passed_over.intersection_update(listed)
        for step in listed:
            checkpoint = self._open(step)
            self._after = step if self._after is None else max(step, self._after)
            if checkpoint is None:
                continue
            self._passed_over.discard(step)
            yield self._give(step, checkpoint)

    def _listed(self, too: Container[int] = ()) -> list[int]:
        steps = self._there()
        if self._was_rewound(steps):
            same = [step for step, attempt in self._seen.items() if self._attempt(step) == attempt]
            self._after = max([*same, *([] if self._first is None else [self._first])], default=None)
            self._last = max(same, default=None)
        return [step for step in steps if self._after is None or step > self._after or step in too]

    def _there(self) -> list[int]:
        """Returns all steps of the root, also of one that is created or recreated meanwhile."""
        if self._reader is None:
            if not is_directory(self._root):
                return []
            self._reader = _core.Manager(self._root, reader_json())
        try:
            steps = self._reader.all_steps()
        except BaseException:
            self.close()
            raise
        if not steps:
            self.close()
        return steps

    def close(self) -> None:
        """Ends looking."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close(None)

    def _was_rewound(self, listed: list[int]) -> bool:
        """True if the numbers from the last step on are those of other steps now, or will be."""
        if self._last is None or not listed:
            return False
        attempt = self._seen[self._last]
        return max(listed) < self._last or (self._last in listed and self._attempt(self._last) != attempt)

    def _attempt(self, step: int) -> tuple[str, int] | None:
        """The save that a step is of. It differs after a rewind or a replacement."""
        return None if self._reader is None else self._reader.attempt(step)

    def _is_old(self, step: int, checkpoint: Checkpoint) -> bool:
        """True if it is what is left of the steps before a rewind (or a deletion): older than what
        was given, and no attempt of its own."""
        committed = checkpoint.manifest["committed_unix_ns"]
        return step <= self._highest and committed <= self._newest_commit

    def _note(self, step: int, checkpoint: Checkpoint) -> None:
        self._seen[step] = checkpoint._attempt()
        self._last = step

    def _give(self, step: int, checkpoint: Checkpoint) -> Checkpoint:
        self._note(step, checkpoint)
        self._highest = max(self._highest, step)
        self._newest_commit = max(self._newest_commit, checkpoint.manifest["committed_unix_ns"])
        return checkpoint

    def _open(self, step: int) -> Checkpoint | None:
        """The step, leased, if it is whole."""
        try:
            checkpoint = self._open_step(self._root, step)
        except (StepGone, StepNotFound):
            return None  # retired between the listing and the lease
        except (CorruptCheckpoint, FormatError) as error:
            self._pass_over(step, str(error))
            return None
        try:
            damage = checkpoint._open().damage()
        except BaseException:
            checkpoint.close()
            raise
        if damage is None:
            return checkpoint
        checkpoint.close()
        self._pass_over(step, damage)
        return None

    def _pass_over(self, step: int, damage: str) -> None:
        self._passed_over.add(step)
        if step not in self._told:
            self._told.add(step)
            lifecycle.log(
                _WARNING,
                "stepwell",
                f"watching {self._root}: step {step} is not whole and passed over until it is: {damage}",
            )
