"""Tensors of torch on a CUDA device: what is captured when, and what waits for it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
import torch
from fake_cuda import FakeCuda

SHAPES = [(300, 1000), (7,), (1,), (1 << 20,), (513, 511)]


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """To the bit: patterns hold NaN."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()


class Overwriting(torch.optim.Optimizer):
    """An optimizer whose step is one update of everything that it owns, on the current stream."""

    def __init__(self, parameters: list[torch.nn.Parameter], cuda: FakeCuda) -> None:
        super().__init__(parameters, {})
        self._cuda = cuda
        self.version = 1
        for parameter in parameters:
            # As Adam does by itself, which counts the steps on the host.
            self.state[parameter]["step"] = torch.tensor(float(self.version))
            self.state[parameter]["momentum"] = cuda.tensor(np.zeros(tuple(parameter.shape), np.float32))

    def tensors(self) -> list[torch.Tensor]:
        slots = [state["momentum"] for state in self.state.values()]
        return [parameter for group in self.param_groups for parameter in group["params"]] + slots

    def step(self, closure: Any = None) -> None:
        self.version += 1
        for state in self.state.values():
            state["step"] += 1
        for tensor in self.tensors():
            self._cuda.update(tensor, self.version)


class Training:
    """Parameters, an optimizer, and a buffer that the forward changes."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.parameters = [torch.nn.Parameter(cuda.tensor(np.zeros(shape, np.float32))) for shape in SHAPES]
        self.optimizer = Overwriting(self.parameters, cuda)
        self.running_mean = cuda.tensor(np.zeros(5000, np.float32))
        self.forwards = 0
        self.optimizer.step()

    def forward(self) -> None:
        self.forwards += 1
        self.cuda.update(self.running_mean, 1000 + self.forwards)

    def state(self) -> dict[str, Any]:
        slots = {f"s{n}": state for n, state in enumerate(self.optimizer.state.values())}
        return {
            "params": {f"p{n}": parameter for n, parameter in enumerate(self.parameters)},
            "optimizer": slots,
            "buffers": {"running_mean": self.running_mean},
            "step": self.forwards,
        }

    def check(self, found: dict[str, Any], version: int, forwards: int) -> None:
        momenta = {name: slot["momentum"] for name, slot in found["optimizer"].items()}
        for name, tensor in {**found["params"], **momenta}.items():
            assert same(tensor, self.cuda.pattern(tensor, version)), name
        assert all(slot["step"] == version for slot in found["optimizer"].values())
        mean = found["buffers"]["running_mean"]
        assert same(mean, self.cuda.pattern(mean, 1000 + forwards) if forwards else np.zeros_like(mean))
        assert found["step"] == forwards


def test_attached_optimizer_state_is_captured_in_training(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    training.forward()
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(training.optimizer)
        mgr.prepare(training.state())
        cuda.stall(True)
        save = mgr.save(0, training.state())
        # The device stands still: neither the call nor the guard has waited for it.
        assert not save.captured()
        training.forward()
        training.optimizer.step()
        assert not save.captured()
        cuda.stall(False)
        assert save.result() == 0
        training.check(mgr.restore(0), version=2, forwards=1)
    assert cuda.calls("cuCtxSynchronize") == 0


def test_a_training_that_saves_every_step_reads_back_every_step(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    # A ring that takes a part of the state only.
    with sw.CheckpointManager(root, staging_bytes=16 << 20, max_pending=2) as mgr:
        mgr.attach(training.optimizer)
        for step in range(12):
            cuda.random(step, 150)
            training.forward()
            training.optimizer.step()
            mgr.save(step, training.state())
        mgr.wait_until_finished()
        for step in range(12):
            training.check(mgr.restore(step), version=3 + step, forwards=1 + step)


def test_arrays_of_no_attached_optimizer_are_fenced(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    training.forward()
    with sw.CheckpointManager(root) as mgr:
        mgr.prepare(training.state())
        cuda.stall(True)
        save = mgr.save(0, training.state())
        assert not save.captured()
        # Nobody is attached, and nothing is guarded: everything was fenced.
        training.forward()
        training.optimizer.step()
        cuda.stall(False)
        save.result()
        training.check(mgr.restore(0), version=2, forwards=1)


def test_a_detached_optimizer_waits_for_pending_captures(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    training.forward()
    with sw.CheckpointManager(root) as mgr:
        attached = mgr.attach(training.optimizer)
        save = mgr.save(0, training.state())
        attached.remove()
        attached.remove()
        training.optimizer.step()
        save.result()
        training.check(mgr.restore(0), version=2, forwards=1)


def test_a_provider_chunk_is_copied_after_the_stream(cuda: FakeCuda, root: Path) -> None:
    class Provider:
        shape, dtype = (1 << 20,), np.float32

        def __init__(self, capture: Any) -> None:
            self.tensor = cuda.tensor(np.zeros(self.shape, self.dtype), device=1)
            self.capture = capture

        def stepwell_chunks(self) -> list[sw.providers.Chunk]:
            return [sw.providers.Chunk(self.tensor, capture=self.capture)]

    with sw.CheckpointManager(root) as mgr:
        steps: list[tuple[Any, Any]] = [("auto", "now"), ("auto", "lazy"), ("eager", "lazy"), ("lazy", "now")]
        for step, (snapshot, capture) in enumerate(steps):
            provider = Provider(capture)
            cuda.random(step, 300)
            cuda.update(provider.tensor, 5)
            save = mgr.save(step, {"p": provider}, snapshot=snapshot)
            if "lazy" in (snapshot, capture):
                with mgr.update_guard():
                    pass
            cuda.update(provider.tensor, 6)
            save.result()
            assert same(mgr.restore(step)["p"], cuda.pattern(provider.tensor, 5)), (snapshot, capture)


def test_an_array_beyond_an_attached_optimizer_is_fenced(cuda: FakeCuda, root: Path) -> None:
    both = cuda.tensor(np.zeros((2, 1 << 20), np.float32))
    halves = [
        cuda.tensor(np.zeros(1 << 20, np.float32), at=both.data_ptr() + n * both.nbytes // 2)
        for n in range(2)
    ]
    optimizer = Overwriting([torch.nn.Parameter(halves[0])], cuda)
    cuda.update(both, 1)
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(optimizer)
        mgr.prepare({"both": both})
        save = mgr.save(0, {"both": both})
        cuda.update(halves[1], 2)
        save.result()
        assert same(mgr.restore(0)["both"], cuda.pattern(both, 1))


def test_replaced_tensor_memory_stays_until_captured(cuda: FakeCuda, root: Path) -> None:
    values = np.arange(1 << 20, dtype=np.float32)
    tensor = cuda.tensor(values)
    optimizer = Overwriting([torch.nn.Parameter(tensor)], cuda)
    (parameter,) = optimizer.param_groups[0]["params"]
    del tensor
    host = torch.nn.Parameter(torch.ones(1 << 20))
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(optimizer)
        cuda.stall(True)
        save = mgr.save(0, {"device": parameter, "host": host}, snapshot="lazy")
        before = cuda.calls("cuMemFree_v2")
        # As `module.to("cpu")` does.
        parameter.data = torch.zeros(10)
        host.data = torch.zeros(10)
        gc.collect()
        assert cuda.calls("cuMemFree_v2") == before
        cuda.stall(False)
        save.result()
        found = mgr.restore(0)
        assert (found["host"] == 1).all()
        assert (found["device"] == values).all()


@pytest.mark.parametrize("snapshot", ["auto", "lazy"])
def test_a_save_in_an_update_has_the_values_before_it(cuda: FakeCuda, root: Path, snapshot: Any) -> None:
    training = Training(cuda)
    host = torch.zeros(1000)
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(training.optimizer, host="lazy")
        state = {**training.state(), "host": {"h": host}}
        mgr.prepare(state)
        cuda.random(1, 300)
        with mgr.update_guard():
            save = mgr.save(0, state, snapshot=snapshot)
            for tensor in training.optimizer.tensors():
                cuda.update(tensor, 7)
            host.fill_(1)
        save.result()
        found = mgr.restore(0)
        training.check(found, version=1 + 1, forwards=0)
        assert not found["host"]["h"].any()

        saves = []
        hook = training.optimizer.register_step_pre_hook(
            lambda *_: saves.append(mgr.save(1, training.state(), snapshot=snapshot))
        )
        training.optimizer.step()
        hook.remove()
        saves[0].result()
        momentum = mgr.restore(1)["optimizer"]["s0"]["momentum"]
        assert same(momentum, cuda.pattern(torch.zeros(momentum.shape), 7))
        assert not mgr._updates.stepping
        assert not mgr._updates._guarded


@pytest.mark.parametrize("door", ["manager", "checkpoint", "path"])
def test_a_restore_waits_for_saves_that_read_its_targets(cuda: FakeCuda, root: Path, door: str) -> None:
    host = torch.zeros(1 << 22)
    sw.save(root.parent / "other", {"h": torch.ones(1 << 22)})
    with sw.CheckpointManager(root) as mgr, sw.CheckpointManager(root.parent / "runs") as runs:
        runs.save(0, {"h": torch.ones(1 << 22)}).result()
        save = mgr.save(0, {"h": host, "d": cuda.tensor(np.zeros(1 << 20))}, snapshot="lazy")
        if door == "manager":
            runs.restore(0, into={"h": host})
        elif door == "checkpoint":
            runs.checkpoint(0).restore(into={"h": host})
        else:
            sw.restore(root.parent / "other", into={"h": host})
        assert (host == 1).all()
        save.result()
        assert not mgr.restore(0)["h"].any()


def test_arrays_of_a_device_that_overlap_are_not_restored_into(cuda: FakeCuda, root: Path) -> None:
    both = cuda.tensor(np.zeros((2, 1000), np.float32))
    half = cuda.tensor(np.zeros(1000, np.float32), at=both.data_ptr() + 4000)
    cuda.update(both, 1)
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"both": both.detach(), "half": cuda.tensor(np.zeros(1000, np.float32))}).result()
        cuda.update(both, 2)
        cuda.synchronize()
        with pytest.raises(sw.MismatchError, match="overlap in memory"):
            mgr.restore(0, into={"both": both, "half": half})
        with pytest.raises(sw.MismatchError, match="is to keep its value, and overlaps `both`"):
            mgr.restore(0, into={"both": both, "other": half}, missing="keep", exclude="half")
        assert same(cuda.values(both), cuda.pattern(both, 2))
        mgr.restore(0, into={"both": both, "half": cuda.tensor(np.zeros(1000, np.float32))})
        assert same(cuda.values(both), cuda.pattern(both, 1))


def test_a_lazy_snapshot_is_guarded_whatever_owns_it(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    training.forward()
    host = torch.zeros(1000)
    with sw.CheckpointManager(root) as mgr:
        mgr.prepare(training.state())
        save = mgr.save(0, {**training.state(), "host": {"h": host}}, snapshot="lazy")
        with mgr.update_guard():
            training.forward()
            training.optimizer.step()
            host.fill_(1)
        save.result()
        found = mgr.restore(0)
        training.check(found, version=2, forwards=1)
        assert (found["host"]["h"] == 0).all()


def test_an_eager_snapshot_is_there_when_save_returns(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    training.forward()
    with sw.CheckpointManager(root, staging_bytes=16 << 20) as mgr:
        save = mgr.save(0, training.state(), snapshot="eager")
        assert save.captured()
        other = cuda.stream()
        for tensor in training.optimizer.tensors():
            cuda.update(tensor, 99, other)
        save.result()
        training.check(mgr.restore(0), version=2, forwards=1)


def test_tensors_are_released_once_captured(cuda: FakeCuda, root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        tensor = cuda.tensor(np.arange(1 << 18, dtype=np.float32))
        died = weakref.ref(tensor.untyped_storage())
        mgr.prepare({"w": tensor})
        cuda.stall(True)
        save = mgr.save(0, {"w": tensor}, snapshot="lazy")
        del tensor
        gc.collect()
        cuda.stall(False)
        save.result()
        assert (mgr.restore(0)["w"] == np.arange(1 << 18)).all()
    gc.collect()
    assert died() is None


def test_tied_or_transposed_views_are_stored_as_they_are(cuda: FakeCuda, root: Path) -> None:
    values = np.arange(600, dtype=np.float32).reshape(20, 30)
    tensor = cuda.tensor(values)
    # torch would ask its runtime for a view of a tensor on a device: described by its strides
    # instead.
    turned = cuda.tensor(np.ascontiguousarray(values.T), strides=(1, 20))
    state = {"a": tensor, "b": tensor, "turned": torch.nn.Parameter(turned)}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        found = mgr.restore(0)
        assert found["a"] is found["b"]
        assert (found["a"] == values).all()
        assert (found["turned"].reshape(-1) == turned_values(values)).all()


def turned_values(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the elements of an array with the shape of ``values.T`` and strides (1, 20) over the
    same memory."""
    memory = np.ascontiguousarray(values.T).reshape(-1)
    return np.lib.stride_tricks.as_strided(memory, (30, 20), (4, 80)).reshape(-1).copy()


