"""Rules and meshes: which rank has which part of a model, from the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from threads import together

SHAPES = {
    "model.embed.weight": (11, 6),
    "model.layers.0.q_proj.weight": (8, 6),
    "model.layers.0.o_proj.weight": (6, 8),
    "model.layers.0.norm.weight": (6,),
    "model.layers.1.q_proj.weight": (8, 6),
    "model.layers.1.o_proj.weight": (6, 8),
    "model.layers.1.norm.weight": (6,),
    "model.head.weight": (11, 6),
}
RULES = sw.sharding.Rules(
    {
        "**.q_proj.weight": ("tp", None),
        "**.o_proj.weight": (None, "tp"),
        "**/embed.*": ("tp",),
        "**.head.weight": (("tp", "dp"), None),
        "**norm*.weight": (),
    },
    stages={"**.layers.0.**": 0, "**.layers.1.**": 1, "**.head.**": 1, "**.embed.**": 0},
)


def whole(name: str) -> np.ndarray[Any, Any]:
    """A tensor that its name tells."""
    count = int(np.prod(SHAPES[name]))
    return (np.arange(count) + 1000.0 * sum(map(ord, name))).reshape(SHAPES[name])


def wanted(rank: int, mesh: sw.sharding.RankMesh) -> Any:
    """Returns a rank's part by the rules."""
    tree = {
        "params": {name: sw.ArraySpec(shape, np.float64) for name, shape in SHAPES.items()},
        "step": sw.ObjectSpec(),
    }
    return RULES.abstract_state(tree, mesh, rank)


def of_rank(rank: int, mesh: sw.sharding.RankMesh) -> dict[str, Any]:
    """Its state."""
    params = {}
    for name, shard in wanted(rank, mesh)["params"].items():
        if shard is not ...:
            box = tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))
            params[name] = whole(name)[box].copy()
    return {"params": params, "step": 5}


MESHES = [
    sw.sharding.RankMesh(pp=2, dp=1, tp=2),
    sw.sharding.RankMesh(dp=2, tp=2),
    sw.sharding.RankMesh(pp=2, dp=1, tp=3),
    sw.sharding.RankMesh(dp=1, tp=1),
]


def test_a_model_goes_from_any_mesh_to_any_other(root: Path) -> None:
    for step, mesh in enumerate(MESHES):

        def saves(
            rank: int, manager: sw.CheckpointManager, mesh: sw.sharding.RankMesh = mesh, step: int = step
        ) -> None:
            state = RULES.shard(
                of_rank(rank, mesh), mesh, rank, shapes=lambda path: SHAPES[path.removeprefix("params/")]
            )
            manager.save(step, state).result()

        together(mesh.size, root, saves)
        with sw.CheckpointManager(root, read_only=True) as reader:
            found = reader.restore(step)
        assert set(found["params"]) == set(SHAPES)
        for name, array in found["params"].items():
            np.testing.assert_array_equal(array, whole(name), err_msg=f"{name} over {mesh}")
        assert found["step"] == 5
    for mesh in MESHES:

        def restores(rank: int, manager: sw.CheckpointManager, mesh: sw.sharding.RankMesh = mesh) -> None:
            like = RULES.abstract_state(manager.metadata(0), mesh, rank)
            got = manager.restore(0, like=like)
            assert got["step"] == 5
            expected = of_rank(rank, mesh)["params"]
            for name, shard in got["params"].items():
                if shard is ...:
                    assert name not in expected
                else:
                    np.testing.assert_array_equal(shard.local, expected[name])

        together(mesh.size, root, restores)


def test_whole_shapes_are_a_mapping_or_a_function() -> None:
    mesh, rules = sw.sharding.RankMesh(tp=2), sw.sharding.Rules({"**": ("tp",)})
    state = {"a": {"odd": np.zeros(2), "even": np.zeros(3)}}
    shapes = {"a/odd": (5,), "a/of/another/stage": (9,)}
    for given in (shapes, shapes.get):
        shards = rules.shard(state, mesh, 1, shapes=given)["a"]  # type: ignore[arg-type]
        assert (shards["odd"].global_shape, shards["odd"].offset) == ((5,), (3,))
        assert (shards["even"].global_shape, shards["even"].offset) == ((6,), (3,))
    with pytest.raises(sw.MisuseError, match=r"shapes is \{leaf path: shape"):
        rules.shard(state, mesh, 1, shapes=[(5,)])  # type: ignore[arg-type]


