"""Find sigmoid, tanh or softmax units in their flat tails, where no gradient passes (GW202)."""

# T = samples of the activations, A = activation modules

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.activations.saturated_activation_rules.minimized_entropy import find_minimized_entropy_of
from gradwatch.detect.features.baseline import first_loss, is_learned, newest_loss
from gradwatch.detect.features.events import was_trained
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.features.lasting_frac import lasting_frac
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.events import ENTROPY_MINIMIZED, WEIGHTS_TRAINED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

FLAT_ON_BOTH_SIDES = ("Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh", "Gate", "Clamp")
"""Activations with flat tails on both sides. ReLU6, ELU and similar ones rest on one flat side on purpose."""

CLIPPED_BY_HARDTANH = 0.32
"""Fraction of standard normal inputs that a hard tanh clips: erfc(1 / sqrt 2)."""

FRAC = "act.saturated_frac"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedActivation:
    """Units in the flat tails of a sigmoid, tanh or softmax.

    What it measures: the fraction of outputs whose slope is below 5 % of its maximum; for a softmax, the fraction of
    rows in which one entry is above 0.99.

    Why it matters: the gradient through a saturated unit shrinks at least twentyfold, so earlier layers hardly learn.

    Example: `torch.sigmoid(fc(images))` with pixels of 0 to 255.

    What to do: normalize the inputs. Use Xavier initialization. Divide attention scores by the square root of their
    dimension. Normalize before the activation, or use another activation. Subtract the entropy of a policy from its
    loss.

    When it is wrong: gates that are closed at first on purpose; hard attention; a pretrained network.

    When it is withdrawn: less than `freed` of the reported fraction was saturated in each of `recovered` samples in a
    row.

    How it is detected: the fraction is the smallest of successive sampled batches. (1) From the start: `early` of the
    outputs have been saturated since the first batch, before anything was learned that could justify it. A model that
    was trained before in the same process may have learned it, and counts as later. (2) Later:
    `late` of the outputs are saturated. A softmax does not count, because it becomes confident by learning. Neither
    does the last module if the loss has fallen to `learned`, or belongs to several optimizers and so shows no progress.
    (3) Suddenly, for any of these: `late` of the outputs became saturated within `sudden` steps and stayed, while
    `confident` of the loss is left. Learning is slower than that; a temperature that falls too fast is not. (4) The
    graph of the loss adds the entropy of a policy to the loss, and the gradient of the policy's last layer has fallen
    by `fall`. Factors count as positive: a bonus with a negative coefficient that is added looks the same.

    Source: Glorot & Bengio 2010, sec. 3, https://proceedings.mlr.press/v9/glorot10a.html; Vaswani et al. 2017, sec.
    3.2.1, https://arxiv.org/abs/1706.03762.

    Args:
        every: Steps between two calls. 10: activations are sampled that often.
        early: Saturated fraction, 0..1, above the usual one (0.32 for a hard tanh, `shut` for gates and clamps, else
            0), to report if it was so from the start. All samples of a `gumbel_softmax` may be. 0.3: healthy fresh
            networks begin below 0.15
            (`scripts/studies/false_alarms.py`); a pretrained network had 0.43.
        late: Saturated fraction, 0..1, to report later. 0.9: healthy tanh layers of trained networks had up to 0.66.
        samples: Successive samples over which the smallest counts. 2: two batches that agree.
        fall: Gradient norm of a policy's last layer in the first 16 steps, over its norm in the newest 16. 10: with the
            right sign it stays within 3 (`scripts/fault_zoo`).
        start: Steps that count as the start, for (1). 50: saturation within them comes from the scale of the inputs,
            not from learning.
        shut: Saturated fraction, 0..1, that is usual from the start for gates (a sigmoid or tanh that multiplies) and
            clamps, for (1). 0.6: most gates may be shut at first, and a clamp exists to cut off values.
        learned: Loss, in units of the first, up to which the last module may be confident, for (2). 0.8: the model has
            learned enough.
        sudden: Steps within which outputs become saturated for (3). 40: learning multiplies the inputs of a function by
            10 in so few steps only if updates are large, which `learning-rate-too-high` reports.
        stay: Samples for which the outputs must have stayed saturated, for (3). 3: 2 more than chance needs.
        confident: Loss, in units of the first, below which a model may be confident and right, for (3). 0.2: a
            probability of 0.99 has a cross entropy of 0.01.
        freed: Saturated fraction, in units of the reported one, below which a module has recovered. 0.5: half of the
            units pass gradients again.
        recovered: Samples in a row below `freed` that withdraw a finding. 5: a few may be so by chance.
    """

    code: ClassVar[str] = "GW202"
    kind: ClassVar[str] = "saturated-activation"
    every: int = 10
    early: float = 0.3
    late: float = 0.9
    samples: int = 2
    fall: float = 10.0
    start: int = 50
    shut: float = 0.6
    learned: float = 0.8
    sudden: int = 40
    stay: int = 3
    confident: float = 0.2
    freed: float = 0.5
    recovered: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each saturated module."""
        yield from findings_of(self, history, self._signs(history))
        yield from findings_of(self, history, find_minimized_entropy_of(history, fall=self.fall))

    def _signs(self, history: History) -> Iterator[Sign]:
        # what a trained model does from its first batch on may have been learned
        is_start = history.step < self.start and not was_trained(history)
        bound = min(self.early, self.late) if is_start else self.late
        saturated_A = lasting_frac(history, FRAC, samples=self.samples, at_least=bound)
        if saturated_A is None:
            return
        # over the whole window: saturated at each sample so far, thus from the start
        always_A = history.act.window(FRAC).min(axis=0)
        last = len(history.info.activations) - 1
        for a, activation in enumerate(history.info.activations):
            is_softmax = activation.module_type.startswith("Softmax")
            if not is_softmax and activation.module_type not in FLAT_ON_BOTH_SIDES:
                continue
            is_from_start = is_start and always_A[a] >= self.early + self._usual(activation.module_type)
            # a trained softmax is confident on purpose, and so is a last sigmoid
            may_be_confident = is_softmax or (a == last and _may_have_learned(history, left=self.learned))
            is_late = saturated_A[a] >= self.late and not may_be_confident
            if is_from_start or is_late or self._is_sudden(history, a):
                bound = self.early if is_from_start else self.late
                is_high_T = history.act.window(FRAC)[:, a] >= bound
                yield Sign(
                    f"{100 * saturated_A[a]:.0f} % of the outputs of {activation.name} are saturated",
                    (
                        Quantity(key=FRAC, value=float(saturated_A[a]), unit="0..1"),
                        Quantity(key="act.mean", value=float(history.act.newest("act.mean")[a])),
                        Quantity(key="act.std", value=float(history.act.newest("act.std")[a])),
                    ),
                    since=start_of_state(is_high_T, history.act.steps()),
                    layer=activation.name,
                    # no earlier finding explains saturation from the start
                    severity=Severity.WARNING if is_from_start else None,
                )

    def _usual(self, module_type: str) -> float:
        """Return the fraction that may be saturated from the start: 0 for most types, for which 0.03 is usual."""
        usual = {"Hardtanh": CLIPPED_BY_HARDTANH, "Gate": self.shut, "Clamp": self.shut, "SoftmaxSample": 1.0}
        return usual.get(module_type, 0.0)

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of `recovered` samples in a row with less than `freed` as many saturated outputs."""
        was = next((q.value for q in finding.evidence if q.key == FRAC), 0.0)
        if finding.layer not in history.act.layers:
            return None
        saturated_T = history.act.window(FRAC)[:, history.act.layers.index(finding.layer)]
        end = start_of_state(saturated_T < self.freed * was, history.act.steps(), least=self.recovered)
        reason = f"{100 * saturated_T[-1]:.0f} % of its outputs were saturated"
        return None if end is None else Recovery(end, reason)

    def _is_sudden(self, history: History, activation: int) -> bool:
        """Return whether nearly all outputs entered the tails at once and stayed while much of the loss remained."""
        # the loss of several optimizers, as in a GAN, does not show progress
        if "+" in history.info.optimizer or is_learned(history, left=self.confident):
            return False
        saturated_T = history.act.window(FRAC)[:, activation]
        # activations are sampled, so most rows are nan
        is_known_T = ~np.isnan(saturated_T)
        steps_T, saturated_T = history.act.steps()[is_known_T], saturated_T[is_known_T]
        free, not_yet = np.flatnonzero(saturated_T < self.early), np.flatnonzero(saturated_T < self.late)
        if not len(free) or len(saturated_T) - 1 - not_yet[-1] < self.stay:
            return False
        return bool(steps_T[not_yet[-1] + 1] - steps_T[free[-1]] <= self.sudden)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("raw pixels go into a sigmoid", _with(1, "Sigmoid", fraction=0.95, onset=0), ("acts.1",))
        trained = _make(1, "Sigmoid", fraction=0.5, onset=0).add_event(WEIGHTS_TRAINED, values={"changes": 300})
        yield Example("half of the outputs of a model that was trained before", trained.history())
        yield Example("attention is one-hot from the start", _with(2, "Softmax", fraction=0.5, onset=0), ("acts.2",))
        yield Example("a tanh is driven into its tails", _with(0, "Tanh", fraction=0.95, onset=60), ("acts.0",))
        yield Example("a healthy run", Synthetic(steps=100, activations=3).history())
        yield Example("a tanh layer uses its tails, once trained", _with(0, "Tanh", fraction=0.6, onset=60))
        yield Example("a hard tanh clips a third of normalized inputs", _with(1, "Hardtanh", fraction=0.34, onset=0))
        yield Example("nearly all gates are shut from the start", _with(1, "Gate", fraction=0.95, onset=0), ("acts.1",))
        yield Example("half of the gates are shut at first", _with(1, "Gate", fraction=0.5, onset=0))
        yield Example(
            "samples of a categorical distribution are nearly one-hot", _with(1, "SoftmaxSample", fraction=0.5, onset=0)
        )
        yield Example("a clamp cuts off a third of its inputs", _with(1, "Clamp", fraction=0.35, onset=0))
        yield Example("a temperature falls too fast", _with(1, "Softmax", fraction=0.97, onset=60), ("acts.1",))
        confident = _make(2, "Sigmoid", fraction=0.97, onset=60)
        confident.loss_T[60:] *= 0.02
        yield Example("the output's sigmoid becomes confident", confident.history())
        slow = _make(1, "Softmax", fraction=0.97, onset=60)
        slow.saturated_frac_TA[:, 1] = np.minimum(0.012 * slow.t_T, 0.97)
        yield Example("attention sharpens step by step", slow.history())
        stuck = _make(2, "Tanh", fraction=1.0, onset=30)
        stuck.loss_T[:] = 2500
        yield Example("the output's tanh cannot reach its targets", stuck.history(), ("acts.2",))
        yield Example("the loss adds the entropy of a policy", _with_entropy(fall=30.0), ("layers.11",))
        yield Example("the loss adds an entropy that its policy keeps", _with_entropy(fall=3.0))
        yield Example("half of the outputs of a ReLU6 are 0 or 6", _with(1, "ReLU6", fraction=0.5, onset=0))


