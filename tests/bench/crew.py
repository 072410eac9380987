"""Ranks as real processes. A :class:`Crew` is a process that imports what its ranks need once
(torch takes six seconds of a core) and forks them for every operation.

A rank runs a function of the crew's module: it gets ready, waits in :meth:`Rank.together` for all
others, and then does what is timed with :func:`timed`. Meanwhile the bench does what has to be done
when everybody is ready and nobody has begun, such as dropping the page cache."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from measure import disk_bytes, measured
from workloads import State

#: A slower operation has failed.
DEADLINE = 300.0
_DIE_WITH_PARENT = 1


class CrewFailed(Exception):
    """A rank raised, ended or hung: what it said."""


@dataclass
class Done:
    """The measurement of one rank. ``begin`` and ``end`` are comparable between processes."""

    begin: float
    end: float
    cpu: float
    #: How far its memory rose above where it was, what it returned included.
    extra_peak: int
    #: From and to the disk: what the kernel counts for this process.
    read: int
    written: int
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rank:
    """The arguments of a rank's function."""

    number: int
    world: int
    #: The state of the bench, shared with it: not to be changed.
    state: State
    _pipe: Connection

    def together(self) -> None:
        """Returns when all ranks have called it and the bench says so."""
        self._pipe.send(("ready", None))
        self._pipe.recv()


def timed(call: Callable[[], Any]) -> tuple[Done, Any]:
    """A call, measured, and what it returned."""
    before = disk_bytes()
    begin = time.perf_counter()
    timing = measured(call)
    end = begin + timing.seconds
    read, written = (now - then for now, then in zip(disk_bytes(), before, strict=True))
    return Done(begin, end, timing.cpu, timing.extra_peak, read, written), timing.result


def twice(
    rank: Rank, restore: Callable[[], Any], check: Callable[[Any], None] | None = None, result: int = 0
) -> list[Done]:
    """Two restores, all ranks together at the beginning of each: the bench sees to it that the
    first one is from the disk, and the second one from the page cache. ``check`` looks at what the
    first one returned, whose own new memory is ``result`` bytes."""
    done = []
    for again in (False, True):
        rank.together()
        one, found = timed(restore)
        one.extra_peak -= result
        done.append(one)
        if check is not None and not again:
            check(found)
        # Free it before the next one is made.
        del found
    return done


def wall(done: list[Done]) -> float:
    """From the first rank's beginning to the last one's end."""
    return max(one.end for one in done) - min(one.begin for one in done)


class Crew:
    """A process that forks ranks. Made before this one has threads."""

    def __init__(self, module: str, state: State, environment: dict[str, str] | None = None) -> None:
        self.module = module
        self._pipe, theirs = Pipe()
        self._child = os.fork()
        if self._child == 0:
            _end_with_parent()
            os.environ.update(environment or {})
            self._pipe.close()
            _as_child(lambda: _serve(theirs, import_module(module), state))
        theirs.close()

    def run(
        self, function: str, world: int, *arguments: Any, before_go: Callable[[], Any] = lambda: None
    ) -> list[Any]:
        """Returns the result of each rank's function. Calls ``before_go`` when all ranks are ready.

        Raises:
            CrewFailed: a rank has failed.
        """
        self._pipe.send((function, world, arguments))
        while True:
            try:
                what, answer = self._pipe.recv()
            except EOFError:
                raise CrewFailed(f"{self.module}: the process has ended") from None
            if what == "ready":
                before_go()
                self._pipe.send("go")
            elif what == "done":
                return answer
            else:
                raise CrewFailed(f"{self.module}.{function}: {answer}")

    def end(self) -> None:
        # Closing it would not do: other crews have inherited this end.
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        os.waitpid(self._child, 0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _as_child(work: Callable[[], None]) -> None:
    """The whole life of a forked process."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(bench: Connection, module: Any, state: State) -> None:
    while (wanted := bench.recv()) is not None:
        function, world, arguments = wanted
        bench.send(_forked(bench, getattr(module, function), world, arguments, state))


def _forked(
    bench: Connection, function: Callable[..., Any], world: int, arguments: tuple[Any, ...], state: State
) -> tuple[str, Any]:
    """Forks ranks, and carries messages until all have ended."""
    pipes: list[Connection] = []
    children: list[int] = []
    try:
        for number in range(world):
            ours, theirs = Pipe()
            child = os.fork()
            if child == 0:
                _end_with_parent()
                rank = Rank(number, world, state, theirs)
                _as_child(lambda rank=rank, pipe=theirs: _tell(pipe, function, rank, arguments))
            theirs.close()
            pipes.append(ours)
            children.append(child)
        while True:
            messages = _messages(pipes)
            for number, (what, answer) in messages.items():
                if what == "failed":
                    return "failed", f"rank {number}: {answer}"
            if all(what == "done" for what, _ in messages.values()):
                return "done", [messages[number][1] for number in range(world)]
            bench.send(("ready", None))
            bench.recv()
            for pipe in pipes:
                pipe.send("go")
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            # Those that have said what they had to say are ending; a rank that waits for one that
            # failed is not.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _tell(pipe: Connection, function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("done", function(rank, *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _messages(pipes: list[Connection]) -> dict[int, tuple[str, Any]]:
    """The next one of every rank; or what there is, once one has failed."""
    found: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + DEADLINE
    while len(found) < len(pipes):
        waiting = {pipe: number for number, pipe in enumerate(pipes) if number not in found}
        ready = wait(list(waiting), deadline - time.monotonic())
        for pipe in ready:
            try:
                found[waiting[pipe]] = pipe.recv()
            except EOFError:
                found[waiting[pipe]] = ("failed", "ended without a word")
        if not ready:
            found.update({number: ("failed", f"silent for {DEADLINE:.0f} s") for number in waiting.values()})
        if any(what == "failed" for what, _ in found.values()):
            break
    return found
