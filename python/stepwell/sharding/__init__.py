"""Which part of a tensor a process has: single descriptions (:class:`LocalShard`,
:class:`FlatShard`, :class:`Segments`), and rules for a whole model (:class:`RankMesh`,
:class:`Rules`)."""

from .._state.shards import FlatShard, LocalShard, Segment, Segments
from ._mesh import RankMesh, Rules

__all__ = ["FlatShard", "LocalShard", "RankMesh", "Rules", "Segment", "Segments"]

for _class in (FlatShard, LocalShard, RankMesh, Rules, Segment, Segments):
    _class.__module__ = __name__
