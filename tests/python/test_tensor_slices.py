"""Whole tensors of slices that are themselves cut, and patterns of names."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell.formats.description import Chunk, Description, Tensor
from stepwell.formats.flat_partitions import of_group, of_shares
from stepwell.formats.name_patterns import NamePatterns
from stepwell.formats.pickle_values import Malformed
from stepwell.formats.tensor_slices import SliceRule, run_boxes, whole

RNG = np.random.default_rng(3)


class Files:
    """Slices in one file, cut into flat runs at random places, in any order."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path / "data.bin", bytearray(b"start")

    def slice_of(self, values: np.ndarray[Any, Any], pieces: int, is_box: bool) -> Tensor:
        flat = values.reshape(-1)
        ends = sorted(RNG.integers(0, flat.size + 1, pieces - 1)) if pieces > 1 else []
        bounds = [0, *map(int, ends), flat.size]
        chunks = []
        for begin, end in itertools.pairwise(bounds):
            part = flat[begin:end].tobytes()
            if part:
                start, extent = ((0,) * values.ndim, values.shape) if is_box else ((begin,), (end - begin,))
                chunks.append(Chunk(str(self.path), len(self.data), len(part), start, extent))
                self.data += part + b"gap"
        return Tensor(values.dtype.name, values.shape, tuple(chunks))

    def restored(self, tensor: Tensor) -> Any:
        self.path.write_bytes(self.data)
        description = Description("test", str(self.path), {"x": tensor})
        with sw.Checkpoint(description.open("auto"), str(self.path)) as checkpoint:
            return checkpoint["x"][...]


@pytest.mark.parametrize("is_box", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((6,), 0), ((6, 5), 0), ((6, 8), 1), ((4, 6, 5), 1), ((3, 2, 8), 2)]
)
@pytest.mark.parametrize(("ranks", "parts", "pieces"), [(1, 1, 3), (2, 1, 4), (2, 2, 3), (1, 2, 1)])
def test_slices_become_the_whole_tensor(
    tmp_path: Path, shape: tuple[int, ...], axis: int, ranks: int, parts: int, pieces: int, is_box: bool
) -> None:
    values = RNG.standard_normal(shape).astype(np.float32)
    if shape[axis] % (ranks * parts):
        shape = (*shape[:axis], ranks * parts, *shape[axis + 1 :])
        values = RNG.standard_normal(shape).astype(np.float32)
    blocks = [np.split(part, ranks, axis) for part in np.split(values, parts, axis)]
    files = Files(tmp_path)
    slices = [
        files.slice_of(np.concatenate([one[rank] for one in blocks], axis), 1 if is_box else pieces, is_box)
        for rank in range(ranks)
    ]
    np.testing.assert_array_equal(files.restored(whole(slices, SliceRule(axis, parts))), values)


@pytest.mark.parametrize("rows", [1, 5, 8, 20])
def test_rows_of_padding_are_left_out(tmp_path: Path, rows: int) -> None:
    values = RNG.standard_normal((8, 3)).astype(np.float32)
    files = Files(tmp_path)
    slices = [files.slice_of(part, 3, False) for part in np.split(values, 2)]
    found = files.restored(whole(slices, SliceRule(0, rows=rows)))
    np.testing.assert_array_equal(found, values[:rows])


def test_uneven_slices_follow_each_other(tmp_path: Path) -> None:
    values = RNG.standard_normal((7, 4)).astype(np.float32)
    files = Files(tmp_path)
    slices = [files.slice_of(part, 2, False) for part in (values[:5], values[5:])]
    np.testing.assert_array_equal(files.restored(whole(slices, SliceRule(0))), values)


@pytest.mark.parametrize(
    ("shapes", "cut"),
    [
        ([(4, 2), (4, 3)], SliceRule(0)),
        ([(4, 2), (4,)], SliceRule(0)),
        ([(4, 2), (4,)], SliceRule(1)),
        ([(4, 2), ()], SliceRule(0)),
        ([(4, 2)], SliceRule(2)),
        ([(3, 2)], SliceRule(0, parts=2)),
    ],
)
def test_slices_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]], cut: SliceRule) -> None:
    with pytest.raises(Malformed):
        whole([Tensor("float32", shape, ()) for shape in shapes], cut)


def test_boxes_of_a_run_are_its_elements() -> None:
    shape = (3, 4, 5)
    numbers = np.arange(60).reshape(shape)
    for first in range(60):
        for count in range(1, 61 - first):
            found = [
                numbers[tuple(slice(at, at + size) for at, size in zip(start, extent, strict=True))].reshape(
                    -1
                )
                for start, extent in run_boxes(shape, first, count)
            ]
            assert np.concatenate(found).tolist() == list(range(first, first + count))
            assert len(found) <= 5


def test_partitions_without_elements_are_no_loop() -> None:
    begin = time.process_time()
    for lengths in ([0, 0], [1, 0], [0, 5], [1, 2]):
        with pytest.raises(Malformed):
            of_group(0, lengths, {"a": (1 << 50,)}, [])
    with pytest.raises(Malformed):
        of_shares(0, [1] * 1000, {"a": (1 << 50,)})
    assert time.process_time() - begin < 1
    assert of_group(0, [0, 0], {}, []) == {}


PATTERNS = [
    r"^model\.layers\.0\.weight$",
    r"\d+.input_layernorm.weight",
    r"model.*weight",
    r".*norm\.bias$",
    r"a?b*c+$",
    r"^\w+\.\d+",
    r"layers\.1",
    r"",
    r"$",
]
NAMES = [
    "model.layers.0.weight",
    "model.layers.0.weight.x",
    "modelxlayers.0.weight",
    "12.input_layernorm.weight",
    ".input_layernorm.weight",
    "model.weight",
    "x.norm.bias",
    "abbbcc",
    "ccc",
    "abd",
    "layers.1.x",
    "layers.12",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_those_of_python(pattern: str) -> None:
    for name in NAMES:
        assert NamePatterns([pattern]).match(name) == (re.match(pattern, name) is not None), name


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"[ab]", r"a|b", r"a{3}", r"a**", r"\S", r"a$b", "\\"])
def test_other_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not understood"):
        NamePatterns([pattern])


def test_no_pattern_takes_long() -> None:
    begin = time.process_time()
    assert not NamePatterns([".*a" * 400 + "b"]).match("a" * 4000)
    with pytest.raises(ValueError, match=r"too long"):
        NamePatterns([".*a" * 20000])
    assert time.process_time() - begin < 5
