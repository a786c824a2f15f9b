"""Find NaN or Inf in the loss or in a gradient, and the layer where it entered (GW001)."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.scope import module_of
from gradwatch.events import EMPTY_MEAN, IGNORES_LABELS, LOSS_NAN, LOSS_WITHHELD
from gradwatch.history.store import History, Rows
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

NORM = "grad_norm.before_clip"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """NaN or Inf in the loss or in a gradient.

    What it measures: whether the loss and the total gradient norm are finite, at every step.

    Why it matters: one update with a NaN makes every weight it touches NaN, and no later update repairs it.

    Example: `torch.log(p)` with p = 0, or `torch.sqrt(x)` at x = 0, whose gradient is Inf.

    What to do: run `gradwatch replay` to find the operation: a log, division, square root or norm at zero, an overflow,
    a fully masked attention row, or NaN in the data. Restart from the last checkpoint before it. If the norm rose
    first, find out why. If every label of a batch is ignored, leave the batch out.

    When it is wrong: a step that a GradScaler skipped to find its scale, with a finite loss, is not reported. Call
    `monitor.step(None)` if a step has no loss.

    How it is detected: the backward pass runs from the output to the input, so a NaN makes every gradient nearer to the
    input NaN. It entered at the affected layer nearest to the output. A loss that is not finite affects all layers, and
    is reported for the whole run. A loss that was not passed is missing rather than NaN if the gradients are finite.

    Exceptions to the rules: the finding is critical, also if the update was skipped, because the batch, the formula or
    the weights are at fault, and skipping only hides it. It is a warning if the step shows that nothing was harmed: the
    loss is NaN and every gradient is finite, as of a mean over nothing; or only a gradient is not finite, and the
    update was skipped. Later harm makes it critical.

    Source: Goldberg 1991, "What every computer scientist should know about floating-point arithmetic"; PyTorch notes on
    numerical accuracy, https://pytorch.org/docs/stable/notes/numerical_accuracy.html.
    """

    code: ClassVar[str] = "GW001"
    kind: ClassVar[str] = "non-finite"
    every: ClassVar[int] = 1

    def triggers_T(self, rows: Rows, history: History) -> NDArray[np.bool_]:
        """Select the steps with a loss or gradient norm that is not finite."""
        loss, norm = history.run.columns["loss"], history.run.columns[NORM]
        # the sum is not finite if either is not: a loop without a loss triggers at every step
        return ~np.isfinite(rows.run_TS[:, loss] + rows.run_TS[:, norm])

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield the layer where NaN or Inf entered, at the first step with NaN or Inf, or with harm from it."""
        missing_T = _missing(history, 2)
        is_affected_T = _is_affected(history, missing_T)
        if not is_affected_T[-1]:
            return
        earlier = [f for f in history.findings if f.kind == self.kind]
        is_first = not is_affected_T[:-1].any()
        # later steps repeat the first one, but a harmless NaN may be followed at once by a harmful one
        if is_first or (earlier and max(f.severity for f in earlier) < Severity.CRITICAL):
            finding = self._finding(history, has_loss=not missing_T[-1])
            if is_first or finding.severity == Severity.CRITICAL:
                yield _continued(finding, earlier)

    def _finding(self, history: History, *, has_loss: bool) -> Finding:
        nonfinite_L = history.param.newest("grad.nonfinite")
        loss = float(history.run.newest("loss")[0])
        affected = np.flatnonzero(nonfinite_L > 0)
        skipped = history.run.newest("skipped")[0] == 1
        evidence = [Quantity(key="loss", value=loss)]
        # without a backward pass there is no gradient to count in
        if not np.isnan(nonfinite_L).all():
            label = "layers with NaN or Inf"
            evidence += [
                Quantity(key="non_finite.layers", label=label, value=float(len(affected))),
                Quantity(key="grad.nonfinite", value=float(np.nansum(nonfinite_L)), unit="elements"),
            ]
        layer, is_harmless = None, skipped
        if math.isfinite(loss) or not has_loss:
            # backward runs from the output to the input: the last layer with NaN got it first
            layer = module_of(history, int(affected[-1]))
            module_type = history.info.layers[affected[-1]].module_type
            message = f"NaN/Inf gradients first appeared in layer `{layer}` ({module_type})"
            message += f"; the loss was still finite ({loss:.3g})" if has_loss else ""
        else:
            message = f"the loss became {'NaN' if math.isnan(loss) else 'Inf' if loss > 0 else '-Inf'}"
            why, is_harmless = _unharmed(history, loss)
            if why and is_harmless:
                message += f", {why}"
                evidence.append(Quantity(key="loss.values", label="values in the mean of the loss", value=0.0))
            elif is_harmless:
                message += ", and every gradient was finite: no weight was harmed"
        return finding_of(
            self,
            history,
            message + ("; the update was skipped" if skipped else ""),
            *evidence,
            layer=layer,
            severity=Severity.WARNING if is_harmless else Severity.CRITICAL,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        faulty = Synthetic(steps=60).non_finite(step=40, layers=range(5))
        yield Example("a NaN enters at the fifth of twelve layers", faulty.history(), faulty.names(4))
        yield Example("the loss becomes NaN", Synthetic(steps=60).non_finite(step=40, lasting=True).history(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        scaler = Synthetic(steps=60, precision="fp16").non_finite(step=3, value=np.inf, count=40)
        scaler.skipped_T[3] = 1
        yield Example("a GradScaler skips an overflow while it finds its scale", scaler.history())
        without = Synthetic(steps=60).non_finite(step=40, layers=range(5))
        without.loss_T[:] = np.nan
        yield Example("a NaN enters in a loop that passes no loss", without.history(), without.names(4))
        spoilt = Synthetic(steps=60).non_finite(step=0, lasting=True)
        yield Example("the loss is NaN from the first step", spoilt.history(), (None,))
        masked = Synthetic(steps=60)
        masked.loss_T[40], masked.grad_l2_TL[40] = np.nan, 0
        yield Example("the loss of a batch is a mean over nothing", masked.history(), (None,))
        skipping = Synthetic(steps=60).no_gradient(None)
        skipping.skipped_T[:], skipping.loss_T[:] = 1, np.nan
        yield Example("the loss is NaN and every update is skipped before a backward", skipping.history(), (None,))
        silent = Synthetic(steps=60)
        silent.loss_T[:] = np.nan
        yield Example("a loop passes no loss", silent.history())
        ended = Synthetic(steps=60)
        ended.loss_T[20:] = np.nan
        ended.add_event(LOSS_WITHHELD, step=20)
        yield Example("a loop stops passing its loss, and says so", ended.history())
        given = Synthetic(steps=60).add_event(LOSS_NAN, step=0)
        given.loss_T[:] = np.nan
        yield Example("the loss is NaN from the first step, with finite gradients", given.history(), (None,))
        rare = Synthetic(steps=60)
        rare.loss_T[rare.t_T % 10 > 0] = np.nan
        yield Example("a loop passes every tenth loss", rare.history())
        unread = Synthetic(steps=60).no_gradient(None)
        unread.loss_T[:] = np.nan
        yield Example("a loop passes no loss, and no gradient is read", unread.history())
        silent_scaler = Synthetic(steps=60).loss_scale_skips((20, 40))
        silent_scaler.loss_T[:] = np.nan
        yield Example("a GradScaler skips an overflow in a loop that passes no loss", silent_scaler.history())
        frozen = Synthetic(steps=60).no_gradient(3)
        yield Example("a gradient that is None is missing, not NaN", frozen.history())


def _unharmed(history: History, loss: float) -> tuple[str, bool]:
    """Return why the loss is a mean over nothing, or an empty text, and whether the newest step harmed nothing.

    A mean over nothing is 0 / 0, and the derivative of each term that is left out is exactly 0. Its gradient shows this
    only if a backward pass was made, which a skipped update does not show.
    """
    l2_L, skipped = history.param.newest("grad.l2"), history.run.newest("skipped")[0] == 1
    known_L = l2_L[~np.isnan(l2_L)]
    is_finite = not skipped and len(known_L) > 0 and not (history.param.newest("grad.nonfinite") > 0).any()
    is_zero = is_finite and not known_L.any()
    proof = next((e for e in events_of(history, EMPTY_MEAN) if e.step == history.step), None)
    # nothing was harmed if no update was made from it either
    is_harmless = math.isnan(loss) and (is_finite or (skipped and proof is not None))
    where = f"in the batch of step {history.step}"
    if proof:
        return f"because {proof.text}, {where}", is_harmless
    if not is_zero:
        return "", is_harmless
    ignored = next((e.values["ignore_index"] for e in events_of(history, IGNORES_LABELS)), None)
    if ignored is not None:
        return f"a mean over nothing: every label is ignore_index ({ignored:.0f}) {where}", is_harmless
    return f"a mean over nothing: the gradient is exactly 0 {where}", is_harmless


def _continued(finding: Finding, earlier: list[Finding]) -> Finding:
    """Return a finding that replaces a less severe one of its layer, with the message of both."""
    before = next((f for f in earlier if f.layer == finding.layer and f.severity < finding.severity), None)
    if before is None:
        return finding
    return replace(finding, message=f"{before.message}; at step {finding.step}, {finding.message}")


def _is_affected(history: History, missing_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each of the newest steps whether its NaN or Inf must be reported."""
    loss_T = history.scalar("loss", len(missing_T))
    # a GradScaler skips overflows by design
    is_overflow_T = (history.scalar("skipped", len(missing_T)) == 1) & history.info.loss_scaling
    is_loss_bad_T = ~np.isfinite(loss_T) & ~missing_T
    return np.asarray(is_loss_bad_T | (_has_bad_gradient(history, len(missing_T)) & ~is_overflow_T), np.bool_)


def _missing(history: History, length: int) -> NDArray[np.bool_]:
    """Return for each of the newest steps whether its loss is nan because the loop did not pass it.

    A NaN loss makes the gradients NaN, or the update is skipped. A step without a loss but with good gradients shows
    that the loop does not pass its loss at every step. Its loss may then be missing at later steps as well. After two
    losses in a row a nan is a NaN, unless the loop announced that it passes none. The first NaN that the loop passed
    has an event, and is not missing.
    """
    is_nan_T, was_skipped_T = np.isnan(history.scalar("loss")), history.scalar("skipped") == 1
    norm_T = history.scalar(NORM)
    is_due_T = np.zeros(len(is_nan_T), np.bool_)
    if not any(event.kind == LOSS_WITHHELD.name for event in history.events):
        # two losses in a row: the loop passes every loss, so the next one is due
        is_due_T[2:] = ~is_nan_T[1:-1] & ~is_nan_T[:-2]
    went_well_T = np.isfinite(norm_T) & ((norm_T > 0) | ~was_skipped_T)  # 0 is the norm of no gradients, too
    is_withheld_T = np.logical_or.accumulate(is_nan_T & ~is_due_T & went_well_T)[-length:]
    is_unread_T = (np.isnan(norm_T) & ~was_skipped_T)[-length:] & ~_has_bad_gradient(history, length)
    was_given_T = np.isin(history.run.steps(length), [e.step for e in history.events if e.kind == LOSS_NAN.name])
    return np.asarray((is_nan_T & ~is_due_T)[-length:] & (is_withheld_T | is_unread_T) & ~was_given_T, np.bool_)


def _has_bad_gradient(history: History, length: int) -> NDArray[np.bool_]:
    return np.asarray((history.param.window("grad.nonfinite", length) > 0).any(axis=1), np.bool_)
