"""The messages between the ranks of one restore, over the board of their manager: the same calls in
the same order on all of them. A rank that fails reports that in place of its next call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .. import _core
from ..errors import MisuseError, StalledError, StepwellError


class Together:
    """The ranks of one restore."""

    def __init__(self, manager: _core.Manager) -> None:
        self._manager = manager
        #: Settings that must be equal on all ranks, beside the wanted leaves.
        self.how = ""
        self._has_said = False
        #: True if a call has raised: on all ranks, then, and nobody waits for a word of this one.
        self._is_over = False

    def choose(self, step: int | None) -> int:
        """The step that is restored."""
        with self._asking():
            chosen: int = self._manager.choose(step)
        return chosen

    def exchange_over(self, name: str) -> None:
        """Sets the transport of the exchange, which must be the same on all ranks: two kinds of
        collectives would not meet."""
        self.how += f" over {name}"

    def unexpected(self, leaves: list[int]) -> list[int]:
        """Takes the stored leaves that this rank does not want, by number and in order. Returns
        those that no rank wants. All ranks make this call before they read an array."""
        self._has_said = True
        with self._asking():
            found: list[int] | None = self._manager.wanted_by_none(self.how, leaves)
        if found is None:
            raise MisuseError(
                f"not all ranks have called restore() with {self.how}, as this one has; pass the same on all of them"
            )
        return found

    def settle(self) -> None:
        """Makes that call, where there was nothing to say."""
        if not self._has_said:
            self.unexpected([])

    def same(self, what: str) -> bool:
        """True if all ranks say the same."""
        with self._asking():
            return bool(self._manager.alike(what))

    def agree(self) -> None:
        """Returns where all ranks have come as far; raises :class:`~stepwell.RankFailed` where one
        has failed."""
        with self._asking():
            self._manager.agree("restore")

    def end(self) -> None:
        """The last such call: nobody waits for a word of this rank afterwards."""
        self.agree()
        self._is_over = True

    def fail(self, failure: BaseException) -> None:
        """This rank ends with that error, and the others with it: they hear of it in their next
        call."""
        if not self._is_over:
            with suppress(Exception):  # the others' word for it; this rank has its own
                self._manager.agree("restore", f"{type(failure).__name__}: {failure}")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            self._is_over = True
            if not isinstance(failure, StepwellError) or isinstance(failure, StalledError):
                # No answer: an interrupt, which the others do not know of.
                self._manager.leave_restore(f"{type(failure).__name__}: {failure}")
            raise


class Unasked:
    """In place of the others, for a rank that looks by itself at what they would restore together:
    nobody knows here what they want, and any leaf that this one does not may be theirs."""

    def unexpected(self, leaves: list[int]) -> list[int]:
        """See :meth:`Together.unexpected`."""
        return []

    def settle(self) -> None:
        """See :meth:`Together.settle`."""
