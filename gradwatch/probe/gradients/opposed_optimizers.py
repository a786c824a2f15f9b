"""Compare the gradients by which two optimizers move the weights that both of them hold."""

# P = pairs of updates

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.events import OPTIMIZERS_OPPOSED, Observation
from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import Arrival, is_capturing
from gradwatch.probe.gradients.gradient_sample import MIN_NUMBERS
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.records import LayerInfo

MAX_UPDATES = 1024
"""Number of updates to follow: a discriminator needs some updates before it tells the two kinds of samples apart."""

PAIRS = 16
"""Pairs of updates of different optimizers in a row that are judged together."""

OPPOSED = -0.8
"""Cosine, as the median over the pairs, at which one update takes back most of the other. A discriminator in both
optimizers reached -0.9 to -1; an encoder that two losses pull apart stayed above -0.6, and learned."""

MAX_NUMBERS = 4096
"""Number of leading numbers of the gradient to compare."""


@final
class OpposedOptimizers:
    """Follow one parameter that several optimizers hold, through their updates.

    For each update that follows an update of another optimizer, the cosine of their two gradients is computed on the
    device. If no parameter is shared, nothing is hooked.

    Args:
        optimizers: The watched optimizers.
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, optimizers: Sequence[Optimizer], params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        both = set().union(*(a & b for a, b in itertools.combinations(held, 2)))
        shared = [(p, layer) for p, layer in zip(params, layers, strict=True) if id(p) in both and p.requires_grad]
        self._param = next((p for p, _ in reversed(shared) if p.numel() >= MIN_NUMBERS), None)
        self._names = [layer.name for _, layer in shared]
        self._updates = 0
        self._last: tuple[Optimizer, Tensor] | None = None
        self._cosines: list[Tensor] = []  # of the pairs in progress
        self._sent: deque[Arrival] = deque()
        self._handles: list[RemovableHandle] = []
        for optimizer, ids in zip(optimizers, held, strict=True):
            # an ascent that another optimizer takes back, as in sharpness-aware minimization, is on purpose
            if id(self._param) in ids and not any(group.get("maximize") for group in optimizer.param_groups):
                self._handles.append(optimizer.register_step_pre_hook(inert_hook(self._before_update)))

    def find(self, _step: int = 0, /) -> Iterator[Observation]:
        """Yield an observation, after a step, for each run of pairs whose values have arrived."""
        while self._sent and self._sent[0].is_ready:
            (cosines_P,) = self._sent.popleft().values()
            cosine = float(np.median(cosines_P))
            if cosine <= OPPOSED:
                self.close()
                values = {"cosine": cosine, "tensors": len(self._names)}
                yield OPTIMIZERS_OPPOSED.observe(_common_module(self._names), values=values)
        if self._updates >= MAX_UPDATES:
            self.close()

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)
        self._last = None
        self._sent.clear()

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        grad = None if self._param is None else self._param.grad
        if grad is None or grad.layout != torch.strided or is_capturing([grad]):
            return
        self._updates += 1
        numbers = local_part(grad).detach().reshape(-1)[:MAX_NUMBERS].float().clone()
        if self._last is not None and self._last[0] is not optimizer:
            self._cosines.append(torch.cosine_similarity(numbers, self._last[1], dim=0))
        self._last = optimizer, numbers
        if len(self._cosines) == PAIRS:
            self._sent.append(Arrival([torch.stack(self._cosines)]))
            self._cosines = []


def _common_module(names: Sequence[str]) -> str | None:
    """Return the innermost module that holds all parameters, or None for the root."""
    paths = [name.split(".")[:-1] for name in names]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in same) or None
