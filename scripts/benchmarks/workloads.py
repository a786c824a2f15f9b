"""What the benchmarks train: models, their batches, torch's optimizers, and a loop over them written by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.models import _torchvision, gpt, mlp
from gradwatch.records import DataSpec

NUM_BATCHES = 64

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Workload:
    """A model, its batches, and how many steps one stretch takes: some seconds.

    Where steps are long, `turn` of them are made at once before another loop has its turn. `states` are those of the
    optimizer that all loops go on from, by the address of the weights; without them each has its own.
    """

    title: str
    stretch: int
    model: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    turn: int | None = None
    optimizer: str = "fused"
    states: Mapping[int, dict[str, Any]] = field(default_factory=dict)


def shared(workload: Workload) -> Workload:
    """Return a workload whose loops all train the same weights by the same states, which lie in memory only once."""
    torch.manual_seed(0)
    first = workload.model()

    def model() -> nn.Module:
        made = copy.deepcopy(first)
        mine, its = (itertools.chain(of.parameters(), of.buffers()) for of in (made, first))
        for a, b in zip(mine, its, strict=True):
            a.data = b.data
        return made

    # filled by the first step of the first loop, or by the first optimizer
    return replace(workload, model=model, states={p.data_ptr(): {} for p in first.parameters()})


def blocks(num: int, width: int) -> nn.Module:
    """Return a residual stack with four small tensors per block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + 0.1 * self.linear(self.norm(x)).relu()
            return out

    return nn.Sequential(*(Block() for _ in range(num)), nn.Linear(width, 10))


def labelled(shape: tuple[int, ...], classes: int = 10) -> Batches:
    """Return batches of noise with labels."""
    return [(torch.randn(shape), torch.randint(classes, shape[:1])) for _ in range(NUM_BATCHES)]


def texts(batch: int, length: int, vocabulary: int) -> Batches:
    """Return batches of random tokens, each to be predicted from those before it."""
    tokens = [torch.randint(vocabulary, (batch, length + 1)) for _ in range(NUM_BATCHES)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def classes(*shape: int) -> DataSpec:
    """Return what a model must know of inputs of a shape in ten classes."""
    return DataSpec(input_shape=shape, outputs=10, kind="classes")


def deep() -> nn.Module:
    """Return an MLP whose every layer has as many weights as the one before."""
    return mlp.build(classes(256), depth=30, width=256, residual=True)


WORKLOADS = {
    "tiny": Workload(
        "784-128-10, batch 32",
        3600,
        lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
        lambda: labelled((32, 784)),
    ),
    "mlp": Workload("MLP 30 x 256, batch 128", 77, deep, lambda: labelled((128, 256))),
    "mlp32": Workload("the same, batch 32", 154, deep, lambda: labelled((32, 256))),
    "mlp256": Workload("the same, batch 256", 46, deep, lambda: labelled((256, 256))),
    "resnet18": Workload(
        "ResNet-18, 32 x 32, batch 64",
        10,
        lambda: _torchvision.build(classes(3, 32, 32), name="resnet18"),
        lambda: labelled((64, 3, 32, 32)),
        turn=1,
    ),
    "gpt": Workload(
        "GPT 6 x 256, sequence 128, batch 8",
        10,
        lambda: gpt.build(DataSpec(input_shape=(128,), outputs=96, kind="tokens"), layers=6, heads=8, width=256),
        lambda: texts(8, 128, 96),
        turn=1,
    ),
    "many": Workload("1,030 small tensors", 58, lambda: blocks(257, 48), lambda: labelled((64, 48))),
}


@dataclass(frozen=True)
class Loop:
    """A hand-written loop, and the places where a tool may take hold."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    steps: int

    def run(self, before_update: Callable[[], None] | None = None, after: Callable[..., None] | None = None) -> None:
        """Train one stretch."""
        for x, y in itertools.islice(self.batches, self.steps):
            loss = nn.functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            if before_update:
                before_update()
            self.optimizer.step()
            if after:
                after(loss, batch=x)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": partial(torch.optim.AdamW, fused=True),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "muon": torch.optim.Muon,
}
"""Torch's optimizers. Muon takes matrices only, so the other parameters are frozen under it."""


def loop(workload: Workload) -> Loop:
    """Return a loop over a new model of a workload."""
    torch.manual_seed(0)
    model = workload.model().train()
    if workload.optimizer == "muon":
        for p in model.parameters():
            p.requires_grad_(p.ndim == 2)
    params = [p for p in model.parameters() if p.requires_grad]
    made = OPTIMIZERS[workload.optimizer](params, lr=1e-4)
    for p in params if workload.states else ():
        state = workload.states[p.data_ptr()]
        for name, value in made.state[p].items():  # some optimizers make it at once
            state.setdefault(name, value)
        made.state[p] = state
    return Loop(model, made, itertools.cycle(workload.batches()), workload.stretch)
