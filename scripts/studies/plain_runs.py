"""Count alarms on the plainest healthy loops, which people write first: one recipe per task, many seeds.

    python scripts/studies/plain_runs.py --seeds 40
    python scripts/studies/plain_runs.py --task linear --task gpt

`false_alarms.py` draws unusual trainings at random. Here nothing but the seed differs, so that a rule that takes noise
for evidence shows up as a rate. Each line names the task, the runs with a warning or worse, and what they were.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradwatch
from gradwatch.records import Severity

Batches = Iterator[tuple[Tensor, Tensor]]
"""Yields the loss of a batch and its inputs."""

Recipe = Callable[[], tuple[nn.Module, Batches, int]]
"""Returns a model, its losses, and the number of steps."""

CONTEXT, VOCABULARY = 16, 12


def linear() -> tuple[nn.Module, Batches, int]:
    """Return a linear regression on noise-free targets, in batches of 16."""
    truth, model = torch.randn(16, 1), nn.Linear(16, 1)

    def losses() -> Batches:
        while True:
            x = torch.randn(16, 16)
            yield functional.mse_loss(model(x), x @ truth), x

    return model, losses(), 3000


def perceptron(*, noise: float) -> tuple[nn.Module, Batches, int]:
    """Return a regression of a smooth function, with Gaussian noise on the targets."""
    truth = torch.randn(8) / 2
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def losses() -> Batches:
        while True:
            x = torch.randn(32, 8)
            y = torch.sin(x @ truth)[:, None] + noise * torch.randn(32, 1)
            yield functional.mse_loss(model(x), y), x

    return model, losses(), 1000


class TinyGPT(nn.Module):
    """A causal transformer of two blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token, of shape (batch, place, token)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places(torch.arange(length))
        return self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))  # type: ignore[no-any-return]


def gpt() -> tuple[nn.Module, Batches, int]:
    """Return a language model of a random order of tokens in which every fourth transition is random."""
    model, follows = TinyGPT(), torch.randperm(VOCABULARY)

    def losses() -> Batches:
        while True:
            tokens = torch.randint(VOCABULARY, (16, CONTEXT + 1))
            for place in range(1, CONTEXT + 1):
                is_kept = torch.rand(16) < 0.75
                tokens[is_kept, place] = follows[tokens[is_kept, place - 1]]
            scores = model(tokens[:, :-1])
            yield functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()), tokens[:, :-1]

    return model, losses(), 300


TASKS: dict[str, Recipe] = {
    "linear": linear,
    "mlp": lambda: perceptron(noise=0.0),
    "noisy-mlp": lambda: perceptron(noise=1.0),
    "gpt": gpt,
}


def alarms(recipe: Recipe, seed: int) -> tuple[list[str], tuple[float, float]]:
    """Train one run and return its warnings, with their steps, and the mean of its first and last 20 losses."""
    torch.manual_seed(seed)
    model, losses, steps = recipe()
    optimizer, values = torch.optim.Adam(model.parameters(), lr=1e-3), []
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(steps):
            loss, inputs = next(losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=inputs)
            values.append(float(loss.detach()))
    found = [f"{f.kind}@{f.step}" for f in monitor.findings() if f.severity >= Severity.WARNING]
    return found, (sum(values[:20]) / 20, sum(values[-20:]) / 20)


def main() -> None:
    """Train the runs and print a line for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="only these; may be given more than once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    for name in options.task or TASKS:
        runs = [alarms(TASKS[name], seed) for seed in range(options.seeds)]
        first, last = (sum(ends[i] for _, ends in runs) / len(runs) for i in (0, 1))
        loud = [found for found, _ in runs if found]
        kinds = Counter(kind for found in loud for kind in found)
        told = ", ".join(f"{kind} x{count}" for kind, count in kinds.most_common()) or "nothing"
        print(f"{name:10} {len(loud)} of {len(runs)} with an alarm; loss {first:.3g} -> {last:.3g}; {told}", flush=True)


if __name__ == "__main__":
    main()
