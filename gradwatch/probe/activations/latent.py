"""Measure how much information the latent of a variational autoencoder carries about its samples."""

# B = samples, D = dimensions of a latent

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from gradwatch.events import LATENT_UNUSED, LATENT_USED, Observation
from gradwatch.probe.device.sync import HostTransfer
from gradwatch.probe.graph.graph import Graph, Node, operation, shape
from gradwatch.probe.output_reader import ForwardCall
from gradwatch.probe.parameters import Models, module_names

MIN_SAMPLES = 8
"""Minimum number of samples: the first dimension of a latent."""

SEARCHED_STEPS = 4
"""Sampled steps in which a latent must occur: most models have none."""

UNUSED_READS = 4
"""Consecutive reads without information after which a latent is unused."""

UNUSED_NATS = 0.2
"""Maximum information of all dimensions together. A latent of digits has 10 to 20 nats."""

MAX_CHANGES = 8
"""Maximum number of events of one run."""


class Latent(NamedTuple):
    """A sample of a normal distribution that a layer parametrizes.

    Args:
        deviation: Operation that computes the standard deviation.
        layer: Name of the layer, or None.
    """

    deviation: Node
    layer: str | None


@final
class LatentReader:
    """Read the standard deviations of latents at sampled steps.

    A latent is drawn as `mean + exp(...) * noise`, and the loss also uses the logarithm of the deviation for the
    divergence from a prior. Near a minimum, a dimension of deviation s carries -log s nats about the sample, since the
    divergence pulls every dimension without information to a deviation of 1 (Lucas et al. 2019,
    https://arxiv.org/abs/1911.02469). The values arrive later: a later call of `find` returns what they show.

    Args:
        models: A model, or several by name.

    Attributes:
        is_over: Whether nothing more is read.
    """

    part: ClassVar[str] = "the latent"

    def __init__(self, models: Models) -> None:
        self._modules = module_names(models)
        self._latent: Latent | None = None
        self._measured: Tensor | None = None
        self._transfer: HostTransfer | None = None
        self._layer: str | None = None
        self._searched = self._unused = self._changes = 0
        self._has_prior = self._is_reported = self._has_read = False
        self.is_over = False

    def clear(self) -> None:
        """Drop the data of the step before."""
        self._latent, self._measured, self._has_read = None, None, False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back; it does not wait for measurements in flight."""
        return {
            "searched": self._searched,
            "unused": self._unused,
            "changes": self._changes,
            "has_prior": self._has_prior,
            "is_told": self._is_reported,
            "is_over": self.is_over,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._searched, self._unused, self._changes = (state[key] for key in ("searched", "unused", "changes"))
        self._has_prior, self._is_reported, self.is_over = (state[key] for key in ("has_prior", "is_told", "is_over"))

    def watch(self, call: ForwardCall, /) -> None:
        """Read the deviation of the first latent below the outputs of a forward call."""
        if self.is_over or self._transfer or self._latent or not call.roots:
            return
        self._has_read = True
        self._latent = self._find_latent(call.graph)
        if self._latent is None:
            return
        deviation = call.saved(self._latent.deviation, "result")
        if deviation is not None:
            log_BD = deviation.detach().float().log().flatten(1)
            nats = -log_BD.mean(0).clamp(max=0).sum()
            self._measured = torch.stack([nats, log_BD.abs().amax(), nats.new_tensor(float(log_BD.shape[1]))])

    def find(self, loss: Any = None, /) -> Iterator[Observation]:
        """Yield an observation, after a backward pass, if a latent no longer carries information, or does so again.

        Args:
            loss: Loss of the step, as the loop passed it.
        """
        if self._has_read:
            if not self._has_prior:
                self._searched += 1
                self._has_prior = self._latent is not None and _has_prior(self._latent, loss)
            if self._has_prior and self._latent is not None and self._measured is not None:
                self._layer = self._latent.layer
                self._transfer = HostTransfer({"measured": self._measured})
        if self._transfer is not None and self._transfer.is_ready:
            nats, largest, dims = map(float, self._transfer.values()["measured"])
            self._transfer = None
            yield from self._judge(nats, largest, dims)
        self.clear()
        self.is_over |= self._searched >= SEARCHED_STEPS and not self._has_prior
        self.is_over |= self._changes >= MAX_CHANGES

    def _judge(self, nats: float, largest: float, dims: float) -> Iterator[Observation]:
        is_unused = nats <= UNUSED_NATS and largest <= UNUSED_NATS  # False for nan
        self._unused = self._unused + 1 if is_unused else 0
        if self._is_reported != (self._unused >= UNUSED_READS):
            self._is_reported = not self._is_reported
            self._changes += 1
            kind = LATENT_UNUSED if self._is_reported else LATENT_USED
            yield kind.observe(self._layer, values={"nats": nats, "dimensions": dims})

    def _find_latent(self, graph: Graph) -> Latent | None:
        for product in graph.of("Mul"):
            inputs, edges = graph.inputs(product), graph.edges(product)
            sizes = shape(product)
            # the noise is a constant of the same shape
            if len(inputs) != 1 or len(edges) != 2 or len(sizes) < 2 or sizes[0] < MIN_SAMPLES:
                continue
            deviation = graph.through(inputs[0])
            is_sum = any(operation(user) == "Add" and len(graph.inputs(user)) == 2 for user in graph.users(product))
            if deviation is not None and operation(deviation) == "Exp" and shape(deviation) == sizes and is_sum:
                return Latent(deviation, self._modules.get(graph.parameter(deviation)))
        return None


def _has_prior(latent: Latent, loss: Any) -> bool:
    """Return whether a loss uses the logarithm of a deviation, or its square, in addition to the drawn sample."""
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return False
    graph = Graph(loss)
    users = [user for user in graph.users(latent.deviation) if operation(user) == "Mul"]
    products = [user for user in users if len(graph.inputs(user)) == 1]
    drawn = {user for product in products for user in graph.users(product)} | {*products}
    # the scaled logarithm is the input of the exponential
    source = graph.through(graph.first(latent.deviation), also=frozenset({"Mul", "Div"}))
    waiting, seen = [source, latent.deviation], {*drawn}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if operation(node) in ("Exp", "Pow") and node is not latent.deviation:
            return True
        waiting += graph.users(node)
    return False
