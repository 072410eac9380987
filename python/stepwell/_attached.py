"""Updates of a state that is being captured: guards, and optimizers that wait in ``step()``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, final

from . import _adapters as adapters
from . import _core
from ._checks import one_of, shown
from .errors import MisuseError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .torch import TrainState


class _Hook(Protocol):
    """The handle of a hook of torch."""

    def remove(self) -> None: ...


@final
class Attached:
    """Optimizers that wait for captures."""

    def __init__(self, updates: Updates, optimizers: list[Optimizer], lazy_host: bool) -> None:
        self._updates = weakref.ref(updates)
        self._lazy_host = lazy_host
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._ids = {id(one) for one in optimizers}
        self._hooks: list[_Hook] = []

    def remove(self) -> None:
        """They no longer wait, but for what is being captured now: what they own is captured or
        fenced when :meth:`~stepwell.CheckpointManager.save` returns, from the next one on."""
        updates = self._updates()
        if updates is None or self not in updates.attached:
            return
        updates.fence()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        updates.attached.remove(self)
        updates.stepping -= self._ids


@final
class Updates:
    """The updates of the states that one manager saves."""

    def __init__(self, core: _core.Manager) -> None:
        self._core = core
        #: Optimizers whose parameters and state change only in guarded steps.
        self.attached: list[Attached] = []
        #: Attached optimizers that are in a step, by id.
        self.stepping: set[int] = set()
        #: Threads that are in a guard.
        self._guarded: set[int] = set()

    @property
    def is_running(self) -> bool:
        """True if what this thread saves now is about to change."""
        return bool(self.stepping) or threading.get_ident() in self._guarded

    def fence(self) -> None:
        """Has the current streams wait for what is still to be captured, and this thread for what
        they cannot wait for."""
        if not self._core.is_closed():
            devices = self._core.devices_in_flight()
            self._core.guard(adapters.streams(devices) if devices else {})

    @contextmanager
    def guard(self) -> Iterator[None]:
        """See :meth:`stepwell.CheckpointManager.update_guard`."""
        self.fence()
        here = threading.get_ident()
        outer = here not in self._guarded
        self._guarded.add(here)
        try:
            yield
        finally:
            if outer:
                self._guarded.discard(here)

    def attach(self, optimizer: Optimizer | TrainState, host: Literal["now", "lazy"]) -> Attached:
        """See :meth:`stepwell.CheckpointManager.attach`."""
        from .torch import optimizers_of

        one_of(host, "host", ("now", "lazy"))
        updates = weakref.ref(self)

        def hook(act: Callable[[Updates, int], None]) -> Callable[..., None]:
            def run(stepping: Optimizer, *_: object) -> None:
                held = updates()
                if held is not None:
                    act(held, id(stepping))

            return run

        def before(held: Updates, stepping: int) -> None:
            held.fence()
            held.stepping.add(stepping)

        optimizers = optimizers_of(optimizer)
        attached = Attached(self, optimizers, host == "lazy")
        try:
            for one in optimizers:
                attached._hooks.append(one.register_step_pre_hook(hook(before)))
                behind = hook(lambda held, stepping: held.stepping.discard(stepping))
                attached._hooks.append(one.register_step_post_hook(behind))
        except AttributeError as wrapped:
            raise MisuseError(
                f"attach() cannot wait for {shown(optimizer)}, which has no hooks of its own ({wrapped}); attach the optimizer that it wraps, or put update_guard() around its step()"
            ) from wrapped
        self.attached.append(attached)
        return attached

    def on_devices(self, devices: set[int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Returns the current streams of the CUDA devices of a state, and the memory there that
        attached optimizers own and that is captured later. Empty during an update."""
        attached = [] if self.is_running else [one for one in self.attached if devices or one._lazy_host]
        if not attached:
            return adapters.streams(devices) if devices else {}, []
        from ._adapters.torch import addresses

        owned = [(owner(), one._lazy_host) for one in attached for owner in one._optimizers]
        places = [place for owner, host in owned if owner is not None for place in addresses(owner, host)]
        return adapters.streams(devices), places
