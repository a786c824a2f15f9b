"""Find parameters that the loss never reaches: their gradient is always None or exactly zero (GW108)."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.baseline import is_zero_from_start
from gradwatch.detect.features.consequences import is_consequence
from gradwatch.detect.features.finding import finding_of, subject
from gradwatch.detect.features.scope import affected_modules, is_everything, joined_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.dead_layer_rules.experts import router_of
from gradwatch.detect.gradients.no_gradient_rules.examples import (
    make_adapted,
    make_moved,
    make_penalized,
    make_second,
    make_shift,
    make_unowned,
    make_zero,
)
from gradwatch.detect.gradients.no_gradient_rules.in_turn import is_in_turn_of, is_like_expert
from gradwatch.detect.gradients.no_gradient_rules.moved import are_copies, are_moved_by_hand, find_moves_by_hand
from gradwatch.detect.gradients.no_gradient_rules.penalized import are_penalized
from gradwatch.detect.gradients.no_gradient_rules.reached import (
    awaits_optimizer,
    find_first_gradient,
    judged_tensors,
    reached_steps,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

NONE, ZERO, PENALTY = ": None", ": exactly zero", " but that of a penalty on its size"
"""What the loss leaves in the gradient of a parameter that it does not reach."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoGradient:
    """Parameters that the loss does not reach.

    What it measures: trainable parameters whose gradient was None, or zero in every element, at each step so far, or
    only that of a penalty on all weights.

    Why it matters: these parameters keep their initial values, or shrink under weight decay. The model is smaller than
    intended.

    Example: `features = encoder(x).detach()`, or a layer whose output is not used.

    What to do: look for `detach()`, `.data`, `.item()`, `.numpy()` or `torch.no_grad()` between the layer and the loss,
    an unused output, and a softmax over a single unit.

    When it is wrong: a module that is unused on purpose: freeze it with `requires_grad_(False)`. Experts, target
    networks and averaged weights do not count or are reported as info.

    When it is withdrawn: a tensor of the finding got a gradient in two steps, or the loop turns out to move all of them
    by hand. What is left becomes a new finding.

    How it is detected: trainable tensors whose gradient was None, or exactly zero in every element, at each recorded
    step so far. A gradient that was there and then stays away is another symptom (dead-layer). A penalty that the loop
    adds to its loss, such as `1e-4 * sum(p.square().sum() for p in model.parameters())`, is known by its gradient,
    which is a fixed multiple of the tensor: two tensors or more have the same ratio at all measured steps.

    Exceptions to the rules: a module that is not used on purpose (the pooler of a language model, a head for another
    task). Freeze it with `requires_grad_(False)` and it does not count. The wait is five times as long if a gradient
    may still come. It may if other tensors come and go from step to step (experts, heads that train in turn), if the
    tensor looks like one of several experts, or while the rate warms up. Tensors are judged once their own optimizer
    has stepped `patience` times: a loop may train one model first, and then another. A module of the same shape as
    tensors that come and go is an expert that no sample was sent to (info), and so is an expert whose router is
    watched. Tensors that a dead-layer names do not count. A bias with a gradient of zero whose weight has a gradient
    does reach the loss, which does not change when its outputs shift: a hinge, or a distance between two outputs
    (info). Zeros after a dead ReLU are reported as dead-relu, at the ReLU. If the loss itself is exactly 0, that is
    reported as loss-plateau. Zeros next to weights of zero that nothing moves, as in a factor of LoRA that no optimizer
    holds, follow from those weights (info). Other tensors that no optimizer holds are not meant to be trained if one
    holds the rest (info), such as an encoder that runs under `torch.no_grad()`, or a module whose weights are
    generated. A target network or an average of the weights has no gradient by design: tensors that no optimizer holds
    do not count if they began as a copy of a trained tensor, or move anyway. Nor do tensors whose gradient is None and
    that the loop moves by hand, as a trust region does.

    Source: Zhang et al. 2018, "An empirical study on TensorFlow program bugs" (unconnected graphs),
    https://doi.org/10.1145/3213846.3213866; PyTorch, `torch.autograd.grad`, argument `allow_unused`.

    Args:
        every: Steps between two checks. 10: it is the same at every step.
        patience: Steps without gradient after which to report. 8: a branch that starts at zero (ReZero, LoRA) has a
            gradient from its second step, and dynamic graphs that skip a layer at every other step have one by then.
        patience_factor: Factor of `patience` if a gradient may still come. 5: heads that train in turn, and experts,
            may wait that long for their first gradient.
        turn_frac: Fraction of the steps with a gradient, 0..1, below which a tensor comes and goes. 0.9: one step
            in ten without a gradient, as the first of a branch that starts at zero, is not a turn.
        moved: Measurements at which a tensor without gradient has moved if the loop updates it by hand. 2: weights that
            are loaded once move once.
        penalty_spread: Relative difference of two ratios of gradient to weight that are the same. 1e-5: norms in
            float32 are rounded to 1e-6, and batches move the ratio of a gradient by far more.
        penalty_moved: Relative change of the norm of a single tensor, for the same. 0.001: a ratio that stays the same
            to 1e-5 meanwhile has no other reason.
        recovered: Steps with a gradient that withdraw a finding. 2: a single one may be an accident.
    """

    code: ClassVar[str] = "GW108"
    kind: ClassVar[str] = "no-gradient"
    every: int = 10
    patience: int = 8
    patience_factor: float = 5.0
    turn_frac: float = 0.9
    moved: int = 2
    penalty_spread: float = 1e-5
    penalty_moved: float = 1e-3
    recovered: int = 2

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that no gradient has ever reached."""
        structure = structure_of(history)
        newest_L = history.param.newest("grad.l2")
        may_judge_L = judged_tensors(history, kind=self.kind)
        if not may_judge_L.any():
            return
        penalized_L = are_penalized(history, spread=self.penalty_spread, moved=self.penalty_moved)
        # cheap: all have a gradient; a frozen tensor may keep one from before
        if np.all(newest_L[structure.is_trainable_L] > 0) and not penalized_L.any():
            return
        l2_TL, reached_TL = history.param.window("grad.l2"), reached_steps(history, penalized_L)
        # a step without any gradient says nothing if it was skipped, or if no gradient was read
        is_read_T = (history.scalar("skipped") != 1) & ~np.isnan(history.scalar("grad_norm.before_clip"))
        updated_T = reached_TL.any(axis=1) | is_read_T
        if not updated_T.any():
            return
        share_L = reached_TL[updated_T].mean(axis=0)
        in_turn_L = (share_L > 0) & (share_L < self.turn_frac) & structure.is_trainable_L
        affected_L = structure.is_trainable_L & (share_L == 0) & ~are_copies(history) & may_judge_L
        affected_L &= ~_is_reported_dead(history) & ~awaits_optimizer(history, least=self.patience)
        affected_L &= ~are_moved_by_hand(history, least=self.moved)
        steps = int(updated_T.sum())
        if not affected_L.any():
            return
        rate_T = history.scalar("lr.0")
        missing_L = np.isnan(l2_TL).all(axis=0)
        is_in_turn = is_in_turn_of(l2_TL, in_turn_L, missing_L & affected_L)
        # a gradient may still come while the rate warms up
        may_come = is_in_turn or rate_T[-1] > rate_T[0] or is_like_expert(history, affected_L & missing_L)
        if steps < self.patience * (self.patience_factor if may_come else 1):
            return
        shapes_in_turn = {layer.shape for layer, is_so in zip(history.info.layers, in_turn_L, strict=True) if is_so}
        # a penalty gives a bias of zeros a gradient of zeros
        present = PENALTY if penalized_L.any() else ZERO
        for value, part_L in ((NONE, affected_L & missing_L), (present, affected_L & ~missing_L)):
            # zeros may have another cause that is reported elsewhere; None always means a missing path
            is_open = value != NONE and (_is_blocked(history) or is_zero_from_start(history))
            if not is_open:
                yield from self._findings(history, part_L, steps, value=value, routed=shapes_in_turn)

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first step with a gradient, or moved by hand, of a tensor that had none, once there are enough."""
        penalized_L = are_penalized(history, spread=self.penalty_spread, moved=self.penalty_moved)
        return find_first_gradient(history, finding, penalized_L, least=self.recovered) or find_moves_by_hand(
            history, finding, least=self.moved
        )

    def _findings(
        self, history: History, affected_L: NDArray[np.bool_], steps: int, *, value: str, routed: set[tuple[int, ...]]
    ) -> Iterator[Finding]:
        # what no optimizer holds is not meant to be trained, unless the loop has no optimizer at all
        is_held_L = np.array([layer.group is not None for layer in history.info.layers], np.bool_)
        is_harmless_L = affected_L & ~is_held_L & is_held_L.any()
        for _, group in affected_modules(history, affected_L & ~is_harmless_L, kind=self.kind):
            is_routed = routed.issuperset(history.info.layers[i].shape for i in group) or all(
                router_of(history, history.info.layers[i].name) is not None for i in group
            )
            is_harmless = is_routed or (value != NONE and all(_is_cancelled(history, i) for i in group))
            is_harmless_L[group] = is_harmless or (value != NONE and is_consequence(history, self.kind))
        parts = [
            (least, names, group)
            for least, part_L in ((Severity.WARNING, affected_L & ~is_harmless_L), (Severity.INFO, is_harmless_L))
            for names, group in joined_modules(history, part_L, kind=self.kind, severity=least)
        ]
        # what a penalty hides may be None or zero
        is_none = Quantity(key="grad.is_none", label="gradient is None", value=float(value == NONE))
        evidence = () if value == PENALTY else (is_none,)
        for least, names, group in parts:
            severity = Severity.CRITICAL if least > Severity.INFO and is_everything(history, group) else least
            yield finding_of(
                self,
                history,
                f"{subject(names)} gets no gradient{value} at every step",
                Quantity(key="no_gradient.steps", label="steps without gradient", value=float(steps), unit="steps"),
                Quantity(key="tensors", value=float(len(group))),
                *evidence,
                layers=names,
                severity=severity,
                onset=int(history.steps("loss")[0]),
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        cut = Synthetic(steps=40).no_gradient((0, 1))
        yield Example("two layers are cut from the graph", cut.history(), cut.names((0, 1)))
        yield Example("one layer's gradient is exactly zero", *make_zero())
        yield Example("two layers get the gradient of a penalty only", *make_penalized())
        yield Example("gradients that differ by a thousandth from that of a penalty", make_penalized(noise=1e-3)[0])
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
        yield Example("a shift that cancels out, next to a weight with weight norm: for information", *make_shift())
        frozen = Synthetic(steps=40).no_gradient(3)
        layers = tuple(replace(layer, trainable=i != 3) for i, layer in enumerate(frozen.info.layers))
        frozen.info = replace(frozen.info, layers=layers)
        yield Example("no adapter of a frozen model gets a gradient", *make_adapted())
        yield Example("a layer is frozen on purpose", frozen.history())
        hollow = Synthetic(steps=40).no_gradient(3)
        layers = tuple(
            replace(layer, shape=(1, 0) if i == 3 else layer.shape) for i, layer in enumerate(hollow.info.layers)
        )
        hollow.info = replace(hollow.info, layers=layers)
        yield Example("a parameter without elements", hollow.history())
        yield Example("a second model is trained after the first", make_second(starts=30))
        severed = make_second(starts=20, is_cut=True)
        yield Example("a layer of the second model is cut off", severed, ("layers.11.weight",))
        kept = Synthetic(steps=40).no_gradient(3, zero=True)
        layers = tuple(replace(layer, trainable=i > 1) for i, layer in enumerate(kept.info.layers))
        kept.info = replace(kept.info, layers=layers)
        yield Example("frozen layers keep gradients from before", kept.history(), kept.names(3))
        skipped = Synthetic(steps=40).no_gradient(None)
        skipped.skipped_T[:] = 1
        yield Example("every step so far was skipped", skipped.history())
        yield Example("a target network: a copy that no optimizer holds", make_unowned(copied=True))
        yield Example("an average of the weights, which moves without an optimizer", make_unowned(moves=True))
        yield Example("a policy that the loop moves by hand", make_moved())
        yield Example("a layer whose weights are loaded once", make_moved(once=True), ("layers.4.weight",))
        yield Example("a layer without any use or optimizer: for information", make_unowned(), ("layers.4.weight",))
        blocked = Synthetic(steps=40, activations=3).no_gradient((0, 1), zero=True).dead_relu(0, fraction=1, onset=0)
        yield Example("zeros behind a dead ReLU are reported as dead-relu", blocked.history())


def _is_reported_dead(history: History) -> NDArray[np.bool_]:
    """Return which tensors a collapsed router's finding, or another one of a dead layer, names already."""
    named = [n for f in history.findings if f.kind == "dead-layer" and f.severity > Severity.INFO for n in f.names]
    prefixes = tuple(f"{name}." for name in named)
    return np.array([f"{layer.name}.".startswith(prefixes) for layer in history.info.layers], np.bool_)


def _is_cancelled(history: History, tensor: int) -> bool:
    """Return whether a tensor is a bias next to a weight with a gradient: the loss does not depend on a shift."""
    layers, l2_L = history.info.layers, history.param.newest("grad.l2")
    module = layers[tensor].module
    # a parametrized weight, as with weight norm, lives in a submodule
    homes = module, f"{module}.parametrizations.weight".removeprefix(".")
    mine = [i for i, layer in enumerate(layers) if layer.module in homes and len(layer.shape) >= 2]
    return len(layers[tensor].shape) == 1 and bool((l2_L[mine] > 0).any())


def _is_blocked(history: History) -> bool:
    """Return whether a ReLU that never fires blocks the gradient."""
    return len(history.info.activations) > 0 and bool((history.act.window("act.dead_frac", 1) >= 1).any())
