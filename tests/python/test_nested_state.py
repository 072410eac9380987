"""Stateful objects inside the states of others: what ``load_state_dict`` gets is what
``state_dict`` gave."""

from __future__ import annotations

import importlib.util
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from conftest import same
from stepwell import _core

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "language_model.py"


class Holder:
    """Holds what it is given; loading takes what comes."""

    def __init__(self, **inside: Any) -> None:
        self.inside = inside

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inside)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inside = state


def generators(seed: int) -> dict[str, Any]:
    return {
        "pcg": np.random.default_rng(seed),
        "mt": np.random.Generator(np.random.MT19937(seed)),
        "philox": np.random.Philox(seed),
        "legacy": np.random.RandomState(seed),
        "legacy_pcg": np.random.RandomState(np.random.PCG64(seed)),
        "python": random.Random(seed),
    }


DRAW: dict[str, Any] = {
    "pcg": lambda g: g.normal(), "mt": lambda g: g.normal(), "philox": lambda g: int(g.random_raw()),
    "legacy": lambda g: g.normal(), "legacy_pcg": lambda g: g.normal(), "python": lambda g: g.gauss(0, 1),
}  # fmt: skip


def draws(found: dict[str, Any]) -> dict[str, Any]:
    return {name: DRAW[name](found[name]) for name in DRAW}


def test_generators_inside_a_state_continue(tmp_path: Path) -> None:
    saved = generators(1)
    draws(saved)
    sw.save(tmp_path / "c", {"l": Holder(**saved, order=np.arange(5))})
    expected = draws(saved)
    own = generators(2)
    back = sw.restore(tmp_path / "c", into={"l": Holder(**own, order=None)})["l"]
    assert all(back.inside[name] is own[name] for name in own)
    assert draws(back.inside) == expected
    assert same(back.inside["order"], np.arange(5))


def test_generators_that_the_target_does_not_have_yet_are_made(tmp_path: Path) -> None:
    saved = generators(1)
    draws(saved)
    sw.save(tmp_path / "c", {"l": Holder(**saved)})
    expected = draws(saved)
    back = sw.restore(tmp_path / "c", into={"l": Holder(pcg=None)})["l"]
    assert {name: type(one) for name, one in back.inside.items()} == {
        name: type(one) for name, one in saved.items()
    }
    assert draws(back.inside) == expected


def test_a_like_is_given_new_generators_and_keeps_its_own(tmp_path: Path) -> None:
    saved = generators(1)
    sw.save(tmp_path / "c", {"l": Holder(**saved)})
    expected = draws(saved)
    like = {"l": Holder(**generators(2))}
    back = sw.restore(tmp_path / "c", like=like)["l"]
    assert draws(back) == expected
    assert draws(like["l"].inside) == draws(generators(2))


def test_without_a_target_generators_come_back_as_generators(tmp_path: Path) -> None:
    saved = generators(1)
    draws(saved)
    sw.save(tmp_path / "c", {**saved, "l": [Holder(**saved)], "w": np.ones(3)})
    expected = draws(saved)
    back = sw.restore(tmp_path / "c")
    assert draws(back) == expected
    assert draws(back["l"][0]) == expected
    again = sw.restore(tmp_path / "c", like={"l": sw.AS_STORED, "mt": sw.AS_STORED}, exclude="w")
    assert draws(again["l"][0]) == expected
    assert DRAW["mt"](again["mt"]) == expected["mt"]
    with sw.open(tmp_path / "c") as checkpoint:
        assert draws(checkpoint["l"][0].load()) == expected
        part = checkpoint.restore(include=["pcg/bit_generator"])
    assert part["pcg"] == {"bit_generator": "PCG64"}, "a part of a state is no generator"
    assert isinstance(sw.metadata(tmp_path / "c").tree["pcg"], dict)


def test_foreign_generators_come_back_as_their_states(tmp_path: Path) -> None:
    class Mine(random.Random):
        pass

    sw.save(tmp_path / "c", {"mine": Mine(1), "module": random})
    back = sw.restore(tmp_path / "c")
    assert isinstance(back["mine"], dict)
    assert isinstance(back["module"], dict)


def test_objects_inside_objects_are_loaded_the_inner_ones_first(tmp_path: Path) -> None:
    loads: list[str] = []

    class Told(Holder):
        def __init__(self, name: str, **inside: Any) -> None:
            super().__init__(**inside)
            self.name = name

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loads.append(self.name)
            super().load_state_dict(state)

    def state(value: int) -> dict[str, Any]:
        inner = Told("inner", w=np.full(3, value), rng=np.random.default_rng(value))
        return {"outer": Told("outer", parts=[{"inner": inner}, value], n=value)}

    saved = state(1)
    sw.save(tmp_path / "c", saved)
    target = state(2)
    inner = target["outer"].inside["parts"][0]["inner"]
    back = sw.restore(tmp_path / "c", into=target)["outer"]
    assert back.inside["parts"][0]["inner"] is inner
    assert same(inner.inside["w"], np.full(3, 1))
    expected = np.random.default_rng(1).normal()
    assert inner.inside["rng"].normal() == expected
    assert loads == ["inner", "outer"]


