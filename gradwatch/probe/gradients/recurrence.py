"""Measure the growth of a gradient over the repeated uses of one parameter, from the last use to the first."""

# U = uses of a parameter, in the order of the forward pass

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.events import RECURRENCE, Observation
from gradwatch.probe.device.sync import HostTransfer
from gradwatch.probe.graph.graph import LAYOUT, LEAF, Graph, Node, operation
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.nested import has_plain_values
from gradwatch.probe.output_reader import ForwardCall
from gradwatch.probe.parameters import Models, list_parameters

MAX_MISSES = 3
"""Consecutive reads without a recurrence after which the probe stops."""

MIN_USES = 12
"""Minimum number of consecutive uses of a parameter in a recurrence: weights tied by hand have fewer."""

MAX_MEASURED_USES = 24
"""Maximum number of uses to measure, evenly spread."""

MIN_GROWTH_DECADES = 2.0
"""Minimum growth or decay from the last use to the first, in powers of ten, to record an event."""

MIN_EXPLAINED_FRAC = 0.75
"""Minimum fraction of the variance of the logarithms of the norms that a line over the uses explains, 0..1."""

SMALLEST = 1.4e-45
"""Smallest positive number of float32."""


@final
class RecurrenceProbe:
    """Read gradients at the uses of a parameter that a forward pass applies to its own result repeatedly.

    Examples are cells in a loop, state-space models, solvers of differential equations, and layers with tied weights.
    If each use multiplies the gradient by a little more than 1, 100 uses multiply it by a million. The autograd graph
    of a forward pass lists the uses. Hooks on the nodes record the norms of the gradients that pass, and disappear with
    the graph. A recurrence that torch computes in one node, such as its LSTM, is invisible. Norms from a GPU arrive
    later: a later call of `find` returns them.

    Sampled steps are read with growing distance: the 1st, 2nd, 3rd, 5th, 9th. The same holds for calls within a step,
    if a loop outside the model makes them: the graph of each call contains all earlier ones.

    Args:
        models: A model, or several by name.

    Attributes:
        is_over: Whether nothing more is read: an event was recorded, or there is no recurrence.
    """

    part: ClassVar[str] = "the recurrence"

    def __init__(self, models: Models) -> None:
        params, layers = list_parameters(models)
        self._names: dict[Tensor, str] = {param: layer.name for param, layer in zip(params, layers, strict=True)}
        self._handles: list[RemovableHandle] = []
        self._norms_U: list[Tensor | None] = []
        self._transfer: HostTransfer | None = None  # of norms, in flight
        self._name, self._uses = "", 0
        self._of = self._name, self._uses  # parameter of the norms in flight
        self._steps, self._misses, self.is_over = 0, 0, False
        self._is_sampled = self._has_read = False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back; it does not wait for norms in flight."""
        # "rounds" is the key that saved states already have
        return {"steps": self._steps, "rounds": self._misses, "is_over": self.is_over}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._steps, self._misses, self.is_over = state["steps"], state["rounds"], state["is_over"]

    def clear(self) -> None:
        """Drop the data and the hooks of the step before."""
        self._drop_norms()
        self._is_sampled = self._has_read = False

    def _drop_norms(self) -> None:
        remove_hooks(self._handles)
        self._norms_U, self._uses = [], 0

    def watch(self, call: ForwardCall, /) -> None:
        """Find the uses of a parameter in the graph of an output, and hook them to read their gradients."""
        self._is_sampled = True
        is_due = not self._steps & (self._steps - 1) and self._transfer is None  # 0 and the powers of two
        if self.is_over or not is_due or not call.roots:
            return
        self._has_read = True
        graph = call.graph
        for leaf in sorted(graph.of(LEAF), key=_num_dims, reverse=True):  # a matrix multiplies, its bias is only added
            uses = list(_uses(graph, leaf))
            # the parameter with the most uses wins
            if leaf.variable in self._names and len(uses) >= max(MIN_USES, self._uses + 1):
                self._hook_uses(graph, self._names[leaf.variable], uses)

    def find(self, _loss: Any = None, /) -> Iterator[Observation]:
        """Yield the parameter with uses that make the gradient grow or shrink, after a backward pass."""
        self._steps, self._is_sampled = self._steps + self._is_sampled, False
        if self._has_read:
            self._misses = 0 if self._norms_U else self._misses + 1
            self.is_over = self._misses == MAX_MISSES
            self._send()
            self._has_read = False
        if self._transfer is None or not self._transfer.is_ready:
            return
        growth, self._transfer = growth_of(self._transfer.values()["norms"]), None
        if abs(growth) >= MIN_GROWTH_DECADES:
            self.is_over = True
            name, uses = self._of
            yield RECURRENCE.observe(name, values={"uses": uses, "growth": growth})

    def _send(self) -> None:
        """Send the recorded norms to the host, if the backward pass reached all uses."""
        read_U = [norm for norm in self._norms_U if norm is not None]
        if len(read_U) == len(self._norms_U) > 0 and len({norm.device for norm in read_U}) == 1:
            self._transfer, self._of = HostTransfer({"norms": torch.stack(read_U)}), (self._name, self._uses)
        self._drop_norms()

    def _hook_uses(self, graph: Graph, name: str, uses: list[Node]) -> None:
        """Hook some uses, if the last computes with the result of the first."""
        uses = sorted(uses, key=lambda node: node._sequence_nr())  # in the order of the forward pass
        # independent uses, such as a layer applied to several inputs, are not a recurrence
        if uses[0] not in graph.below(uses[-1]):
            return
        self._drop_norms()
        self._name, self._uses = name, len(uses)
        count = min(MAX_MEASURED_USES, len(uses))
        indices = [k * (len(uses) - 1) // (count - 1) for k in range(count)]
        self._norms_U = [None] * len(indices)
        for u, index in enumerate(indices):
            self._handles.append(uses[index].register_prehook(inert_hook(_NormHook(self._norms_U, u))))


@final
class _NormHook:
    """Hook of a node that records the norm of its gradient."""

    def __init__(self, norms_U: list[Tensor | None], index: int) -> None:
        self._norms_U, self._index = norms_U, index

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0] if gradients else None
        if gradient is not None and has_plain_values(gradient):
            self._norms_U[self._index] = gradient.detach().float().norm()


def growth_of(norms_U: np.ndarray[Any, Any]) -> float:
    """Return the growth of norms towards the first use in powers of ten, without terms that later losses add.

    A loss at each position of a sequence adds a term at each use. So a gradient that each use passes on unchanged still
    grows with the number of uses: over the earlier half, by at most a factor of 2. The growth is computed from that
    half. A single step does not count as growth, since losses may begin there: sequences end, and padding follows.
    Norms that jump up and down do not count either: the stages of a solver of differential equations differ in weight.

    Args:
        norms_U: Norms at evenly spread uses, in the order of the forward pass, of shape (U,).
    """
    few, middle = len(norms_U) // 8, len(norms_U) // 2
    # without a gradient at the last use there is nothing to grow
    if not few or not np.isfinite(norms_U).all() or not norms_U[-1] > 0:
        return 0.0
    log_U = np.log10(np.maximum(norms_U, SMALLEST))
    if not _is_line(log_U[: middle + 1]):
        return 0.0
    whole = float(np.median(log_U[:few]) - np.median(log_U[middle : middle + few]))
    steady = -middle * float(np.median(np.diff(log_U[: middle + 1])))
    rise = min(whole, steady, key=abs) if whole * steady > 0 else 0.0
    beyond = rise - float(np.log10(2)) if rise > 0 else rise  # added terms only make a gradient grow
    # the half is extrapolated to all uses; a rise below the factor of 2 counts as none
    return beyond * (len(norms_U) - 1) / middle if beyond * rise > 0 else 0.0


def _is_line(values_U: np.ndarray[Any, Any]) -> bool:
    """Return whether values that are not all the same lie near a line."""
    rest_U, place_U = values_U - values_U.mean(), np.arange(len(values_U)) - (len(values_U) - 1) / 2
    explained = (rest_U @ place_U) ** 2 / (place_U @ place_U)
    return bool(explained > MIN_EXPLAINED_FRAC * (rest_U @ rest_U))


def _num_dims(leaf: Node) -> int:
    return int(leaf.variable.dim())


def _uses(graph: Graph, leaf: Node) -> Iterator[Node]:
    """Yield the operations that use a leaf, past operations that only change its layout."""
    waiting = graph.users(leaf)
    while waiting:
        node = waiting.pop()
        if operation(node) in LAYOUT:
            waiting += graph.users(node)
        else:
            yield node