def _with_entropy(*, fall: float) -> History:
    """Return a run whose loss adds the entropy of its last layer, with a gradient that falls from step 50."""
    made = Synthetic(steps=120)
    layers = tuple(replace(layer, module=layer.name.removesuffix(".weight")) for layer in made.info.layers)
    made.info = replace(made.info, layers=layers)
    made.grad_l2_TL[50:, -1] /= fall * made.signal_T[0]
    made.add_event(ENTROPY_MINIMIZED, layer="layers.11", text="the loss adds the entropy")
    return made.history()


def _may_have_learned(history: History, *, left: float) -> bool:
    """Return whether at most `left` of the loss remains, or it belongs to several optimizers and so cannot tell."""
    is_high = newest_loss(history) > left * first_loss(history)
    return "+" in history.info.optimizer or not is_high


def _with(act: int, module_type: str, *, fraction: float, onset: int) -> History:
    return _make(act, module_type, fraction=fraction, onset=onset).history()


def _make(act: int, module_type: str, *, fraction: float, onset: int) -> Synthetic:
    """Return a run with three modules of a type, one of them saturated from `onset`."""
    made = Synthetic(steps=100, activations=3)
    made.saturated_frac_TA[:] = 0.02
    infos = tuple(replace(a, module_type=module_type) for a in made.info.activations)
    made.info = replace(made.info, activations=infos)
    return made.saturated(act, fraction=fraction, onset=onset, module_type=module_type)
