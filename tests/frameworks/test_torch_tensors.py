"""Tensors of torch in a state: what is stored, and what comes back."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

torch = pytest.importorskip("torch")

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def bits(tensor: Any) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(dtype: str, *shape: int) -> Any:
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(*shape) > 0.5
    size = torch.empty((), dtype=kind).element_size()
    return torch.randint(0, 100, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit_fresh_and_in_place(root: Path, dtype: str) -> None:
    tensor = random_tensor(dtype, 3, 5)
    sw.save(root, {"x": tensor})
    fresh = sw.restore(root, to="torch")["x"]
    assert fresh.dtype is tensor.dtype
    assert bits(fresh) == bits(tensor)
    own = torch.zeros((3, 5), dtype=torch.uint8).to(tensor.dtype)
    place = own.data_ptr()
    assert sw.restore(root, into={"x": own})["x"] is own
    assert own.data_ptr() == place
    assert bits(own) == bits(tensor)
    array = sw.restore(root)["x"]
    assert isinstance(array, np.ndarray)
    assert array.dtype.name == dtype


def test_a_strided_tensor_is_stored_by_value_and_filled(root: Path) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    views = {
        "transposed": base.permute(2, 0, 1),
        "strided": base[:, ::2, 1:4],
        "broadcast": torch.arange(3.0)[:, None].expand(3, 4),
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    sw.save(root, views)
    for name, value in sw.restore(root, to="torch").items():
        assert torch.equal(value, views[name]), name
    target = {
        "transposed": torch.zeros(3, 4, 5).permute(2, 0, 1),
        "strided": torch.zeros(3, 4, 5)[:, ::2, 1:4],
        "channels_last": torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 4),
    }
    sw.restore(root, into=target)
    for name, value in target.items():
        assert torch.equal(value, views[name]), name
    assert target["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_lazy_views_are_stored_as_what_they_show(root: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    sw.save(root, {"conj": values.conj(), "neg": values.conj().imag})
    back = sw.restore(root, to="torch")
    assert torch.equal(back["conj"], values.conj().resolve_conj())
    assert torch.equal(back["neg"], values.conj().imag.resolve_neg())


def test_lazy_parts_are_stored_as_what_they_show(
    root: Path,
) -> None:
    views = {
        "conj": torch.tensor([1 + 2j, 3 - 4j, 5 + 6j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j, 5 + 6j]).conj().imag,
    }

    def parts(views: dict[str, torch.Tensor]) -> dict[str, Any]:
        conj, neg = views["conj"], views["neg"]
        return {
            "conj": sw.sharding.LocalShard(conj, (3,), (0,)),
            "neg": sw.sharding.LocalShard(neg, (3,), (0,)),
            "segments": sw.sharding.Segments(
                conj,
                [
                    sw.sharding.Segment("a", (0,), into=np.s_[:1], shape=(1,)),
                    sw.sharding.Segment("b", (0,), into=np.s_[1:], shape=(2,)),
                ],
            ),
            "flat": sw.sharding.FlatShard(conj, (3,), 0),
        }

    sw.save(root, parts(views))
    back = sw.restore(root, to="torch")
    shown = {name: view.resolve_conj().resolve_neg() for name, view in views.items()}
    assert torch.equal(back["conj"], shown["conj"])
    assert torch.equal(back["neg"], shown["neg"])
    assert torch.equal(torch.cat([back["segments"]["a"], back["segments"]["b"]]), shown["conj"])
    assert torch.equal(back["flat"], shown["conj"])
    empty = {
        "conj": torch.zeros(3, dtype=torch.complex64).conj(),
        "neg": torch.zeros(3, dtype=torch.complex64).conj().imag,
    }
    sw.restore(root, into=parts(empty))
    for name, view in empty.items():
        assert torch.equal(view.resolve_conj().resolve_neg(), shown[name])


def test_a_parameter_is_stored_as_a_plain_tensor(root: Path) -> None:
    sw.save(root, {"w": torch.nn.Parameter(torch.arange(4.0))})
    frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    assert sw.restore(root, into={"w": frozen})["w"] is frozen
    assert not frozen.requires_grad
    assert torch.equal(frozen, torch.arange(4.0))
    live = torch.nn.Parameter(torch.zeros(4))
    made = sw.restore(root, like={"w": live})["w"]
    assert made is not live
    assert made.requires_grad
    assert torch.equal(live, torch.zeros(4))
    assert not sw.restore(root, to="torch")["w"].requires_grad


def test_tied_tensors_are_stored_once_and_tied_again(root: Path) -> None:
    shared = torch.randn(64, 64)
    sw.save(
        root, {"params": {"embed": shared, "head": shared, "view": shared.view(64, 64), "part": shared[1:]}}
    )
    with sw.open(root) as checkpoint:
        assert checkpoint.metadata().nbytes == shared.nbytes + shared[1:].nbytes
    back = sw.restore(root, to="torch")["params"]
    assert back["embed"].data_ptr() == back["head"].data_ptr()
    target = torch.zeros(64, 64)
    sw.restore(root, into={"params": {"embed": target, "head": target}}, exclude=["**/view", "**/part"])
    assert torch.equal(target, shared)


def test_a_tied_target_whose_stored_values_differ_is_refused(root: Path) -> None:
    sw.save(root, {"params": {"a": torch.zeros(4), "b": torch.ones(4)}})
    target = torch.full((4,), 7.0)
    with pytest.raises(sw.MismatchError, match="stored values differ"):
        sw.restore(root, into={"params": {"a": target, "b": target}})
    assert torch.equal(target, torch.full((4,), 7.0))


def test_a_tensor_may_be_changed_when_save_returns(root: Path) -> None:
    tensor = torch.zeros(1 << 20)
    with sw.CheckpointManager(root) as mgr:
        save = mgr.save(0, {"x": tensor})
        assert save.captured()
        tensor.fill_(1.0)
    assert not sw.restore(root)["x"].any()


def test_a_lazy_snapshot_makes_guard_and_optimizer_wait(root: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(32 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    # Memory for a small part of it only, so that the copy cannot be over as soon as `save` returns.
    with sw.CheckpointManager(root, staging_bytes=16 << 20) as mgr:
        attached = mgr.attach(optimizer)
        waited: list[bool] = []
        after_it = optimizer.register_step_pre_hook(lambda *_: waited.append(save.captured()))
        parameter.grad = torch.ones_like(parameter)
        for step in range(3):
            expected = float(-step)
            save = mgr.save(step, {"w": parameter}, snapshot="lazy")
            assert not save.captured()
            optimizer.step()
            assert waited == [True] * (step + 1)
            save.result()
            stored = mgr.restore(step)["w"]
            assert (stored == expected).all()
        save = mgr.save(3, {"w": parameter}, snapshot="lazy")
        assert not save.captured()
        with mgr.update_guard(), torch.no_grad():
            assert save.captured()
            parameter.fill_(9.0)
        mgr.wait_until_finished()
        assert (mgr.restore(3)["w"] == -3.0).all()
        after_it.remove()
        attached.remove()
        assert not optimizer._optimizer_step_pre_hooks


def test_offloaded_state_is_captured_behind_if_asked(
    root: Path,
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(32 << 20))
    other = torch.zeros(1 << 20)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    with sw.CheckpointManager(root, staging_bytes=16 << 20) as mgr:
        attached = mgr.attach(optimizer, host="lazy")
        for step in range(3):
            save = mgr.save(step, {"w": parameter, "other": {"o": other}})
            assert not save.captured()
            # Nobody owns that: it was copied before the call returned.
            other += 1
            optimizer.step()
            save.result()
            found = mgr.restore(step)
            assert (found["w"] == float(-step)).all()
            assert (found["other"]["o"] == float(step)).all()
        attached.remove()
        save = mgr.save(3, {"w": parameter})
        assert save.captured()
        with pytest.raises(sw.MisuseError, match="host"):
            mgr.attach(optimizer, host="now and then")  # type: ignore[arg-type]


def test_an_unattachable_optimizer_is_refused_with_advice(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr, pytest.raises(sw.MisuseError, match="update_guard"):
        mgr.attach(object())


@pytest.mark.parametrize("form", ["optimizer", "train state"])
@pytest.mark.parametrize("how", ["hook", "torch's own"])
def test_an_optimizer_that_steps_in_backward_is_refused(root: Path, form: str, how: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = optimizer if form == "optimizer" else sw.torch.TrainState(model, optimizer)
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(given).remove()
        if how == "hook":
            handle = model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        else:
            from torch.distributed.optim import _apply_optimizer_in_backward

            _apply_optimizer_in_backward(torch.optim.SGD, [model.bias], {"lr": 1.0})
        with pytest.raises(sw.MisuseError, match=r"update_guard\(\):` around backward") as caught:
            mgr.attach(given)
        assert ("bias" if form == "train state" else "(2,)") in str(caught.value)
        assert not optimizer._optimizer_step_pre_hooks
        if how == "hook":
            handle.remove()
            mgr.attach(given).remove()


def test_a_tensor_is_let_go_when_it_has_been_captured(root: Path) -> None:
    tensor = torch.zeros(1000)
    gone = weakref.ref(tensor)
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"x": tensor}).result()
        del tensor
        for _ in range(100):
            gc.collect()
            if gone() is None:
                break
            sw.CheckpointManager.all_steps(mgr)
    assert gone() is None


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: torch.zeros(3, device="meta"), "belongs into like="),
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8), "int_repr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested|layout"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "lazy module"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "bits8"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.uint4), "torch.uint4.*torch.uint8"),
        (lambda: torch.zeros(2, dtype=torch.int8).view(torch.int4), "torch.int4.*torch.uint8"),
    ],
)
def test_an_unstorable_tensor_is_refused_by_path_unwritten(root: Path, make: Any, hint: str) -> None:
    with sw.CheckpointManager(root) as mgr:
        with pytest.raises((sw.UnsupportedLeaf, ValueError), match=hint) as caught:
            mgr.save(0, {"params": {"bad": make()}})
        assert "params/bad" in str(caught.value) or any(
            "params/bad" in n for n in getattr(caught.value, "__notes__", [])
        )
        assert mgr.all_steps() == []
    assert not [p for p in root.iterdir() if p.name.startswith(".tmp")]


def test_meta_tensors_and_the_class_say_what_is_wanted(root: Path) -> None:
    sw.save(root, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3)})
    like = {"a": torch.empty(2, 3, device="meta"), "b": torch.Tensor}
    back = sw.restore(root, like=like)
    assert torch.equal(back["a"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(back["b"], torch.arange(3))
    with pytest.raises(sw.MismatchError, match=re.escape("(2, 3)")):
        sw.restore(root, like={"a": torch.empty(3, 3, device="meta")})


def test_casts_pads_and_resizes_work_for_tensors_as_for_arrays(root: Path) -> None:
    sw.save(root, {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)})
    wide = torch.zeros(2, 3)
    sw.restore(root, into={"w": wide})
    assert torch.equal(wide, torch.arange(6.0).reshape(2, 3))
    with pytest.raises(sw.MismatchError):
        sw.restore(root, into={"w": torch.zeros(2, 3, dtype=torch.float8_e4m3fn)})
    padded = torch.full((3, 3), 5.0)
    sw.restore(root, into={"w": padded}, resize="pad")
    assert torch.equal(padded[:2], torch.arange(6.0).reshape(2, 3))
    assert not padded[2].any()


def test_numpy_torch_and_back_in_any_combination(root: Path) -> None:
    kinds = {"numpy": np.arange(12, dtype=np.float32), "torch": torch.arange(12, dtype=torch.float32)}
    for stored, wanted in itertools.product(kinds, kinds):
        sw.save(root, {"x": kinds[stored]}, exists="replace")
        target = kinds[wanted] * 0
        sw.restore(root, into={"x": target})
        assert (np.asarray(target) == np.arange(12)).all()


def test_size_dtype_and_device_are_values(root: Path) -> None:
    state = {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    sw.save(root, state)
    back = sw.restore(root)
    assert back == state
    assert isinstance(back["size"], torch.Size)


def test_to_and_device_are_checked(root: Path) -> None:
    sw.save(root, {"x": torch.zeros(2)})
    with pytest.raises(sw.MisuseError, match="torch"):
        sw.restore(root, to="tensorflow")
    with pytest.raises(sw.MisuseError, match="device"):
        sw.restore(root, device="cpu")
    with pytest.raises(sw.MisuseError, match="to="):
        sw.restore(root, like={"x": torch.zeros(2)}, to="torch")
    for device in ("gpu", "meta", 3.5):
        with pytest.raises(sw.MisuseError, match=f"device={device!r} cannot hold arrays of torch: .*Pass"):
            sw.restore(root, to="torch", device=device)
    assert sw.restore(root, to="torch", device="cpu")["x"].device.type == "cpu"


def test_a_long_list_of_tensors_is_flattened_uncopied(root: Path) -> None:
    tensors = [torch.full((1 << 18,), float(number)) for number in range(8)]
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"list": tensors, "tuple": tuple(tensors)}).result()
        back = mgr.restore(0, to="torch")
    assert all(torch.equal(a, b) for a, b in zip(back["list"], tensors, strict=True))
    assert [a.data_ptr() for a in back["list"]] == [a.data_ptr() for a in back["tuple"]] or len(
        back["tuple"]
    ) == 8


def test_an_empty_tensor_comes_back_viewable(tmp_path: Path) -> None:
    sw.save(tmp_path / "x", {"none": torch.zeros(0, 5, 4)})
    found = sw.restore(tmp_path / "x", to="torch")["none"]
    assert found.view(torch.uint8).shape == (0, 5, 16)
