"""State providers: leaves in several pieces of memory. A :class:`StateProvider` lists them as
:class:`Chunk`."""

from ._state.providers import Chunk, StateProvider

__all__ = ["Chunk", "StateProvider"]

for _class in (Chunk, StateProvider):
    _class.__module__ = __name__
