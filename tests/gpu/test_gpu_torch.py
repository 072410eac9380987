"""Tensors of torch on a CUDA device: nothing is torn, nothing waits that need not, everything comes
back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
import torch

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
if hasattr(torch, "float8_e4m3fn"):
    DTYPES.append(torch.float8_e4m3fn)


def busy(seconds: float = 0.3) -> None:
    """Keeps the current stream busy for about so long, and returns at once."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def still_busy() -> bool:
    return not torch.cuda.current_stream().query()


def values_like(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 120, (*shape, dtype.itemsize), dtype=torch.uint8, device="cuda"
    )
    return raw.view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.view(torch.uint8).flatten() if one.dim() else one,
            other.view(torch.uint8).flatten() if other.dim() else other,
        )
    )


def model(width: int = 256, depth: int = 4) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.GELU()]
    return torch.nn.Sequential(*layers).cuda()


def train_step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = net(torch.randn(64, 256, device="cuda")).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss)


def state_of(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def tensors(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{path}/{key}").items()}


@pytest.mark.parametrize("snapshot", ["auto", "lazy", "eager"])
@pytest.mark.parametrize("staging", [None, 16 << 20])
def test_every_step_of_a_training_reads_back_as_it_was(
    root: Path, snapshot: Any, staging: int | None
) -> None:
    torch.manual_seed(0)
    net = model(width=1024)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    inputs = torch.randn(64, 1024, device="cuda")
    options: dict[str, Any] = {} if staging is None else {"staging_bytes": staging}
    expected = []
    with sw.CheckpointManager(root, max_pending=2, **options) as mgr:
        mgr.attach(optimizer)
        for step in range(8):
            loss = net(inputs).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            # A lazy snapshot promises that all of it changes in guards; the forward changes the
            # statistics of BatchNorm.
            optimizer.step()
            expected.append({name: one.clone() for name, one in tensors(state_of(net, optimizer)).items()})
            save = mgr.save(step, state_of(net, optimizer), snapshot=snapshot)
            if snapshot == "lazy":
                with mgr.update_guard():
                    pass
        mgr.wait_until_finished()
        assert save.result() == 7
        for step, wanted in enumerate(expected):
            found = tensors(mgr.restore(step, to="torch"))
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert same(found[name], tensor), (step, name)


def test_save_and_guard_do_not_wait_for_the_device(root: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(1 << 20, device="cuda")) for _ in range(40)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    # Adam counts its steps on the host, beside what is on the device.
    state = {"w": [{"weight": one, "step": torch.tensor(0.0)} for one in weights]}
    with sw.CheckpointManager(root) as mgr:
        mgr.attach(optimizer)
        mgr.prepare(state)
        for one in weights:
            one.grad = torch.zeros_like(one)
        mgr.save(0, state)
        optimizer.step()  # the first step loads kernels, and waits for the device while it does
        before = [one.detach().clone() for one in weights]
        for one in weights:
            one.grad = torch.ones_like(one)
        mgr.wait_until_finished()
        torch.cuda.synchronize()
        busy(1.0)
        save = mgr.save(1, state)
        assert still_busy(), "save() waited for the stream"
        optimizer.step()
        assert still_busy(), "the step waited on the host"
        save.result()
        torch.cuda.synchronize()
        found = [one["weight"] for one in mgr.restore(1, to="torch")["w"]]
        assert all(same(one, other) for one, other in zip(found, before, strict=True))
        assert all(same(one, other - 1) for one, other in zip(weights, before, strict=True))


def test_what_the_forward_changes_is_fenced_when_save_returns(root: Path) -> None:
    mean = torch.zeros(32 << 20, device="cuda")
    with sw.CheckpointManager(root) as mgr:
        for step in range(5):
            mean.fill_(step)
            mgr.save(step, {"mean": mean})
            mean.add_(100)
        mgr.wait_until_finished()
        for step in range(5):
            assert (mgr.restore(step)["mean"] == step).all()


def test_work_on_another_stream_is_ordered(root: Path) -> None:
    weight = torch.zeros(32 << 20, device="cuda")
    side = torch.cuda.Stream()
    with sw.CheckpointManager(root) as mgr, torch.cuda.stream(side):
        for step in range(5):
            busy(0.05)
            weight.fill_(step)
            mgr.save(step, {"w": weight}, snapshot="lazy")
            with mgr.update_guard():
                weight.fill_(-1)
        mgr.wait_until_finished()
        for step in range(5):
            assert (mgr.restore(step)["w"] == step).all()


def test_a_replayed_graph_is_guarded(root: Path) -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with sw.CheckpointManager(root) as mgr:
        with pytest.raises(sw.StepwellError, match="CUDA graph is being captured"), torch.cuda.graph(graph):
            mgr.save(0, {"w": weight})
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weight.add_(1)
        for step in range(5):
            mgr.save(step, {"w": weight}, snapshot="lazy")
            with mgr.update_guard():
                graph.replay()
        mgr.wait_until_finished()
        for step in range(5):
            assert (mgr.restore(step)["w"] == step).all()


def test_a_graph_that_another_thread_captures_is_not_disturbed(root: Path) -> None:
    weight = torch.zeros(64 << 20, device="cuda")
    other = torch.zeros(1 << 20, device="cuda")
    with sw.CheckpointManager(root, staging_bytes=16 << 20) as mgr:
        save = mgr.save(0, {"w": weight}, snapshot="lazy")
        # The capture of the save goes on while torch captures a graph in its strictest mode.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for _ in range(50):
                other.add_(1)
        assert save.result() == 0
        graph.replay()
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_round_trips_on_the_device(root: Path, dtype: torch.dtype) -> None:
    base = values_like(dtype, 60, 50, 40)
    state = {
        "whole": base,
        "transposed": base[0].t(),
        "slice": base[3:50, 7:9, 5:30],
        "permuted": base.permute(2, 0, 1),
        "step": base[::3, :, ::2],
        "one": base[0, 0, 0],
        "none": base[:0],
        "tied": base,
    }
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        found = mgr.restore(0, to="torch")
        for name, tensor in state.items():
            assert same(found[name], tensor), name
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        into["tied"] = into["whole"]
        mgr.restore(0, into=into)
        torch.cuda.synchronize()
        for name, tensor in state.items():
            assert same(into[name], tensor), name
        new = mgr.restore(0, to="torch", device="cuda")
        assert all(one.is_cuda for one in new.values())
        for name, tensor in state.items():
            assert same(new[name], tensor), name


def test_expanded_views_are_stored_as_their_values(root: Path) -> None:
    row = torch.arange(100.0, device="cuda")
    state = {
        "expanded": row.expand(50, 100),
        "conj": torch.view_as_complex(torch.randn(10, 2, device="cuda")).conj(),
    }
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        found = mgr.restore(0, to="torch")
        assert same(found["expanded"], row.expand(50, 100).contiguous())
        assert same(found["conj"], state["conj"].resolve_conj())


def test_twenty_thousand_small_tensors_come_back(root: Path) -> None:
    state = {f"w{n}": torch.full((n % 50 + 1,), float(n), device="cuda") for n in range(20_000)}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        into = {name: torch.zeros_like(one) for name, one in state.items()}
        mgr.restore(0, into=into)
        torch.cuda.synchronize()
        assert all(bool((into[name] == one).all()) for name, one in list(state.items())[::97])


def test_tensors_are_let_go_of_when_they_are_captured(root: Path) -> None:
    gc.collect()
    others = torch.cuda.memory_allocated()
    with sw.CheckpointManager(root) as mgr:
        weight = torch.randn(64 << 20, device="cuda")
        expected = weight[::1000].cpu()
        mgr.prepare({"w": weight})
        save = mgr.save(0, {"w": weight}, snapshot="lazy")
        del weight
        # The allocator must not hand out memory that is being copied.
        junk = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
        save.result()
        assert (torch.from_numpy(mgr.restore(0)["w"][::1000]) == expected).all()
        del junk
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - others < 64 << 20


def test_no_memory_of_the_device_is_taken(root: Path) -> None:
    weight = torch.randn(64 << 20, device="cuda")
    with sw.CheckpointManager(root) as mgr:
        mgr.prepare({"w": weight})
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for step in range(3):
            mgr.save(step, {"w": weight})
            # Streams, events and the bookkeeping of the driver; nothing of the size of the state.
            assert free - torch.cuda.mem_get_info()[0] < 64 << 20
        mgr.wait_until_finished()


def test_a_train_state_resumes_on_the_device_to_the_bit(root: Path) -> None:
    def run(steps: int, resume: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        state = {"train": sw.torch.TrainState(net, optimizer)}
        with sw.CheckpointManager(root) as mgr:
            mgr.attach(optimizer)
            if resume:
                mgr.restore(into=state)
            for step in range(mgr.next_step(), steps):
                torch.manual_seed(100 + step)
                train_step(net, optimizer)
                mgr.save(step, state, exists="skip")
        return {name: one.clone() for name, one in tensors({"m": net.state_dict()}).items()}

    torch.use_deterministic_algorithms(True, warn_only=True)
    run(3, resume=False)
    resumed = run(6, resume=True)

    def straight() -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(6):
            torch.manual_seed(100 + step)
            train_step(net, optimizer)
        return tensors({"m": net.state_dict()})

    for name, tensor in straight().items():
        assert torch.allclose(resumed[name], tensor, atol=1e-6), name


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="skipped: one CUDA device only"
)
def test_two_devices_of_one_process_are_one_state(root: Path) -> None:
    state = {f"w{n}": torch.randn(8 << 20, device=f"cuda:{n % 2}") for n in range(6)}
    expected = {name: one.cpu() for name, one in state.items()}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state, snapshot="lazy")
        with mgr.update_guard():
            for one in state.values():
                one.zero_()
        mgr.wait_until_finished()
        found = mgr.restore(0, to="torch")
        assert all(same(found[name], one) for name, one in expected.items())


def test_unguarded_changes_are_found_if_asked(root: Path) -> None:
    first, second = (torch.zeros(64 << 20, device="cuda") for _ in range(2))
    with sw.CheckpointManager(root, staging_bytes=16 << 20, options=sw.Options(detect_torn=True)) as mgr:
        save = mgr.save(0, {"a": first, "b": second}, snapshot="lazy")
        second.fill_(1)
        torch.cuda.synchronize()
        with pytest.raises(sw.errors.TornSnapshot, match="`b`"):
            save.result()


def test_a_trace_of_the_device_equals_one_of_the_host(root: Path) -> None:
    state = {"w": torch.randn(1 << 20, device="cuda"), "half": values_like(torch.bfloat16, 300, 70).T}
    with sw.CheckpointManager(root, prove_resume=1) as mgr:
        mgr.save(3, state).result()

    def outcome(traced: object, to: object = None) -> tuple[str, str | None]:
        events: list[object] = []
        with sw.CheckpointManager(root, prove_resume=1, on_event=events.append) as mgr:
            mgr.restore(into=to) if to else mgr.restore(to="torch")
            mgr.trace(3, traced)
        (event,) = (event for event in events if isinstance(event, sw.events.TraceEvent))
        return event.outcome, event.leaf

    assert outcome(sw.restore(root, to="torch")) == ("same", None)
    assert outcome(state, to=state) == ("same", None)
    state["w"].view(torch.uint8)[77] ^= 1
    with pytest.warns(sw.errors.ResumeDiffers):
        assert outcome(state) == ("differs", "w")
