"""Measure how long a training waits for its saves, with a trainer's own checkpoints and with
stepwell's.

    python tests/bench/trainers.py                    # about 10 minutes
    python tests/bench/trainers.py --rounds 1 --only dcp

Each round runs the same training twice in shuffled order, with about 1 GiB of state and three
saves. For DCP (torch.distributed.checkpoint) and Orbax, the state is a dict of tensors or arrays.
The others train a model.

Two are not measured. torchtitan saves by calls of DCP, which are measured. The checkpoints of Ray
Train are files that the training function writes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measure import Spare, settle, sync_file_system
from tables import progress, spread, table

#: Edge and number of the layers of a model. With the moments of AdamW, its state has 1 GiB.
EDGE, LAYERS = 4096, 5

#: Seconds that each save took of the training, and until it was durable.
Times = tuple[list[float], list[float]]


class Watched:
    """Times the calls that a trainer makes to save."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds.append(time.perf_counter() - begun)

        return timed


def dcp(folder: Path, is_ours: bool, is_async: bool) -> Times:
    import stepwell.integrations.dcp as ours
    import torch.distributed.checkpoint as theirs

    module: Any = ours if is_ours else theirs
    state = {f"layers.{n}.weight": torch.randn(2048, 4096) for n in range(32)}
    blocked, durable = [], []
    for number in range(3):
        begun = time.perf_counter()
        path = folder / str(number)
        if is_async:
            pending = module.async_save(state, checkpoint_id=path)
            blocked.append(time.perf_counter() - begun)
            pending.result()
        else:
            module.save(state, checkpoint_id=path)
            blocked.append(time.perf_counter() - begun)
        if not is_ours:
            sync_file_system(folder)
        durable.append(time.perf_counter() - begun)
    return blocked, durable


