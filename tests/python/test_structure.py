"""The stored tree, and finding places in it."""

from __future__ import annotations

from stepwell._restore.structure import Node, Structure

MANY = 2000


class Key(str):
    """A key that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def test_finding_leaves_of_a_container_is_linear() -> None:
    nodes: list[Node] = [(0, None, ("dict",))]
    nodes += [(0, ("k", Key(f"l{i}")), i) for i in range(MANY)]
    structure = Structure(lambda: nodes)
    for i in range(MANY):
        assert structure.find([("k", f"l{i}")]) == i + 1
    assert Key.compared < 10 * MANY


def test_keys_and_fields_of_one_name_are_one_place() -> None:
    nodes: list[Node] = [
        (0, None, ("dict",)),
        (0, ("k", "1"), ("list",)),
        (0, ("i", 1), 0),
        (1, ("x", 0), 1),
        (1, ("x", 1), 2),
    ]
    structure = Structure(lambda: nodes)
    assert structure.find([]) == 0
    assert structure.find([("k", "1")]) == structure.find([("f", "1")]) == 1
    assert structure.find([("i", 1)]) == structure.find([("x", 1)]) == 2
    assert structure.find([("f", "1"), ("i", 1)]) == 4
    assert structure.find([("k", "1"), ("x", 2)]) is None
    assert structure.find([("i", 1), ("x", 0)]) is None
    assert Structure(list).find([]) is None
