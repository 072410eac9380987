"""The model that jobs of DeepSpeed train."""

from __future__ import annotations

from typing import Any

import torch


class Model(torch.nn.Module):
    """Sizes that no number of ranks divides, a tie, buffers, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.a = torch.nn.Linear(7, 5)
        self.b = torch.nn.Linear(5, 7)
        self.frozen = torch.nn.Linear(7, 3)
        self.register_buffer("mean", torch.arange(7.0) / 3)
        self.register_buffer("seen", torch.tensor(3))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = self.b(torch.relu(self.a(h))) * self.scale - self.mean.to(h.dtype)
        return self.head(h).float().square().mean() + self.frozen(h).float().mean()


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


class Layer(torch.nn.Module):
    """A gated MLP behind a projection, with a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.value = torch.nn.Linear(width, width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.out(self.value(self.norm(x)))
        return x + self.down(torch.relu(self.gate(h)))


class Large(torch.nn.Module):
    """12.7 million parameters: 51 MB of weights, and twice that of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(2048, 1024)
        self.layers = torch.nn.ModuleList(Layer(1024, 4096) for _ in range(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return h.float().square().mean()
