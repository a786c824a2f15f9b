"""GW108: parameters that the loss does not reach: their gradient is None, or exactly zero, always."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.consequences import is_explained
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.scope import scopes
from gradwatch.detect.features.structure import depth
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import WINDOW, History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

INTERMITTENT = 5
"""How many times longer to wait where other tensors come and go, as heads that train in turn and experts do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoGradient:
    """Parameters that the loss does not reach.

    What it measures: trainable tensors whose gradient was None, or exactly zero in every element, at each recorded
    step so far. A gradient that was once there and then stays away is another symptom (dead-layer).

    Why it matters: they keep their first values for ever; with weight decay they even shrink to nothing. What the
    person believes to be trained is not.

    When it is wrong: a module that is not used on purpose (the pooler of a language model, a head for another
    task): freeze it with `requires_grad_(False)` and it is not counted. Where other tensors come and go from step
    to step, as experts and heads that train in turn do, where it looks like one of several experts, and while the
    rate warms up, the wait is five times as long. A module that is built like those that come and go is taken for
    an expert that nothing was sent to (info). A bias with a gradient of zero whose weight has one is reached by a loss
    that does not change when its outputs shift, as a hinge or a distance between two outputs does not (info). Zeros
    behind a ReLU that never fires are reported as dead-relu, at the ReLU; those beside weights of zero that nothing
    moves, as of a factor of LoRA that no optimizer holds, follow from these (info). A target network or an average of
    the weights gets none by design: what no optimizer holds, and began as a copy of what one does or moves without, is
    not counted.

    What to do: look for `detach()`, `.data`, `.item()`, `.numpy()` or `torch.no_grad()` between the layer and the loss,
    for a module whose output is not used, and for a softmax over a single unit or another constant before the loss.

    Source: Zhang et al. 2018, "An empirical study on TensorFlow program bugs" (unconnected graphs),
    https://doi.org/10.1145/3213846.3213866; PyTorch, `torch.autograd.grad`, argument `allow_unused`.

    Args:
        every: Steps between two looks. 10: it is the same at every step.
        patience: Steps without gradient after which to report. 8: a branch that starts at zero (ReZero, LoRA) has a
            gradient from its second step on, dynamic graphs that skip a layer at every other step have it by then.
    """

    code: ClassVar[str] = "GW108"
    kind: ClassVar[str] = "no-gradient"
    every: int = 10
    patience: int = 8

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps all have a gradient, and which come after the last look."""
        reached_D = np.count_nonzero(ahead.newest("grad.l2") > 0, axis=1) >= depth(ahead.history).num_trainable
        return np.asarray(reached_D | (ahead.steps_D >= WINDOW), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that no gradient has ever reached."""
        shape = depth(history)
        newest_L = history.param.newest("grad.l2")
        if np.count_nonzero(newest_L > 0) >= shape.num_trainable or history.param.last_step >= WINDOW:
            return
        l2_TL = history.param.window("grad.l2")
        reached_TL = ~((l2_TL == 0) | (np.isnan(l2_TL) & ~(history.param.window("grad.nonfinite") > 0)))
        looked_T = reached_TL.any(axis=1) | (history.scalar("skipped") != 1)
        if not looked_T.any():
            return
        share_L = reached_TL[looked_T].mean(axis=0)
        in_turn_L = (share_L > 0) & (share_L < 0.9) & shape.trainable_L
        ill_L = shape.trainable_L & (share_L == 0) & ~_copies(history)
        steps = int(looked_T.sum())
        if not ill_L.any():
            return
        rate_T = history.scalar("lr.0")
        missing_L = np.isnan(l2_TL).all(axis=0)
        is_in_turn = _is_in_turn(l2_TL, in_turn_L, missing_L & ill_L)
        may_come = is_in_turn or rate_T[-1] > rate_T[0] or _is_routed(history, ill_L & missing_L)
        if steps < self.patience * (INTERMITTENT if may_come else 1):
            return
        shapes_in_turn = {layer.shape for layer, is_so in zip(history.info.layers, in_turn_L, strict=True) if is_so}
        for value, part_L in (("None", ill_L & missing_L), ("exactly zero", ill_L & ~missing_L)):
            if value == "None" or not _is_blocked(history):
                yield from self._findings(history, part_L, steps, value=value, routed=shapes_in_turn)

    def _findings(
        self, history: History, ill_L: NDArray[np.bool_], steps: int, *, value: str, routed: set[tuple[int, ...]]
    ) -> Iterator[Finding]:
        for layer, group in scopes(history, ill_L, kind=self.kind):
            is_routed = routed.issuperset(history.info.layers[i].shape for i in group)
            is_harmless = is_routed or (value != "None" and all(_is_cancelled(history, i) for i in group))
            is_harmless |= value != "None" and is_explained(history, self.kind)
            severity = Severity.INFO if is_harmless else Severity.CRITICAL if layer is None else Severity.WARNING
            yield finding_of(
                self,
                history,
                f"{layer or 'the whole model'} gets no gradient: {value} at every step",
                Quantity(key="no_gradient.steps", label="steps without gradient", value=float(steps), unit="steps"),
                Quantity(key="tensors", value=float(len(group))),
                Quantity(key="grad.is_none", label="gradient is None", value=float(value == "None")),
                layer=layer,
                severity=severity,
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        cut = Synthetic(steps=40).no_gradient((0, 1))
        yield Example("two layers are cut from the graph", cut.history(), cut.names((0, 1)))
        yield Example("one layer's gradient is exactly zero", *_zero(steps=40))
        yield Example("nothing reaches the model", Synthetic(steps=40).no_gradient(None, zero=True).history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        branch = Synthetic(steps=40)
        branch.grad_l2_TL[0, 2:9] = 0
        yield Example("branches that start at zero have no gradient in the first step", branch.history())
        turns = Synthetic(steps=80)
        turns.grad_l2_TL[::2, 10], turns.grad_l2_TL[1::2, 11] = np.nan, np.nan
        turns.grad_l2_TL[:30, 9] = np.nan
        yield Example("heads train in turn, one of them from step 30", turns.history())
        masked = Synthetic(steps=20).no_gradient(3)
        masked.grad_l2_TL[::2, 10], masked.grad_l2_TL[1::2, 11] = 0, 0
        named = (replace(layer, name="router" if i == 3 else layer.name) for i, layer in enumerate(masked.info.layers))
        masked.info = replace(masked.info, layers=tuple(named))
        yield Example("a router is cut off, and the experts behind it are masked", masked.history(), ("router",))
        yield Example("a shift that cancels out, beside a weight with a norm of its own: for information", *_shift())
        frozen = Synthetic(steps=40).no_gradient(3)
        layers = tuple(replace(layer, trainable=i != 3) for i, layer in enumerate(frozen.info.layers))
        frozen.info = replace(frozen.info, layers=layers)
        yield Example("a layer is frozen on purpose", frozen.history())
        skipped = Synthetic(steps=40).no_gradient(None)
        skipped.skipped_T[:] = 1
        yield Example("every step so far was skipped", skipped.history())
        yield Example("a target network: a copy that no optimizer holds", _outside(copied=True))
        yield Example("an average of the weights, which moves without an optimizer", _outside(moves=True))
        yield Example("a layer that nothing uses and no optimizer holds", _outside(), ("layers.4.weight",))
        blocked = Synthetic(steps=40, activations=3).no_gradient((0, 1), zero=True).dead_relu(0, fraction=1, onset=0)
        yield Example("zeros behind a dead ReLU are for dead-relu to tell", blocked.history())


def _zero(*, steps: int) -> tuple[History, tuple[str, ...]]:
    made = Synthetic(steps=steps).no_gradient(4, zero=True)
    return made.history(), made.names(4)


def _shift() -> tuple[History, tuple[str, ...]]:
    made = Synthetic(steps=40).no_gradient(4, zero=True)
    homes = {3: ("critic.parametrizations.weight", "original"), 4: ("critic", "bias")}
    layers = list(made.info.layers)
    for i, (module, name) in homes.items():
        layers[i] = replace(layers[i], name=f"{module}.{name}", module=module, shape=(64, 64) if i == 3 else (64,))
    made.info = replace(made.info, layers=tuple(layers))
    return made.history(), ("critic.bias",)


def _outside(*, copied: bool = False, moves: bool = False) -> History:
    """Return a run beside a layer that no optimizer holds; all others begin with the same norm."""
    made = Synthetic(steps=60).no_gradient(4)
    layers = tuple(replace(layer, group=None if i == 4 else 0) for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=layers)
    made.weight_l2_TL[:, 4] = (1.0 if copied else 0.9) * made.weight_l2_TL[0, 3] * (1 + 1e-4 * moves * made.t_T)
    return made.history()


def _copies(history: History) -> NDArray[np.bool_]:
    """Return which tensors no optimizer holds and are a copy of one that it holds at first, or move all the same."""
    layers, l2_TL = history.info.layers, history.param.window("weight.l2")
    moved_L = np.fmax.reduce(l2_TL) > np.fmin.reduce(l2_TL)
    first_L = beginning(history, "weight.l2", 1)[0]
    held = {(layer.shape, first) for layer, first in zip(layers, first_L, strict=True) if layer.group is not None}
    copied_L = np.array(
        [
            layer.group is None and (is_moved or (layer.shape, first) in held)
            for layer, first, is_moved in zip(layers, first_L, moved_L, strict=True)
        ],
        np.bool_,
    )
    is_matrix_L = np.array([len(layer.shape) >= 2 for layer in layers], np.bool_)
    return copied_L if (copied_L & is_matrix_L).any() else np.zeros_like(copied_L)  # zeros and ones equal each other


def _is_routed(history: History, ill_L: NDArray[np.bool_]) -> bool:
    """Say whether what gets no gradient looks like experts: numbered like others that do, behind layers that do.

    A cut in a chain of numbered blocks leaves nothing before it that has a gradient.
    """
    layers = history.info.layers
    reached = [i for i, layer in enumerate(layers) if layer.trainable and not ill_L[i]]
    numbered = {re.sub(r"\d+", "*", layers[i].name) for i in reached}
    ill = np.flatnonzero(ill_L)
    is_like_others = all(re.sub(r"\d+", "*", layers[i].name) in numbered for i in ill)
    return is_like_others and len(reached) > 0 and len(ill) > 0 and reached[0] < ill[0]


def _is_in_turn(l2_TL: NDArray[np.floating], in_turn_L: NDArray[np.bool_], missing_L: NDArray[np.bool_]) -> bool:
    """Say whether the tensors that come and go tell that one which has not come yet may.

    Where they come and go as exact zeros the graph is the same at every step, as that of experts whose outputs are
    masked is; what is None in such a graph stays None.
    """
    is_graph_same = not np.isnan(l2_TL[:, in_turn_L]).any()
    return bool(in_turn_L.any()) and not (is_graph_same and missing_L.any())


def _is_cancelled(history: History, tensor: int) -> bool:
    """Say whether a tensor is a bias whose weight is reached: then the loss only does not depend on a shift."""
    layers, l2_L = history.info.layers, history.param.newest("grad.l2")
    module = layers[tensor].module
    homes = module, f"{module}.parametrizations.weight".removeprefix(".")
    mine = [i for i, layer in enumerate(layers) if layer.module in homes and len(layer.shape) >= 2]
    return len(layers[tensor].shape) == 1 and bool((l2_L[mine] > 0).any())


def _is_blocked(history: History) -> bool:
    """Say whether a ReLU that never fires stands in the way of the gradient."""
    return len(history.info.activations) > 0 and bool((history.act.window("act.dead_frac", 1) >= 1).any())
