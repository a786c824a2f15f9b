"""Detect that the loss is a policy gradient, and read its policy at some backward passes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.attempts import Attempts
from gradwatch.events import POLICY, EventKey, Observation
from gradwatch.probe.device.sync import is_capturing
from gradwatch.probe.graph.graph import Graph, uncollected
from gradwatch.probe.graph.reader import is_due
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.policy.backward_calls import BACKWARD_LISTENERS
from gradwatch.probe.policy.reading import read_policy
from gradwatch.probe.policy.terms import Policy, find_policy
from gradwatch.probe.saved_hooks import count_uses, saved_tensor

PART = "the policy"
"""Name of the probe among the parts of the monitor."""

MAX_NODES = 1_200
"""Maximum number of nodes to visit in one graph, the nearest to the loss first: a policy lies there."""

WAITS = (0, 7, 4, 1, 8, 5, 2, 9, 6, 3)
"""Backward passes to wait from each sampled step to the one that is read, in turn. Loops repeat their passes over the
samples in periods, and without a wait a period of 10 would show the same pass each time."""

MAX_TRIES = 8
"""Backward passes to try at a time: a critic may have its own between two of the policy."""


@final
class PolicyProbe:
    """Read the policy of a policy gradient once between two sampled steps, from the graph that a backward begins with.

    There the graph still holds its saved tensors. A loss that is not a policy gradient at the first steps is never
    looked at again, and then nothing of torch is replaced. A compiled graph shows nothing.

    Args:
        params: The watched parameters.
        known: Kind and layer of the events already recorded.
        attempts: Counts the failures.

    Attributes:
        spent_s: Seconds that readings took since `read`.
    """

    def __init__(self, params: Sequence[Tensor], *, known: Collection[EventKey], attempts: Attempts) -> None:
        self._params, self._attempts = frozenset(params), attempts
        self._is_on = False
        self._waits = itertools.cycle(WAITS)
        self._wait = self._tries = 0
        self._reading: Tensor | None = None
        self._uses_of_hooks = count_uses()
        self.spent_s = 0.0
        if POLICY.name in {kind for kind, _ in known}:
            self._begin()

    def find(self, loss: Any, step: int) -> Iterator[Observation]:
        """Yield an observation if the loss of one of the first steps is a policy gradient, and read it from then on."""
        if self._is_on or not is_due(step) or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        if self._policy(Graph(loss, max_nodes=MAX_NODES)) is not None:
            self._begin()
            yield POLICY.observe()

    def read(self) -> dict[str, Tensor]:
        """Return the newest reading as `policy`, in the order of the catalogue, if there is one, and begin the next."""
        reading, self._reading, self.spent_s = self._reading, None, 0.0
        if self._is_on:
            self._arm()
        return {} if reading is None else {"policy": reading}

    def close(self) -> None:
        """Stop listening."""
        self._is_on, self._tries = False, 0
        BACKWARD_LISTENERS.remove(self)

    def before_backward(self, tensors: Any) -> None:
        """Read the policy in the graphs of some tensors, if a reading is due."""
        if not self._tries:
            return
        if self._wait:
            self._wait -= 1
            return
        began = time.perf_counter()
        self._tries -= 1
        self._reading = self._attempts.run(PART, self._measured, tensors)
        if self._reading is not None:
            self._tries = 0
        self.spent_s += time.perf_counter() - began

    def _begin(self) -> None:
        self._is_on = True
        self._arm()
        BACKWARD_LISTENERS.add(self)

    def _arm(self) -> None:
        self._wait, self._tries = next(self._waits), MAX_TRIES
        self._uses_of_hooks = count_uses()

    def _measured(self, tensors: Any) -> Tensor | None:
        roots = [tensor for tensor in tensors_of(tensors) if tensor.grad_fn is not None]
        if is_capturing(roots):  # a replay of a CUDA graph makes no new reading
            return None
        with uncollected(), torch.no_grad():
            policy = self._policy(Graph(*roots, max_nodes=MAX_NODES)) if roots else None
            if policy is None:
                return None
            return read_policy(policy, lambda node, name: saved_tensor(node, name, self._uses_of_hooks))

    def _policy(self, graph: Graph) -> Policy | None:
        """Return the policy gradient in a graph, if the policy is of the watched model."""
        policy = find_policy(graph)
        # tensors hash by identity, so a set of them is safe
        return policy if policy is not None and graph.parameter(policy.node) in self._params else None
