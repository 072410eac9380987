"""A store keeps the promises that roots rest on. Anyone can run this on a store of their own:

``STEPWELL_TEST_STORE=gs://bucket/prefix pytest tests/python/test_store_conformance.py``

The cloud's variables give credentials. Everything is below a new name under that prefix, and is
deleted at the end. ``STEPWELL_LONG=1`` lets writers race for 1000 keys. Without the variable, the
fake server of each cloud is tested.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell import _core
from stepwell._store import url_of

sys.path.append(str(Path(__file__).parent))
from command_line import process
from fake_store import DIALECTS, control, fake_store
from longer import LONG

_VARIABLE = "STEPWELL_TEST_STORE"
_REAL = os.environ.get(_VARIABLE)
_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}
#: More keys than a page of a listing has.
_RACES = 1001 if LONG else 24
_QUICK = sw.Options(silence=0.2, grace=0.0)


@dataclass
class Tried:
    """A store, and a prefix in it that nothing else uses."""

    prefix: str
    #: The server, if it is the fake one.
    variables: dict[str, str] = field(default_factory=dict)
    credentials: Any = None

    def root(self, name: str) -> str | sw.Store:
        url = f"{self.prefix}/{name}"
        return sw.Store(url, credentials=self.credentials) if self.credentials else url


@pytest.fixture(scope="module", params=["real"] if _REAL else DIALECTS)
def tried(request: pytest.FixtureRequest) -> Iterator[Tried]:
    name = f"stepwell-test-{secrets.token_hex(6)}"
    if _REAL:
        yield Tried(f"{_REAL.rstrip('/')}/{name}")
        return
    with fake_store(request.param) as variables, pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        token = (lambda: {"token": "t"}) if request.param == "gcs" else None
        yield Tried(f"{_SCHEMES[request.param]}://bucket/{name}", variables, token)


@pytest.fixture
def place(tried: Tried, request: pytest.FixtureRequest) -> Iterator[str | sw.Store]:
    """A URL at which there is nothing. All objects below it are deleted."""
    root = tried.root(request.node.name.split("[")[0])
    yield root
    _core.remove_objects(url_of(root, "the store"), True)


def state(step: int) -> dict[str, np.ndarray]:
    """One leaf of several parts of an upload, and a small one."""
    return {"w": np.arange(5 << 20, dtype=np.float32) + np.float32(step), "b": np.full(7, step)}


def assert_is(found: dict[str, Any], step: int) -> None:
    for name, value in state(step).items():
        assert np.array_equal(found[name], value), f"{name} of step {step} is wrong"


def _names(root: str | sw.Store) -> set[str]:
    """The first names of the objects below a root."""
    return {name.split("/")[0] for name, *_ in _core.stored_objects(url_of(root, "the store"))}


def test_creates_parts_ranges_and_listings_are_right(place: str | sw.Store) -> None:
    found = {name: (holds, detail) for name, holds, detail in _core.probe_store(url_of(place, "x"), _RACES)}
    assert set(found) == {"create_once", "create_race", "parts", "ranges", "listing"}
    assert all(holds for holds, _ in found.values()), found
    assert found["create_race"][1] == f"1 of 16 creates of one key won, for each of {_RACES} keys"
    assert not _names(place)


def test_listings_have_pages(tried: Tried, place: str | sw.Store) -> None:
    if not tried.variables:
        pytest.skip("a page has 1000 keys there: STEPWELL_LONG=1 fills one in the race for keys")
    control(tried.variables, "page", {"entries": 3})
    try:
        found = _core.probe_store(url_of(place, "x"), 7)
        assert all(holds for _, holds, _ in found), found
    finally:
        control(tried.variables, "page")


def test_the_doctor_finds_nothing(place: str | sw.Store) -> None:
    report = sw.doctor(place, nbytes=1 << 20)
    assert report.ok, report
    assert not _names(place)


def test_steps_are_saved_and_restored(place: str | sw.Store) -> None:
    with sw.CheckpointManager(place, retention=2, options=_QUICK) as mgr:
        assert mgr.latest_step() is None
        for step in range(4):
            mgr.save(step, state(step), metrics={"loss": float(step)}).result()
        assert mgr.all_steps() == [2, 3]
    with sw.CheckpointManager(place, read_only=True) as reader:
        for step in (2, 3):
            assert_is(reader.restore(step), step)
        assert reader.metrics(2) == {"loss": 2.0}
    with sw.open(place) as checkpoint:
        assert np.array_equal(checkpoint["w"][1000:1010], state(3)["w"][1000:1010])
    assert sw.verify(place).ok


def test_steps_are_replaced_rewound_and_deleted(place: str | sw.Store) -> None:
    with sw.CheckpointManager(place, options=_QUICK) as mgr:
        for step in range(4):
            mgr.save(step, state(step)).result()
        mgr.save(3, state(30), exists="replace").result()
        assert_is(mgr.restore(3), 30)
        assert mgr.rewind(2) == [3]
        mgr.delete(0)
        assert mgr.all_steps() == [1, 2]
        assert_is(mgr.restore(1), 1)


def test_one_writer_has_the_root(place: str | sw.Store) -> None:
    with sw.CheckpointManager(place, options=_QUICK) as mgr:
        mgr.save(1, {"x": 1}).result()
        with pytest.raises(sw.LockedError):
            sw.CheckpointManager(place, options=sw.Options(silence=10.0))
        mgr.save(2, {"x": 2}).result()
    with sw.CheckpointManager(place, options=_QUICK) as other:
        assert other.all_steps() == [1, 2]


def test_a_single_checkpoint_is_replaced(place: str | sw.Store) -> None:
    sw.save(place, state(1))
    with pytest.raises(sw.StepExists):
        sw.save(place, state(2))
    sw.save(place, state(2), exists="replace")
    assert_is(sw.restore(place), 2)
    assert sw.verify(place).ok


def test_retired_steps_are_collected(tried: Tried, place: str | sw.Store) -> None:
    with sw.CheckpointManager(place, retention=1) as mgr:
        for step in range(3):
            mgr.save(step, {"x": step}).result()
    if tried.credentials is None:
        done = process("gc", "--unread", str(place))
        assert done.returncode == 0, done.stderr
        assert len(_names(place)) == 2  # the step, and the control directory
    assert sw.restore(place) == {"x": 2}
