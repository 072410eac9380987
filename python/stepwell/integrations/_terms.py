"""Errors in the terms of other libraries. Messages of stepwell name its own keywords. A user of a
trainer cannot pass these, and is told what to do there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from ..errors import StepwellError

_AS_AT_THE_SAVE = (
    "build the model, the optimizer and the scheduler as they were at the save; sw.restore reads parts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The remedies of another library, by the reason of an error. ``None``: stepwell's keyword can
    be passed there too, so the message stays."""

    #: A wanted leaf is not stored.
    missing: str | None = _AS_AT_THE_SAVE
    #: The stored and the wanted leaves differ otherwise.
    mismatch: str | None = _AS_AT_THE_SAVE
    #: A value differs between ranks.
    differs: str | None = "Give all ranks the same value"
    #: Each rank has a value of its own, and their number has changed.
    per_rank: str | None = "Resume with as many processes as have saved"
    #: The newest step is damaged.
    damaged: str | None = "Load an older checkpoint"
    #: The step or the checkpoint exists.
    exists: str | None = "Resume from it, or save to another directory"
    #: Another process writes there.
    locked: str | None = "End that process, or save to another directory"
    #: The file system has no locks.
    lockless: str | None = "Save to another file system"
    #: Too little memory for the copy of a state.
    memory: str | None = "Free memory on this machine"
    #: A buffer was donated before it was copied.
    donated: str | None = "Do not donate it before the save has ended"
    #: Several processes, and nothing that carries their messages.
    coordinator: str | None = "before the training"


#: By the reason: stepwell's advice.
_ADVICE = {
    "missing": (r"rename the stored leaves, leave these out of what is wanted, or keep [^\n]*",),
    "mismatch": (
        r"add them to what is wanted, leave them out with exclude=[^\n]*",
        r"want the stored shape, or allow the difference with resize=[^\n]*",
        r"want the stored dtype, or allow the loss with cast=[^\n]*",
    ),
    "differs": (
        r"Pass it as sw\.PerRank\(…\) if it differs on purpose, or as sw\.Replicated\(…\) [^(\n]*\([^)\n]*\)",
    ),
    "per_rank": (r"Pass PerRank\(…, resize=fn\), where [^\n]*leave it out \(\.\.\.\)",),
    "damaged": (r"fallback=True restores the newest step that is intact",),
    "exists": (
        r'Pass exists="replace" to write it again, or (?:another path|exists="skip" to keep it \(a manager\'s save\))',
        r'exists="skip" keeps it',
    ),
    "locked": (r"Close it, or pass read_only=True to only read",),
    "lockless": (
        r"Pass Options\(take_over=True\) to take the root over: this manager becomes the writer once no other one has sent a heartbeat for a while",
    ),
    "memory": (r"Pass a smaller staging_bytes= to the manager",),
    "donated": (r'Save it before the call that donates it, or pass snapshot="eager"',),
    "coordinator": (r"first, pass coordinator=sw\.[^\n]*",),
}
_PATTERNS = {reason: re.compile("|".join(some)) for reason, some in _ADVICE.items()}
assert _PATTERNS.keys() == {one.name for one in fields(Terms)}


def reworded(failure: BaseException, terms: Terms) -> None:
    """Has an error name what can be done by these terms."""
    if not isinstance(failure, StepwellError):
        return
    text = str(failure)
    for reason, pattern in _PATTERNS.items():
        remedy: str | None = getattr(terms, reason)
        if remedy is not None:
            text = pattern.sub(lambda _, remedy=remedy: remedy, text)  # type: ignore[misc]
    failure.args = (text, *failure.args[1:])


#: Those of trainers that make the state and its saves by themselves.
TRAINER = Terms()


@contextmanager
def in_terms(terms: Terms = TRAINER) -> Iterator[None]:
    """Has errors of the block name what can be done by these terms."""
    try:
        yield
    except StepwellError as failure:
        reworded(failure, terms)
        raise
