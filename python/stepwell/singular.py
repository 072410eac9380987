"""One checkpoint at one path: ``sw.save``, ``sw.restore``, ``sw.open`` and what looks into roots from outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from . import _core, lifecycle
from .ahead import expected
from .checkpoint import Checkpoint, Metadata, VerifyReport
from .errors import MisuseError, StalledError, StepGone, StepNotFound
from .manager import _check_target, _is_callable_state, _step, real_numbers
from .options import Options, plain_json, to_json
from .policies import every_steps
from .restore import Globs
from .retention import keep_all
from .save import Save
from .timeouts import NO_DEADLINE, seconds, stall_seconds

Path = str | os.PathLike[str]


def _absolute(path: Path) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


class _Background:
    """A singular save in the background: committed at exit at the latest, and its failure told there if nowhere else."""

    def __init__(self, handle: Any, path: str, stall: float) -> None:
        self.what = f"the save to {path}"
        self._handle = handle
        self._owner = lifecycle.Owner("save")
        self._stall = stall

    def at_exit(self) -> BaseException | None:
        """Waits with a bound; see ``lifecycle.Ending``."""
        if not self._owner.is_here:
            return None
        try:
            lifecycle.wait_patiently(
                self._over, self._handle.progress, self._stall, f"{self.what} to end at exit"
            )
        except StalledError as stalled:
            return stalled
        failure: BaseException | None = self._handle.unseen_failure(peek=True)
        return failure

    def _over(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._handle.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True


def keep(handle: Any, path: str, stall: float | None = None) -> Save:
    """The future of a save that was begun, which the exit hook knows of. The bindings call this too, for a save whose caller was interrupted."""
    background = _Background(handle, path, Options().stall_timeout if stall is None else stall)
    lifecycle.watch(background)
    save = Save(0, handle)

    def over(_: Save) -> None:
        if handle.unseen_failure(peek=True) is None:
            lifecycle.forget(background)

    save.add_done_callback(over)
    return save


def save_async(
    path: Path,
    state: Any,
    *,
    metrics: Mapping[str, Any] | None = None,
    custom_metadata: Any = None,
    exists: Literal["error", "replace"] = "error",
    options: Options | None = None,
) -> Save:
    """Saves ``state`` as a checkpoint at ``path``, and returns when the state may be changed again; the future says when it is committed."""
    if exists not in ("error", "replace"):
        raise MisuseError(f'exists is "error" or "replace", not {exists!r}')
    numbers = real_numbers(metrics)
    metadata = json.dumps(plain_json(custom_metadata, "custom_metadata"))
    where = _absolute(path)
    flat = _core.flatten(state() if _is_callable_state(state) else state)
    options = options or Options()
    text = to_json(options, every_steps(1), keep_all(), None, "auto", 1, False, "raise")
    handle = _core.save_path(where, flat, numbers, metadata, exists, text, lifecycle.notifier.events)
    return keep(handle, where, stall_seconds(options.stall_timeout))


def save(
    path: Path,
    state: Any,
    *,
    metrics: Mapping[str, Any] | None = None,
    custom_metadata: Any = None,
    exists: Literal["error", "replace"] = "error",
    options: Options | None = None,
) -> None:
    """Saves ``state`` as a checkpoint at ``path``; it survives a power cut when this returns."""
    save_async(
        path, state, metrics=metrics, custom_metadata=custom_metadata, exists=exists, options=options
    ).result()


def open(path: Path, step: int | None = None, *, engine: str = "auto") -> Checkpoint:
    """Opens a checkpoint for reading: a singular one, a step's directory, or the newest step (or ``step``) of a root."""
    return _open(path, step, engine, False)


def _open(path: Path, step: int | None, engine: str, ahead: bool | list[str]) -> Checkpoint:
    lifecycle.notifier.start()  # for what the engine has to say
    number = None if step is None else _step(step)
    return Checkpoint(_core.open_path(_absolute(path), number, engine, ahead))


def restore(
    path: Path,
    *,
    step: int | None = None,
    like: Any = None,
    into: Any = None,
    include: Globs = None,
    exclude: Globs = None,
    rename: Any = None,
    missing: Any = "error",
    unexpected: Any = "error",
    cast: Any = "lossless",
    resize: Any = None,
    shardings: Any = None,
    to: Literal["numpy"] | None = None,
    broadcast: bool = False,
    return_report: bool = False,
) -> Any:
    """Restores the checkpoint at ``path`` (a root: its newest step); see ``CheckpointManager.restore``."""
    _check_target(shardings, to, broadcast)
    ahead = expected(like, into, not (include is exclude is rename is None))
    with _open(path, step, "auto", ahead) as checkpoint:
        return checkpoint.restore(
            like=like,
            into=into,
            include=include,
            exclude=exclude,
            rename=rename,
            missing=missing,
            unexpected=unexpected,
            cast=cast,
            resize=resize,
            return_report=return_report,
        )


def metadata(path: Path, step: int | None = None) -> Metadata:
    """What is known of the checkpoint at ``path`` without reading an array."""
    with open(path, step) as checkpoint:
        return checkpoint.metadata()


def verify(
    path: Path, step: int | None = None, *, progress: Callable[[int, int], Any] | None = None
) -> VerifyReport:
    """Reads the whole checkpoint at ``path`` and compares every checksum."""
    with open(path, step) as checkpoint:
        return checkpoint.verify(progress)


def add_metrics(root: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Adds metrics to a committed step of a root: an evaluator's, from another process than the trainer's."""
    _core.add_metrics(_absolute(root), _step(step), real_numbers(metrics))


def engine_info(path: Path | None = None) -> dict[str, Any]:
    """Which engine serves ``path`` (default: the working directory), why, and versions."""
    import platform

    import ml_dtypes
    import numpy as np

    engine, direct, alignment, registered, reasons = _core.engine_choice(
        _absolute("." if path is None else path)
    )
    return {
        "engine": engine,
        "direct": direct,
        "alignment": alignment,
        "registered": registered,
        "reasons": reasons,
        "stepwell": _core.VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "kernel": platform.release(),
    }


def watch(
    root: Path,
    *,
    after: int | None = None,
    timeout: float | None = None,
    which: Literal["latest", "all"] = "latest",
    interval: float = 0.5,
) -> Iterator[Checkpoint]:
    """Yields committed steps newer than ``after``, leased, as they come: for an evaluator. ``which="latest"`` skips to the newest; ``"all"`` gives every
    one that is still there. Ends when nothing new has come for ``timeout`` seconds. Each is closed when the next is asked for."""
    if which not in ("latest", "all"):
        raise MisuseError(f'which is "latest" or "all", not {which!r}')
    limit, pause = seconds(timeout), seconds(interval, "interval")
    lifecycle.notifier.start()  # for what the engine has to say
    where = _absolute(root)
    seen = after
    quiet_since = time.monotonic()
    while True:
        steps = [step for step in _core.list_steps(where) if seen is None or step > seen]
        for step in steps[-1:] if which == "latest" else steps:
            try:
                checkpoint = open(where, step)
            except (StepGone, StepNotFound):
                continue  # retired between the listing and the lease
            seen = step
            with checkpoint:
                yield checkpoint
            quiet_since = time.monotonic()
        if steps:
            continue
        left = NO_DEADLINE if limit is None else quiet_since + limit - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(3600.0 if pause is None else pause, left))
