"""Follow the autograd graphs of a model's outputs: kept beyond their step, or built by an evaluation without need."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import EVALUATED_WITH_GRAPH, GRAPH_KEPT, Observation
from gradwatch.probe.graph.graph import Node
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.probe.memory.graph_marks import GraphMarks, Mark
from gradwatch.probe.memory.holders import find_holder
from gradwatch.probe.modules.train_eval_modes import inner_model
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.parameters import HAVE_A_FAST_PATH, Models
from gradwatch.probe.place import NOWHERE, calling_place

MIN_UNUSED_PASSES = 3
"""Minimum number of forward passes in evaluation mode without a backward pass, between two updates, to report."""

MAX_PASSES = 64
"""Maximum number of passes to follow between two updates."""

MAX_MARKED_PASSES = 4
"""Maximum number of passes of a model to mark in a step: a critic has up to four of them, with a gradient penalty."""


@final
class _EvaluationPass:
    """A forward pass in evaluation mode that built a graph.

    Args:
        nodes: The nodes of its outputs.
    """

    __slots__ = ("_mark", "is_used")

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.is_used = False
        mark = Mark()
        self._mark = weakref.ref(mark)
        for node in nodes:
            node.register_prehook(self.use)
            node.metadata[self] = mark

    @property
    def is_alive(self) -> bool:
        """Whether anything keeps the graph."""
        return self._mark() is not None

    def use(self, *_: object) -> None:
        """Record that a backward pass went through the graph."""
        self.is_used = True


@final
class OutputGraphs:
    """Find graphs of earlier steps that are still alive, and evaluations that build graphs.

    A hook on each whole model sees its outputs in the steps that are marked, and until the first evaluation. Then it is
    removed, so that the usual step has none.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._roots = list(models.values() if isinstance(models, Mapping) else [models])
        self._marks = GraphMarks()
        self._step = 0
        self._marked: Counter[nn.Module] = Counter()  # passes in this step
        self._has_evaluated = False
        self._passes: list[_EvaluationPass] = []
        self._most_alive = 0  # graphs of these passes at the same time
        self._place = NOWHERE
        self._handles: list[RemovableHandle] = []
        self._attach()

    def is_idle(self, step: int) -> bool:
        """Return whether nothing needs to be done in a step."""
        return self._marks.is_idle(step)

    def is_due(self, step: int) -> bool:
        """Return whether `find` must be called after a step."""
        # the graph of a loss has parts that no output has: a penalty, and all of it in a loop that calls submodules
        return self._marks.is_marking(step) or self._marks.is_over(step)

    def begin(self, step: int) -> None:
        """Begin an optimizer step."""
        self._step = step
        self._marked.clear()
        self._marks.begin(step)
        if self._marks.is_marking(step):
            self._attach()
        elif self._has_evaluated:
            remove_hooks(self._handles)

    def find(self, loss: Any, step: int) -> Iterator[Observation]:
        """Yield what has been found, after an optimizer step.

        Args:
            loss: Loss of the step, as the loop passed it.
            step: Optimizer step.
        """
        if self._marks.is_marking(step) and isinstance(loss, Tensor) and loss.grad_fn is not None:
            self._marks.mark(loss.grad_fn, step)
        if self._marks.is_over(step):
            if steps := self._marks.kept_steps():
                holder = None
                with contextlib.suppress(Exception):  # of any kind: the variables hold objects of any kind
                    holder = find_holder(self._models, self._marks.keeps)
                by = f" by {holder}" if holder else ""
                yield GRAPH_KEPT.observe(values={"since": steps[0], "steps": len(steps)}, by=by)
            self._marks.end()
        yield from self._find_evaluation()

    def close(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._handles)

    def _find_evaluation(self) -> Iterator[Observation]:
        passes, self._passes = self._passes, []
        unused = sum(not it.is_used for it in passes)
        if unused >= MIN_UNUSED_PASSES:
            self._has_evaluated = True
            at = f", at {self._place.with_text}" if self._place else ""
            values = {"passes": unused, "alive": self._most_alive}
            kept = f"; {self._most_alive} of these graphs were alive at once" if self._most_alive > 1 else ""
            yield EVALUATED_WITH_GRAPH.observe(values=values, at=at, kept=kept)
        self._place, self._most_alive = NOWHERE, 0

    def _attach(self) -> None:
        if not self._handles:
            self._handles = [
                root.register_forward_hook(inert_hook(partial(self._after_forward, inner_model(root))))
                for root in self._roots
                # a hook would disable the fast path of its evaluation
                if takes_hooks(root) and not isinstance(root, HAVE_A_FAST_PATH)
            ]

    def _after_forward(self, inner: nn.Module, root: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            self._has_evaluated |= not inner.training
            return
        is_marking = self._marks.is_marking(self._step) and self._marked[root] < MAX_MARKED_PASSES
        is_evaluation = not (inner.training or self._has_evaluated) and len(self._passes) < MAX_PASSES
        if not (is_marking or is_evaluation):
            return
        nodes = [output.grad_fn for output in tensors_of(outputs) if output.grad_fn is not None]
        if is_marking:
            self._marked[root] += 1
            for node in nodes:
                self._marks.mark(node, self._step)
        if is_evaluation and nodes:
            self._place = self._place or calling_place()
            self._passes.append(_EvaluationPass(nodes))
            self._most_alive = max(self._most_alive, sum(it.is_alive for it in self._passes))