def test_a_mesh_knows_its_ranks_and_their_places() -> None:
    mesh = sw.sharding.RankMesh(pp=2, dp=3, tp=4)
    assert mesh.size == 24
    assert mesh.coordinates(17) == {"pp": 1, "dp": 1, "tp": 1}
    assert mesh.ranks(pp=1, tp=0) == [12, 16, 20]
    table = sw.sharding.RankMesh([[3, 1], [0, 2]], dp=2, tp=2)
    assert table.coordinates(0) == {"dp": 1, "tp": 0}
    for bad, why in [
        (lambda: sw.sharding.RankMesh(), "has axes"),
        (lambda: sw.sharding.RankMesh([[0, 0]], a=1, b=2), "twice"),
        (lambda: sw.sharding.RankMesh([0, 1], a=3), "shape"),
        (lambda: mesh.ranks(ep=0), "no axis 'ep'"),
        (lambda: mesh.coordinates(24), "not in"),
    ]:
        with pytest.raises(sw.MisuseError, match=why):
            bad()


def test_a_mesh_of_many_ranks_answers_without_a_table() -> None:
    plain, table = (
        sw.sharding.RankMesh(a=3, b=4, c=5),
        sw.sharding.RankMesh(np.arange(60).reshape(3, 4, 5), a=3, b=4, c=5),
    )
    for rank in range(60):
        a, b, c = map(int, np.unravel_index(rank, (3, 4, 5)))
        assert plain.coordinates(rank) == table.coordinates(rank) == {"a": a, "b": b, "c": c}
        assert plain.ranks(b=b, c=c) == table.ranks(b=b, c=c) == [20 * n + 5 * b + c for n in range(3)]
    assert plain.ranks() == table.ranks() == list(range(60))
    # A grid of so many numbers would be 16 GiB.
    large = sw.sharding.RankMesh(a=2**15, b=2**16)
    assert large.size == 2**31
    assert large.coordinates(2**31 - 1) == {"a": 2**15 - 1, "b": 2**16 - 1}
    assert large.ranks(a=3, b=7) == [3 * 2**16 + 7]


def test_dimensions_are_cut_as_torch_does_or_evenly() -> None:
    mesh = sw.sharding.RankMesh(tp=4)
    tree = {"w": sw.ArraySpec((10,), np.float32)}
    for uneven, lengths in (("chunk", [3, 3, 3, 1]), ("balanced", [3, 3, 2, 2])):
        rules = sw.sharding.Rules({"w": ("tp",)}, uneven=uneven)  # type: ignore[arg-type]
        shards = [rules.abstract_state(tree, mesh, rank)["w"] for rank in range(4)]
        assert [one.local.shape[0] for one in shards] == lengths
        assert [one.offset[0] for one in shards] == list(np.cumsum([0, *lengths[:-1]]))


@pytest.mark.parametrize("glob", ["**.hidden_1.weight", "**/hidden_1/weight", "**.hidden_*.weight"])
def test_slashes_inside_a_name_separate_its_parts_as_dots_do(glob: str) -> None:
    rules = sw.sharding.Rules({glob: (None, "tp")})
    for name in ("hidden_1/weight", "hidden_1.weight"):
        shard = rules.shard({name: np.zeros((4, 4))}, sw.sharding.RankMesh(tp=2), 1)[name]
        assert (shard.global_shape, shard.offset) == ((4, 8), (0, 4))


def test_a_tensor_without_a_fitting_rule_is_named() -> None:
    mesh = sw.sharding.RankMesh(tp=2)
    tree = {"a": {"b.c": sw.ArraySpec((4,), np.float32)}}
    with pytest.raises(sw.MisuseError, match=r"`a/b\.c` matches no rule"):
        sw.sharding.Rules({"x": ()}).abstract_state(tree, mesh, 0)
    with pytest.raises(sw.MisuseError, match="speaks of 2"):
        sw.sharding.Rules({"a.b.c": (None, "tp")}).abstract_state(tree, mesh, 0)
    with pytest.raises(sw.MisuseError, match="axis 'ep'"):
        sw.sharding.Rules({"a/b/c": ("ep",)}).abstract_state(tree, mesh, 0)
    stages = sw.sharding.Rules({"**": ()}, stages={"a/**": 2})
    assert stages.abstract_state(tree, mesh, 0)["a"]["b.c"] is not ...
    with pytest.raises(sw.MisuseError, match=r"`a/b\.c` is of stage 2"):
        stages.abstract_state(tree, sw.sharding.RankMesh(pp=2), 0)
    halves = sw.sharding.Rules({"**": ()}, stages=lambda path, count: count - 1)
    assert halves.abstract_state(tree, sw.sharding.RankMesh(pp=2), 0)["a"]["b.c"] is ...
    with pytest.raises(sw.MismatchError, match=r"`w`: rank 1 has shape \(2,\)"):
        sw.sharding.Rules({"w": ("tp",)}).shard({"w": np.zeros(2)}, mesh, 1, shapes=lambda path: (7,))


def test_a_tensor_of_another_stage_is_refused_by_name() -> None:
    mesh = sw.sharding.RankMesh(pp=2)
    rules = sw.sharding.Rules({"**": ()}, stages={"embed*": 0})
    with pytest.raises(sw.MisuseError, match=r"`embed` is of stage 0, and rank 1 of .* is of another"):
        rules.shard({"embed": np.zeros(3)}, mesh, 1)