def test_a_step_is_restored_straight_into_tensors_on_a_device(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    training.forward()
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(training.optimizer)
        mgr.save(0, training.state()).result()
        training.forward()
        training.optimizer.step()
        # The updates may still be under way: what is restored comes after them.
        before = cuda.calls("cuMemcpyHtoDAsync_v2")
        found = mgr.restore(into=training.state())
        assert cuda.calls("cuMemcpyHtoDAsync_v2") > before
        assert found["params"]["p0"] is training.parameters[0]
        for tensor in training.optimizer.tensors():
            assert same(cuda.values(tensor), cuda.pattern(tensor, 2))
        assert same(cuda.values(training.running_mean), cuda.pattern(training.running_mean, 1001))


def test_a_step_is_restored_into_tensors_being_captured(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(training.optimizer)
        mgr.save(0, training.state()).result()
        training.optimizer.step()
        mgr.save(1, training.state())
        mgr.restore(0, into=training.state())
        mgr.wait_until_finished()
        for tensor in training.optimizer.tensors():
            assert same(cuda.values(tensor), cuda.pattern(tensor, 2))
        for name, tensor in mgr.restore(1)["params"].items():
            assert same(tensor, cuda.pattern(tensor, 3)), name


def test_a_graph_being_captured_is_refused_with_advice(cuda: FakeCuda, root: Path) -> None:
    training = Training(cuda)
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(training.optimizer)
        cuda.capturing(True)
        try:
            with pytest.raises(sw.StepwellError, match="CUDA graph is being captured"):
                mgr.save(0, training.state())
        finally:
            cuda.capturing(False)
        mgr.save(0, training.state()).result()


@pytest.mark.parametrize("snapshot", ["auto", "lazy", "eager"])
@pytest.mark.parametrize("call", ["copy", "cuMemcpyDtoHAsync_v2", "cuEventQuery"])
def test_a_failing_device_fails_that_save_only(cuda: FakeCuda, root: Path, snapshot: Any, call: str) -> None:
    training = Training(cuda)
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(training.optimizer)
        mgr.save(0, training.state()).result()
        if call == "cuMemcpyDtoHAsync_v2":
            cuda.fail("cuMemcpyBatchAsync", 0, how=1)  # one by one then, of which the fourth fails
        cuda.fail(call, 3, how=2 if call == "copy" else 1)
        with pytest.raises(sw.SaveFailed, match=r"Fake GPU 0.*CUDA_ERROR_LAUNCH_FAILED") as caught:
            mgr.save(1, training.state(), snapshot=snapshot).result()
        assert caught.value.kind == "save_failed"
        cuda.heal()
        mgr.save(1, training.state()).result()
        assert mgr.all_steps() == [0, 1]
        training.check(mgr.restore(0), version=2, forwards=0)


def test_without_a_driver_a_tensor_is_copied_by_torch(
    cuda: FakeCuda, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = cuda.tensor(np.arange(10, dtype=np.float32))
    copied = torch.arange(10.0)
    # Expanded views are, since a device would copy them element by element.
    expanded = cuda.tensor(np.arange(10, dtype=np.float32), strides=(0,))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copied)
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"plain": tensor, "expanded": expanded}).result()
        found = mgr.restore(0)
        assert (found["plain"] == np.arange(10)).all()
        assert (found["expanded"] == np.arange(10)).all()