def test_an_object_that_is_the_whole_state_of_another_is_loaded(tmp_path: Path) -> None:
    class Wrap:
        def __init__(self, seed: int) -> None:
            self.rng = np.random.default_rng(seed)

        def get_state(self) -> np.random.Generator:
            return self.rng

        def set_state(self, state: np.random.Generator) -> None:
            self.rng = state

    sw.save(tmp_path / "c", {"w": Wrap(1)})
    target = Wrap(2)
    own = target.rng
    sw.restore(tmp_path / "c", into={"w": target})
    assert target.rng is own
    assert own.normal() == np.random.default_rng(1).normal()


def test_an_object_that_the_target_lacks_is_a_mismatch(
    tmp_path: Path,
) -> None:
    sw.save(tmp_path / "c", {"a": np.ones(3), "l": Holder(x=Holder(n=1), rng=np.random.default_rng(1))})
    own = np.random.default_rng(2)
    target = {"a": np.zeros(3), "l": Holder(x=None, rng=own)}
    with pytest.raises(sw.MismatchError, match=r"`l/x`: .*Holder") as caught:
        sw.restore(tmp_path / "c", into=target)
    assert caught.value.leaf == "l/x"
    assert not target["a"].any()
    assert own.normal() == np.random.default_rng(2).normal()


def test_a_generator_of_another_kind_is_a_mismatch(
    tmp_path: Path,
) -> None:
    sw.save(tmp_path / "c", {"a": np.ones(3), "l": Holder(rng=np.random.default_rng(1))})
    target = {"a": np.zeros(3), "l": Holder(rng=np.random.Generator(np.random.MT19937(1)))}
    with pytest.raises(sw.MismatchError, match="`l/rng`"):
        sw.restore(tmp_path / "c", into=target)
    assert not target["a"].any()


def test_a_state_of_one_entry_is_whole_under_another_name(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"l": Holder(rng=np.random.default_rng(1)), "m": Holder(w=np.arange(3))})
    own = np.random.default_rng(2)
    into = {"k": Holder(rng=own), "n": Holder(w=np.zeros(3))}
    sw.restore(tmp_path / "c", into=into, rename={"l": "k", "m": "n"})
    assert into["k"].inside == {"rng": own}
    assert own.normal() == np.random.default_rng(1).normal()
    assert same(into["n"].inside, {"w": np.arange(3)})
    rng = sw.restore(tmp_path / "c", like={"g": np.random.default_rng(5)}, rename={"l/rng": "g"})["g"]
    assert rng.normal() == np.random.default_rng(1).normal()


def test_a_state_that_is_at_no_place_of_its_generator_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"rng": np.random.MT19937(1)})
    state = np.random.MT19937(1).state
    state["state"]["pos"] = 1 << 20
    sw.save(tmp_path / "d", {"rng": state})
    with pytest.raises(sw.MismatchError, match="place"):
        sw.restore(tmp_path / "d", into={"rng": np.random.MT19937(2)})


def test_example_batches_continue_over_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)  # where its dataclasses look
    spec.loader.exec_module(example)
    text = np.arange(60, dtype=np.uint8)
    batches = example.Batches(text, 4, 10, seed=1)
    batches.next()
    sw.save(tmp_path / "c", {"batches": batches})
    expected = [batches.next() for _ in range(20)]
    resumed = sw.restore(tmp_path / "c", into={"batches": example.Batches(text, 4, 10, seed=2)})["batches"]
    assert same([resumed.next() for _ in range(20)], expected)


def test_a_dlpack_capsule_without_a_shape_is_refused(tmp_path: Path) -> None:
    import ctypes

    class DLTensor(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
        )  # fmt: skip

    values = np.arange(6, dtype=np.float32)
    shape = (ctypes.c_int64 * 2)(2, 3)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    class Foreign:
        def __init__(self, with_shape: bool) -> None:
            self.tensor = DLTensor(
                values.ctypes.data, (1, 0), 2, 2, 32, 1, shape if with_shape else None, None, 0
            )

    _core.array_type(
        Foreign, "foreign", False, lambda one: make(ctypes.addressof(one.tensor), b"dltensor", None), False
    )
    sw.save(tmp_path / "good", {"a": Foreign(True)})
    assert same(sw.restore(tmp_path / "good"), {"a": values.reshape(2, 3)})
    with pytest.raises(sw.UnsupportedLeaf, match="`a`"):
        sw.save(tmp_path / "bad", {"a": Foreign(False)})
    assert not (tmp_path / "bad").exists()


def test_a_newer_dlpack_capsule_is_refused_unread(tmp_path: Path) -> None:
    import ctypes
    import mmap

    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    pages = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(pages)
    # The struct ends with the first page. Reading past its two version numbers would kill this
    # process.
    no_access = 0
    assert libc.mprotect(start + page, page, no_access) == 0, ctypes.get_errno()
    memory[page - 8 : page] = struct.pack("=II", 2, 0)

    class Newer:
        exported = 0

    def capsule(one: Newer) -> object:
        one.exported += 1
        return make(start + page - 8, b"dltensor_versioned", None)

    _core.array_type(Newer, "newer", False, capsule, False)
    newer = Newer()
    with pytest.raises(sw.UnsupportedLeaf, match="`a`"):
        sw.save(tmp_path / "c", {"a": newer})
    assert newer.exported > 0
    assert not (tmp_path / "c").exists()
    del pages
    memory.close()