def hugging_face(folder: Path, is_ours: bool) -> Times:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    row = torch.randint(0, 1000, (8,))
    sizes = {"vocab_size": 32768, "n_positions": 8, "n_embd": 1024, "n_layer": 4, "n_head": 8}
    arguments = TrainingArguments(
        str(folder), max_steps=6, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(**sizes, loss_type="ForCausalLM"))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 8)
    if is_ours:
        from stepwell.integrations.transformers import use

        use(trainer)
    watched = Watched()
    trainer._save_checkpoint = watched(trainer._save_checkpoint)
    trainer.train()
    return watched.seconds, []


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(EDGE, EDGE) for _ in range(LAYERS)))


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of a training."""
    optimizer.zero_grad()
    model(torch.ones(1, EDGE)).square().mean().backward()
    optimizer.step()


def accelerate(folder: Path, is_ours: bool) -> Times:
    from accelerate import Accelerator

    model = layers()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if is_ours:
        from stepwell.integrations.accelerate import use

        use(accelerator)
    save = Watched()
    for number in range(3):
        update(model, optimizer)
        save(accelerator.save_state)(folder / str(number))
    return save.seconds, []


def ignite(folder: Path, is_ours: bool) -> Times:
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from stepwell.integrations.ignite import StepwellSaver

    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Engine(lambda *_: update(model, optimizer))
    saver = StepwellSaver(folder) if is_ours else DiskSaver(folder)
    watched = Watched()
    handler = watched(Checkpoint({"model": model, "optimizer": optimizer}, saver, n_saved=None))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: handler(engine))
    trainer.run([0, 1, 2])
    return watched.seconds, []


def keras(folder: Path, is_ours: bool) -> Times:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras as library
    from stepwell.integrations.keras import StepwellCheckpoint

    model = library.Sequential([library.layers.Dense(EDGE) for _ in range(LAYERS)])
    model.compile(optimizer="adamw", loss="mse")
    rows = torch.ones(1, EDGE).numpy()
    own = library.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    callback = StepwellCheckpoint(folder / "run") if is_ours else own
    watched = Watched()
    callback.on_epoch_end = watched(callback.on_epoch_end)
    model.fit(rows, rows, epochs=3, verbose=0, callbacks=[callback])
    return watched.seconds, []


def orbax(folder: Path, is_ours: bool) -> Times:
    import jax

    if is_ours:
        import stepwell.integrations.orbax as ocp
    else:
        import orbax.checkpoint as ocp
    key = jax.random.key(0)
    state = {f"layers.{n}": jax.random.normal(key, (2048, EDGE)) for n in range(32)}
    blocked, durable = [], []
    with ocp.CheckpointManager(folder / "run") as manager:
        for step in range(3):
            state = jax.block_until_ready(jax.tree.map(lambda one: one + 1, state))
            begun = time.perf_counter()
            manager.save(step, args=ocp.args.StandardSave(state))
            blocked.append(time.perf_counter() - begun)
            manager.wait_until_finished()
            if not is_ours:
                sync_file_system(folder)
            durable.append(time.perf_counter() - begun)
    return blocked, durable


def deepspeed(folder: Path, is_ours: bool) -> Times:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    import deepspeed as library
    import stepwell as sw
    from stepwell.integrations.deepspeed import TrainState

    # It is compiled when it is first used, which needs more than Python packages.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    model = layers()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    with sw.CheckpointManager(folder / "run") as mgr:
        state = TrainState(engine)
        save = Watched()
        for step in range(3):
            engine.backward(engine(torch.ones(1, EDGE)).square().mean())
            engine.step()
            if is_ours:
                save(mgr.save)(step, state)
            else:
                save(engine.save_checkpoint)(folder / "own", tag=str(step))
    return save.seconds, []


def lightning(folder: Path, is_ours: bool) -> Times:
    import lightning as library
    from lightning.pytorch.callbacks import ModelCheckpoint
    from stepwell.integrations.lightning import StepwellIO

    class Model(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(6, EDGE), batch_size=1)

    trainer = library.Trainer(
        accelerator="cpu", max_steps=6, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
        plugins=[StepwellIO()] if is_ours else [],
    )  # fmt: skip
    watched = Watched()
    trainer.save_checkpoint = watched(trainer.save_checkpoint)  # type: ignore[method-assign]
    trainer.fit(Model())
    return watched.seconds, []


CASES: dict[str, Callable[[Path, bool], Times]] = {
    "dcp.save": lambda folder, is_ours: dcp(folder, is_ours, is_async=False),
    "dcp.async_save": lambda folder, is_ours: dcp(folder, is_ours, is_async=True),
    "transformers.Trainer": hugging_face,
    "Lightning": lightning,
    "accelerate": accelerate,
    "DeepSpeed": deepspeed,
    "Ignite": ignite,
    "Keras": keras,
    "Orbax": orbax,
}


def in_child(call: Callable[[], Times]) -> Iterator[Times]:
    """Runs a training in a process of its own."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            theirs.send(call())
        theirs.close()
        os._exit(0)

    child = context.Process(target=run)
    child.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        child.join()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", default="", help="cases whose name has this text")
    options.add_argument("--directory", type=Path)
    asked = options.parse_args()
    cases = {name: case for name, case in CASES.items() if asked.only in name}
    found: dict[tuple[str, bool], Times] = {(name, who): ([], []) for name in cases for who in (False, True)}
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    spare = Spare(6 << 30)
    spare.hold()
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        for number in range(asked.rounds):
            runs = [(name, who) for name in cases for who in (False, True)]
            random.shuffle(runs)
            medians = {}
            for name, is_ours in runs:
                place = Path(folder) / f"{number} {name} {is_ours}"
                place.mkdir()
                spare.release()
                for blocked, durable in in_child(lambda: cases[name](place, is_ours)):  # noqa: B023
                    # The first save of a process makes memory and files that later ones have.
                    found[name, is_ours][0].extend(blocked[1:])
                    found[name, is_ours][1].extend(durable[1:])
                    medians[name, is_ours] = statistics.median(blocked[1:])
                    progress(f"{name}, {'stepwell' if is_ours else 'its own'}", medians[name, is_ours])
                spare.hold()
            for name in cases:
                ratios[name].append(medians[name, True] / medians[name, False])
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
            settle(5)
    rows = [["", "training waits, own", "with stepwell", "ratio", "durable, own", "with stepwell"]]
    for name in cases:
        own, ours = found[name, False], found[name, True]
        rows.append(
            [name, spread(own[0]), spread(ours[0]), spread(ratios[name]), spread(own[1]), spread(ours[1])]
        )
    print(table(rows))


if __name__ == "__main__":
    main()
