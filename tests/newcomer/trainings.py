"""A newcomer's first training with PyTorch, JAX or the Hugging Face Trainer. It is killed in the
middle and started again. It prints the steps before its first one, and its last loss, which is that
of a run that nobody disturbed."""

from __future__ import annotations

TORCH = """
import time, torch, stepwell as sw

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = {"train": sw.torch.TrainState(model, optimizer), "rng": torch.default_generator}
with sw.CheckpointManager("run", save_policy=2) as mgr:
    state, first = mgr.resume(state)
    print("steps before:", first)
    for step in range(first, 30):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mgr.save(step, state)
        time.sleep(0.05)
print(loss.item())
"""

JAX = """
import time, jax, jax.numpy as jnp, stepwell as sw

@jax.jit
def train(state):
    key, part = jax.random.split(state["key"])
    rows = jax.random.normal(part, (16, 8))
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((rows @ w) ** 2))(state["w"])
    speed = 0.9 * state["speed"] + slope
    return {"w": state["w"] - 0.01 * speed, "speed": speed, "key": key}, loss

state = {"w": jnp.ones((8, 8)), "speed": jnp.zeros((8, 8)), "key": jax.random.key(0)}
with sw.CheckpointManager("run", save_policy=2) as mgr:
    state, first = mgr.resume(state)
    print("steps before:", first)
    for step in range(first, 30):
        state, loss = train(state)
        mgr.save(step, state)
        time.sleep(0.05)
print(float(loss))
"""

TRAINER = """
import time
from pathlib import Path
import torch, stepwell.integrations.transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Slowly(TrainerCallback):
    def on_train_begin(self, arguments, state, *others, **more):
        print("steps before:", state.global_step)

    def on_step_end(self, *arguments, **others):
        time.sleep(0.05)

torch.manual_seed(0)
rows = [torch.randint(0, 64, (8,)) for _ in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=1))
arguments = TrainingArguments(
    "run", max_steps=30, save_steps=2, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Slowly()])
stepwell.integrations.transformers.use(trainer)
trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
print([row["loss"] for row in trainer.state.log_history if "loss" in row][-1])
"""

#: Each with the pattern of its committed steps.
SCRIPTS = {
    "torch": (TORCH, "run/step_*"),
    "jax": (JAX, "run/step_*"),
    "transformers": (TRAINER, "run/checkpoint-*/stepwell/step_*"),
}