def test_what_a_process_would_copy_from_is_told(cuda: FakeCuda) -> None:
    assert sw.engine_info(cuda=True)["cuda"] == {"driver": 13000, "devices": ["Fake GPU 0", "Fake GPU 1"]}


def test_unguarded_changes_are_found_and_named_if_asked(cuda: FakeCuda, root: Path) -> None:
    first, second = (cuda.tensor(np.zeros(1 << 21, np.float32)) for _ in range(2))
    with sw.CheckpointManager(root, staging_bytes=16 << 20, options=sw.Options(detect_torn=True)) as mgr:
        cuda.random(1, 20_000)
        other = cuda.stream()
        saved = []
        for step in range(50):
            save = mgr.save(step, {"params": {"a": first, "b": second}}, snapshot="lazy")
            # Before its capture, or after it, as it comes.
            cuda.update(second, 2 + step, other)
            torn = save.exception()
            if torn is not None:
                break
            saved.append(step)
        assert isinstance(torn, sw.errors.TornSnapshot)
        assert "`params/b` was changed after its save was called" in str(torn)
        assert torn.leaf == "params/b"
        assert mgr.all_steps() == saved
    cuda.violations()


def test_a_module_is_filled_on_the_device_without_host_memory(
    cuda: FakeCuda, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for n, shape in enumerate(SHAPES):
                self.register_parameter(f"p{n}", torch.nn.Parameter(cuda.tensor(np.zeros(shape, np.float32))))

    net = Net()
    optimizer = Overwriting(list(net.parameters()), cuda)
    state = {"train": sw.torch.TrainState(net, optimizer), "step": 3}
    optimizer.step()
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(optimizer)
        mgr.save(0, state).result()
        optimizer.step()
        # A copy through the host would be one of torch's.
        monkeypatch.setattr(torch.Tensor, "copy_", None)
        mgr.restore(into=state, include="train/**")
        for tensor in optimizer.tensors():
            assert same(cuda.values(tensor), cuda.pattern(tensor, 2))
        optimizer.step()
        mgr.restore(into=state)
        for tensor in optimizer.tensors():
            assert same(cuda.values(tensor), cuda.pattern(tensor, 2))


def test_ties_on_a_device_are_filled_once(cuda: FakeCuda, root: Path) -> None:
    one, other = (cuda.tensor(np.full(1000, value, np.float32)) for value in (1, 2))
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"a": one, "b": one, "c": other, "n": 1}).result()
        mgr.restore(0, into={"a": other, "b": other, "n": 1}, include=["a", "b", "n"])
        assert (cuda.values(other) == 1).all()
        with pytest.raises(sw.MismatchError, match="are one array in memory, but their stored values differ"):
            mgr.restore(0, into={"a": one, "c": one, "n": 1}, include=["a", "c", "n"])
        assert (cuda.values(one) == 1).all()


def test_new_tensors_on_a_device_are_read_straight_to_it(
    cuda: FakeCuda, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []

    def empty(
        shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> torch.Tensor:
        assert torch.device(device).type == "cuda"
        tensor = cuda.tensor(np.zeros(shape, str(dtype).removeprefix("torch.")))
        if shape != 0:  # of the check of device=
            made.append(tensor)
        return tensor

    values = {"a": np.arange(3000, dtype=np.float32).reshape(30, 100), "b": {"c": np.arange(7)}, "n": 3}
    like = {
        "a": cuda.tensor(np.zeros((30, 100), np.float32)),
        "b": {"c": cuda.tensor(np.zeros(7, np.int64))},
        "n": 0,
    }
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, values).result()
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.Tensor, "to", lambda self, place: self)
        for options in ({"to": "torch", "device": "cuda"}, {"like": like}):
            made.clear()
            found = mgr.restore(0, **options)
            assert len(made) == 2
            assert found["n"] == 3
            assert found["a"] in made
            assert (cuda.values(found["a"]) == values["a"]).all()
            assert (cuda.values(found["b"]["c"]) == np.arange(7)).all()
        assert (cuda.values(like["a"]) == 0).all()
