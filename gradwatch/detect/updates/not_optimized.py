"""Find parameters that get gradients but are in no optimizer group, or never move (GW301)."""

# L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.recovery import tensors_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.not_optimized_rules.copies import WRITTEN, find_unchanged_copies
from gradwatch.detect.updates.not_optimized_rules.examples import (
    make_at_zero,
    make_converged,
    make_copied,
    make_ended,
    make_event,
    make_frozen,
    make_kept,
    make_left_out,
    make_moved,
    make_own,
    make_stale,
    make_stopped,
    make_stuck,
    make_thawed,
    make_uncalled,
    make_unmoved,
    make_used_up,
)
from gradwatch.detect.updates.not_optimized_rules.recovered import find_recovery, find_resumed_updates
from gradwatch.detect.updates.not_optimized_rules.stuck import (
    ENDED,
    find_ended_updates,
    find_missing_updates,
    find_rebuilt_optimizers,
    find_uncalled_optimizers,
    find_unchanged_parameters,
)
from gradwatch.detect.updates.not_optimized_rules.unowned import (
    find_nothing_to_train,
    find_unfrozen_parameters,
    find_unowned_parameters,
    find_unregistered_tensors,
)
from gradwatch.events import NOTHING_TRAINABLE, OPTIMIZER_REBUILT, PARAMETERS_NEW, UNHELD, UNREGISTERED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotOptimized:
    """Parameters that get gradients but never change.

    What it measures: parameters with a gradient that no optimizer holds, that are not registered, or whose updates are
    zero.

    Why it matters: the gradient is computed and then thrown away.

    Example: `optimizer = AdamW(model.parameters())`, then `model.head = nn.Linear(512, 10)`.

    What to do: build the optimizer after the last change to the model. Keep layers in nn.ModuleList or nn.ModuleDict.
    Check that every parameter matches one group. If updates are lost to rounding, keep float32 weights. Updates that
    other code undoes are found by `gradwatch check --step-audit`.

    When it is wrong: a backbone that is left out on purpose without freezing it (info).

    When it is withdrawn: each of its tensors moved at `samples` + 1 measurements in a row, or something other than the
    optimizers moved it; for (11), an optimizer stepped again. (3), (6) to (8), (10) and (12) are never withdrawn.

    How it is detected: (1) A trainable tensor has a gradient, and no optimizer held it when the monitor attached. It is
    left out if something else moves it, such as another optimizer, a master copy, or the loop by hand: its measured
    update is not zero, or its sum or norm at step 1, 8, 10 and so on differs from step 0. A tensor that was frozen at
    that time and gets gradients now counts too, unless its gradient is stale: its norm has not risen for `stale` steps.
    (2) An optimizer holds a tensor with a gradient and a learning rate. Its measured updates are exactly zero and its
    norm stays the same, while other tensors move. (3) The autograd graph of the loss reaches parameters that the model
    keeps in a plain list, tuple or dict, or as a tensor that is not an nn.Parameter. `parameters()` does not list them,
    and nothing moved them between steps 0 and 8. (4) A group has a learning rate of zero, while others move. (5) All
    measured updates are exactly zero, at a rate that would move the weights visibly: the step of the optimizer does not
    update, or works on other tensors. (6) Nothing is left to train: an optimizer holds no parameter, or no parameter of
    the model requires a gradient. (7) A parameter joins the model after `watch`, or takes the place of one, and no
    optimizer holds it. (8) The loss reaches tensors that no watched model and no optimizer holds, such as class centers
    or loss weights. They do not move, and nothing clears their gradient (info). (9) No optimizer has made a step in the
    first 40, there are gradients, and most weights have not moved. (10) Each of the first 20 updates is made by a new
    optimizer, of a kind that keeps averages of the gradients. (11) After some updates there are none for `ended` steps,
    and all gradients stay exactly the same: the loop goes on with another model or optimizer than `watch` got. (12) A
    module that no optimizer holds had nearly the weights of a trained one at step 1. The loop writes its weights, as
    their version counters show, but they stay bit-identical for 100 steps while the trained weights move away: a target
    network is copied from itself, an average has a decay of 1, or its updates are lost in rounding.

    Exceptions to the rules: a backbone may be left out on purpose without freezing it. Fine-tuning a head looks like
    this: the tensors come first in the model, and an optimizer holds everything after them. That is reported as info,
    with the advice to freeze them. It stays a warning if a group holds no parameter, which is never intended, if
    nothing clears their gradient, which then adds up, or if a larger part of the model is frozen: freezing that part
    left these tensors out. Weights that are clipped after each step, as in a critic, may all reach the bound: they are
    left out if a tenth of their values or more are the largest or the smallest. An optimizer that has converged, as
    L-BFGS does by its own tolerance, has nothing left to update: a group is left out if all its tensors moved, and
    stopped at once with a gradient norm below a hundredth of the first.

    A copy that is never written is frozen on purpose, as the reference of a policy is: it is left out. So is a copy
    that loads the state of other modules, such as an opponent.

    Source: pytorch/pytorch documentation of torch.optim ("construct the optimizer after moving or changing the model"),
    https://pytorch.org/docs/stable/optim.html; minGPT, `configure_optimizers`, which asserts it.

    Args:
        every: Steps between two calls. 10: updates are measured that often. Tensors that no optimizer holds are judged
            at the second call.
        samples: Measured updates in a row that must be zero for (2). 3: no accident.
        stale: Steps without a rise of the gradient norm that show a stale gradient, for (1). 8: a living one rises at
            about every second step.
        gradient: Size of a gradient element, in units of the largest tensor's, up to which a tensor need not move, for
            (1) and (2). 0.0001: the gradient of a bias that a normalization cancels is rounding error, 7 decades below
            the others. If gradients vanish over depth, an update that is lost in rounding is a consequence.
        moving: Update/weight ratio that some other tensor must have, for (2) and (4). 1e-5: if none has it, the
            learning rate is too low for all tensors.
        ended: Steps without an update or a new gradient, for (11). 40: an accumulation has a new gradient at each.
    """

    code: ClassVar[str] = "GW301"
    kind: ClassVar[str] = "not-optimized"
    every: int = 10
    samples: int = 3
    stale: int = 8
    gradient: float = 1e-4
    moving: float = 1e-5
    ended: int = 40

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that is not optimized."""
        yield from find_nothing_to_train(self, history)
        yield from find_unregistered_tensors(self, history)
        yield from find_uncalled_optimizers(self, history)
        yield from find_rebuilt_optimizers(self, history)
        yield from find_unchanged_copies(self, history)
        yield from find_ended_updates(self, history, steps=self.ended)
        structure = structure_of(history)
        ratio_L = history.param.newest("update.ratio")  # nan where updates were not measured
        largest = np.fmax.reduce(ratio_L, initial=np.nan)  # ignores nan
        if structure.frozen:
            yield from find_unfrozen_parameters(self, history, ratio_L, stale=self.stale, gradient=self.gradient)
        if structure.unowned and history.step - history.param.steps()[0] >= self.every:  # by then it may have moved
            yield from find_unowned_parameters(self, history, ratio_L)
        if largest == 0:
            yield from find_missing_updates(self, history, samples=self.samples)
        # cheap: some trainable tensor has a measured update of zero
        if largest >= 0 and np.count_nonzero(ratio_L > 0) < structure.num_trainable and (ratio_L == 0).any():
            yield from find_unchanged_parameters(
                self, history, samples=self.samples, gradient=self.gradient, moving=self.moving
            )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of `samples` + 1 measurements in a row with all tensors moving, or the next update."""
        keys = {q.key for q in finding.evidence}
        if keys == {"tensors"} or WRITTEN in keys:  # an event counted them, and nothing measures them
            return None
        if any(q.key == ENDED for q in finding.evidence):
            return find_resumed_updates(history)
        tensors = tensors_of(history, finding)
        return find_recovery(history, tensors, samples=self.samples) if tensors else None

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("a new head is in no group", make_left_out(11, moves=False), ("layers.11.weight",))
        yield Example("the first layers are missing: their generator was used up", make_used_up(), ("layers.0.weight",))
        yield Example("no parameter is in any group", make_left_out(*range(12), moves=False), (None,))
        yield Example("an update is lost in rounding", make_stuck(4), ("layers.4.weight",))
        text = "the loss reaches 8 tensors in `convs`, a plain container that parameters() does not see"
        hidden = Synthetic(steps=20).add_event(UNREGISTERED, layer="convs", text=text, values={"tensors": 8.0})
        yield Example("layers are kept in a plain list", hidden.history(), ("convs",))
        yield Example("weights stop in the middle of a run", make_stopped(), ("layers.4.weight",))
        yield Example("a layer leaves the model, with its last gradient", make_stopped(has_left=True))
        yield Example("clipping holds all weights of a critic at its bound", make_stopped(is_clipped=True))
        yield Example("a group in the middle has a rate of 0", make_at_zero(6), ("layers.6.weight",))
        yield Example(
            "the first group has a rate of 0, as if frozen: for information", make_at_zero(0), ("layers.0.weight",)
        )
        yield Example("the model's own parameter is left out, before all its layers", make_own(), ("log_vars",))
        yield Example(
            "an adapter between frozen layers and the head is left out", make_frozen(0, 1, 2), ("layers.3.weight",)
        )
        yield Example(
            "a backbone is thawed and not added to the optimizer", make_thawed(moves=False), ("layers.0.weight",)
        )
        yield Example("a backbone is thawed and added to the optimizer", make_thawed(moves=True))
        yield Example("a layer that was trained and then frozen keeps its last gradient", make_stale())
        yield Example("nothing is trainable", make_event(NOTHING_TRAINABLE), (None,))
        yield Example(
            "the loss reaches class centers that no optimizer holds: for information", make_event(UNHELD), (None,)
        )
        yield Example("a new head is not given to the optimizer", make_event(PARAMETERS_NEW, layer="head"), ("head",))
        yield Example("the first layer is left out, and its gradient adds up", make_kept(), ("layers.0.weight",))
        yield Example("the optimizer returns before its first update", make_unmoved(), (None,))
        yield Example("the optimizer returns early, at a rate that rounds to nothing", make_unmoved(rate=1e-12))
        yield Example("the optimizer returns early while the rate is 0", make_unmoved(rate=0.0))
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("other code moves the layer that is in no group", make_left_out(5, moves=True))
        yield Example("a loop moves all weights by hand, between two steps", make_moved(0, 11))
        yield Example("a loop moves by hand what an optimizer holds and does not move", make_stuck(4, moves=True))
        yield Example(
            "a loop moves one of two layers by hand, and the other never",
            make_moved(11, 11, 5, 11),
            ("layers.5.weight",),
        )
        yield Example("optimizer.step is never called", make_uncalled(), (None,))
        text = "20 updates in a row were each made by a new Adam"
        rebuilt = Synthetic(steps=40).add_event(OPTIMIZER_REBUILT, text=text, values={"updates": 20.0})
        yield Example("the loop builds a new optimizer at each step", rebuilt.history(), (None,))
        yield Example("a target network is copied from itself", make_copied(), ("target",))
        yield Example("the loop goes on with another model", make_ended(), (None,))
        yield Example("gradients are accumulated over many steps", make_ended(is_same=False))
        yield Example("a gradient scaler skips all updates", make_uncalled(loss_scale=1024.0))
        idle = Synthetic(steps=40)
        idle.update_factor_TL[:] = 0
        yield Example("the step of the optimizer changes nothing", idle.history(), (None,))
        tiny = Synthetic(steps=40, lr=1e-12)
        tiny.update_factor_TL[:] = 0
        yield Example("the rate is so low that rounding loses each update", tiny.history())
        yield Example("the whole optimizer has converged, as L-BFGS does", make_converged())
        yield Example("one of two optimizers has converged", make_converged(4))
        yield Example(
            "a layer stops near its minimum, and the others of its group do not",
            make_stopped(left=1e-3),
            ("layers.4.weight",),
        )
        yield Example("all layers stop, with a tenth of the first gradient", make_converged(left=0.1), (None,))
        yield Example("no weight has ever moved, and the gradient falls", make_converged(moves=False), (None,))
        skipped = Synthetic(steps=40, precision="fp16")
        skipped.skipped_T[:] = 1
        yield Example("updates that are skipped move nothing", skipped.history())
