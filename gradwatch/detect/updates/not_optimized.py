"""Find parameters that get gradients but are in no optimizer group, or never move (GW301)."""

# L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.recovery import tensors_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.not_optimized_rules.recovered import find_recovery
from gradwatch.detect.updates.not_optimized_rules.stuck import find_missing_updates, find_unchanged_parameters
from gradwatch.detect.updates.not_optimized_rules.unowned import (
    find_nothing_to_train,
    find_unfrozen_parameters,
    find_unowned_parameters,
    find_unregistered_tensors,
)
from gradwatch.events import (
    EMPTY_GROUP,
    NOTHING_TRAINABLE,
    PARAMETERS_NEW,
    UNHELD,
    UNHELD_KEPT,
    UNREGISTERED,
    WEIGHTS_MOVED,
    EventKind,
)
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

    When it is wrong: a backbone that is left out on purpose without freezing it (info). Weights of a critic that are
    clipped after each step may all reach the bound.

    When it is withdrawn: each of its tensors moved at `samples` + 1 measurements in a row, or something else than the
    optimizers moved it. (3) and (6) to (8) are never withdrawn.

    How it is detected: (1) A trainable tensor has a gradient, and no optimizer held it when the monitor attached. It is
    left out if something else moves it, such as another optimizer, a master copy, or the loop by hand: its measured
    update is not zero, or its sum or norm at step 1, 8, 10 and so on differs from step 0. A tensor that was frozen at
    that time and gets gradients now counts too. (2) An optimizer holds a tensor with a gradient and a learning rate.
    Its measured updates are exactly zero and its norm stays the same, while other tensors move. (3) The autograd graph
    of the loss reaches parameters that the model keeps in a plain list, tuple or dict, or as a tensor that is no
    nn.Parameter. `parameters()` does not list them, and nothing moved them between steps 0 and 8. (4) A group has a
    learning rate of zero, while others move. (5) All measured updates are exactly zero, at a rate that would move the
    weights visibly: the step of the optimizer does not update, or works on other tensors. (6) Nothing is left to train:
    an optimizer holds no parameter, or no parameter of the model requires a gradient. (7) A parameter joins the model
    after `watch`, or takes the place of one, and no optimizer holds it. (8) The loss reaches tensors that no watched
    model and no optimizer holds, such as class centers or loss weights. They do not move, and nothing clears their
    gradient (info).

    Exceptions to the rules: a backbone may be left out on purpose without freezing it. Fine-tuning a head looks like
    this: the tensors come first in the model, and an optimizer holds everything after them. That is reported as info,
    with the advice to freeze them. It stays a warning if a group holds no parameter, which is never intended, if
    nothing clears their gradient, which then adds up, or if a larger part of the model is frozen: freezing that part
    left these tensors out. Weights that are clipped after each step, as in a critic, may all reach the bound; they are
    left out if the bound is a round number. An optimizer that has converged, as L-BFGS does by its own tolerance, has
    nothing left to update: a group is left out if all its tensors moved, and stopped at once with a gradient norm below
    a hundredth of the first.

    Source: pytorch/pytorch documentation of torch.optim ("construct the optimizer after moving or changing the model"),
    https://pytorch.org/docs/stable/optim.html; minGPT, `configure_optimizers`, which asserts it.

    Args:
        every: Steps between two calls. 10: updates are measured that often. Tensors that no optimizer holds are judged
            at the second call.
        samples: Measured updates in a row that must be zero for (2). 3: no accident.
    """

    code: ClassVar[str] = "GW301"
    kind: ClassVar[str] = "not-optimized"
    every: int = 10
    samples: int = 3

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that is not optimized."""
        yield from find_nothing_to_train(self, history)
        yield from find_unregistered_tensors(self, history)
        structure = structure_of(history)
        ratio_L = history.param.newest("update.ratio")  # nan where updates were not measured
        largest = np.fmax.reduce(ratio_L, initial=np.nan)  # ignores nan
        if structure.frozen:
            yield from find_unfrozen_parameters(self, history, ratio_L)
        if structure.unowned and history.step - history.param.steps()[0] >= self.every:  # by then it may have moved
            yield from find_unowned_parameters(self, history, ratio_L)
        if largest == 0:
            yield from find_missing_updates(self, history, samples=self.samples)
        # cheap: some trainable tensor has a measured update of zero
        if largest >= 0 and np.count_nonzero(ratio_L > 0) < structure.num_trainable and (ratio_L == 0).any():
            yield from find_unchanged_parameters(self, history, samples=self.samples)

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of `samples` + 1 measurements in a row at which all its tensors moved."""
        if {q.key for q in finding.evidence} == {"tensors"}:  # an event counted them, and nothing measures them
            return None
        tensors = tensors_of(history, finding)
        return find_recovery(history, tensors, samples=self.samples) if tensors else None

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("a new head is in no group", _left_out(11, moves=False), ("layers.11.weight",))
        yield Example("what comes first was given as a generator that was used up", _used_up(), ("layers.0.weight",))
        yield Example("no parameter is", _left_out(*range(12), moves=False), (None,))
        yield Example("an update is lost in rounding", _stuck(4), ("layers.4.weight",))
        text = "the loss reaches 8 tensors in `convs`, a plain container that parameters() does not see"
        hidden = Synthetic(steps=20).add_event(UNREGISTERED, layer="convs", text=text, values={"tensors": 8.0})
        yield Example("layers are kept in a plain list", hidden.history(), ("convs",))
        yield Example("weights stop in the middle of a run", _stopped(at=0.123), ("layers.4.weight",))
        yield Example("a layer leaves the model, with its last gradient", _stopped(at=0.123, has_left=True))
        yield Example("all weights of a critic have come to the bound that they are clipped at", _stopped(at=0.01))
        yield Example("a group in the middle has a rate of 0", _at_zero(6), ("layers.6.weight",))
        yield Example("the first layer has, as frozen ones do: for information", _at_zero(0), ("layers.0.weight",))
        yield Example("the model's own parameter is, which comes before all its layers", _own(), ("log_vars",))
        yield Example(
            "an adapter between frozen layers and the head is left out", _frozen(0, 1, 2), ("layers.3.weight",)
        )
        yield Example("a backbone is thawed and not added to the optimizer", _thawed(moves=False), ("layers.0.weight",))
        yield Example("it is added, too", _thawed(moves=True))
        yield Example("what was trained before it was frozen has its last gradient still", _stale())
        yield Example("nothing is trainable", _with(NOTHING_TRAINABLE), (None,))
        yield Example("the loss reaches class centers that no optimizer holds: for information", _with(UNHELD), (None,))
        yield Example("a new head is not given to the optimizer", _with(PARAMETERS_NEW, layer="head"), ("head",))
        yield Example("what is left out comes first, and its gradient adds up", _kept(), ("layers.0.weight",))
        yield Example("the optimizer returns before its first update", _unmoved(), (None,))
        yield Example("it does so at a rate of which nothing is left after rounding", _unmoved(rate=1e-12))
        yield Example("it does so while the rate is 0", _unmoved(rate=0.0))
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("somebody else moves it", _left_out(5, moves=True))
        yield Example("a loop moves all by hand, between two steps", _moved(0, 11))
        yield Example("so is what an optimizer holds, and does not move", _stuck(4, moves=True))
        yield Example("one of two is moved so, and the other never", _moved(11, 11, 5, 11), ("layers.5.weight",))
        idle = Synthetic(steps=40)
        idle.update_factor_TL[:] = 0
        yield Example("the step of the optimizer changes nothing", idle.history(), (None,))
        tiny = Synthetic(steps=40, lr=1e-12)
        tiny.update_factor_TL[:] = 0
        yield Example("the rate is so low that rounding loses each update", tiny.history())
        yield Example("the whole optimizer has converged, as L-BFGS does", _converged())
        yield Example("one of two optimizers has", _converged(4))
        yield Example(
            "a layer stops near its minimum, and not the others of its group",
            _stopped(at=0.123, left=1e-3),
            ("layers.4.weight",),
        )
        yield Example("all stop, with a tenth of the first gradient", _converged(left=0.1), (None,))
        yield Example("no weight has ever moved, and the gradient falls", _converged(moves=False), (None,))
        skipped = Synthetic(steps=40, precision="fp16")
        skipped.skipped_T[:] = 1
        yield Example("updates that are skipped move nothing", skipped.history())


def _left_out(*layers: int, moves: bool) -> History:
    return _made_without(*layers, moves=moves).history()


def _with(kind: EventKind, *, layer: str | None = None) -> History:
    return Synthetic(steps=20).add_event(kind, layer=layer, text="found", values={"tensors": 1.0}).history()


def _kept() -> History:
    return _made_without(0, moves=False).add_event(UNHELD_KEPT, layer="layers.0.weight", text="kept").history()


def _moved(first: int, last: int, *left: int) -> History:
    """Return a run in which some layers are in no group, and the layers from `first` to `last` move."""
    made = _made_without(*(left or range(first, last + 1)), moves=False)
    return made.add_event(WEIGHTS_MOVED, step=1, values={"first": float(first), "last": float(last)}).history()


def _used_up() -> History:
    made = _made_without(0, moves=False)
    return made.add_event(
        EMPTY_GROUP, text="group 0 of the optimizer holds no parameter", values={"group": 0.0}
    ).history()


def _made_without(*layers: int, moves: bool) -> Synthetic:
    made = Synthetic(steps=20)
    infos = tuple(replace(info, group=None) if i in layers else info for i, info in enumerate(made.info.layers))
    made.info = replace(made.info, layers=infos)
    made.update_factor_TL[:, layers] = float(moves)
    return made


def _frozen(*layers: int) -> History:
    """Return a run in which some layers are frozen and the next layer is left out."""
    made = _made_without(max(layers) + 1, moves=False)
    infos = (replace(la, trainable=False, group=None) if i in layers else la for i, la in enumerate(made.info.layers))
    made.info = replace(made.info, layers=tuple(infos))
    made.grad_l2_TL[:, list(layers)] = np.nan
    return made.history()


def _thawed(*, moves: bool) -> History:
    """Return a run in which the first layer is frozen for half of the steps."""
    made = _made_without(0, moves=moves)
    made.info = replace(made.info, layers=(replace(made.info.layers[0], trainable=False), *made.info.layers[1:]))
    made.grad_l2_TL[:10, 0] = np.nan
    return made.history()


def _stale() -> History:
    """Return a run in which the first layer is frozen, with a gradient that never changes."""
    made = _made_without(0, moves=False)
    made.info = replace(made.info, layers=(replace(made.info.layers[0], trainable=False), *made.info.layers[1:]))
    made.grad_l2_TL[:, 0] = 0.125
    return made.history()


def _own() -> History:
    """Return a run in which no optimizer holds a parameter of the root module."""
    made = _made_without(0, moves=False)
    own = replace(made.info.layers[0], name="log_vars", module="", shape=(2,))
    made.info = replace(made.info, layers=(own, *made.info.layers[1:]))
    return made.history()


def _at_zero(layer: int) -> History:
    made = Synthetic(steps=60).own_rate(layer, factor=0.0)
    return _still(made, layer).history()


def _converged(layer: int | None = None, *, left: float = 1e-3, moves: bool = True) -> History:
    """Return a run in which all layers, or one with an optimizer of its own, stop at `left` of the first gradient."""
    made = Synthetic(steps=60)
    if layer is not None:
        made.own_rate(layer, factor=1.0)
    which = slice(None) if layer is None else layer
    made.update_factor_TL[20 if moves else 0 :, which] = 0
    made.weight_l2_TL = made.weight_l2_TL * np.ones((60, 12))
    made.grad_l2_TL[20:, which] *= left
    return made.history()


def _stopped(*, at: float, has_left: bool = False, left: float = 1.0) -> History:
    """Return a run in which a layer moves until the root mean square of its weights is `at`, or leaves the model."""
    made = Synthetic(steps=60)
    made.update_factor_TL[20:, 4] = 0
    made.grad_l2_TL[20:, 4] *= left
    made.weight_l2_TL = made.weight_l2_TL * np.ones((60, 12))
    made.weight_l2_TL[20:, 4] = at * math.prod(made.info.layers[4].shape) ** 0.5
    if has_left:
        made.grad_l2_TL[20:, 4] = made.grad_l2_TL[19, 4]
    return made.history()


def _unmoved(*, rate: float = 1e-3) -> History:
    """Return a run in which no weight changes."""
    made = Synthetic(steps=60)
    made.update_factor_TL[:] = 0
    made.weight_l2_TL = made.weight_l2_TL[0] * np.ones((60, 12))
    made.lr_T = np.full(60, rate)
    return made.history()


def _stuck(layer: int, *, moves: bool = False) -> History:
    made = Synthetic(steps=60)
    made.update_factor_TL[:, layer] = 0
    return (made if moves else _still(made, layer)).history()


def _still(made: Synthetic, layer: int) -> Synthetic:
    made.weight_l2_TL[:, layer] = made.weight_l2_TL[0, layer]
    return made
