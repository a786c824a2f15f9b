"""A loss that is NaN is found at the step it comes, a loss that nobody gave is not taken for one."""

import numpy as np
import pytest

from gradwatch.detect.numerics.non_finite import NonFinite
from gradwatch.history.synthetic.builder import Synthetic


def found(made, replay):
    return [(f.step, f.layer, str(f.severity)) for f in replay(made.history(), [NonFinite()])]


@pytest.mark.parametrize("step", [0, 1, 2, 30])
@pytest.mark.parametrize("skips", [True, False])
def test_a_nan_loss_is_found_at_its_own_step(step, skips, replay):
    made = Synthetic(steps=40).non_finite(step=step, lasting=True)
    if skips:  # as `gradwatch train` does it: no backward, no gradient, no update
        made.skipped_T[step:], made.grad_l2_TL[step:], made.nonfinite_TL[step:] = 1, np.nan, 0
    history = made.history()

    first = replay(history, [NonFinite()])[0]

    assert (first.step, first.layer) == (step, None), "at once, and as a matter of the whole run"
    assert "the loss became NaN" in first.message


@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_nan_gradient_is_found_between_losses_that_are_given_now_and_then(every, replay):
    made = Synthetic(steps=60).non_finite(step=33, layers=range(5))
    made.loss_T[made.t_T % (every + 1) > 0] = np.nan
    made.loss_T[33] = np.nan

    assert [(s, layer) for s, layer, _ in found(made, replay)] == [(33, *made.names(4))], "by its gradient"


def test_the_message_does_not_speak_of_a_loss_that_nobody_gave(replay):
    made = Synthetic(steps=60).non_finite(step=33, layers=range(5))
    made.loss_T[:] = np.nan

    (finding,) = replay(made.history(), [NonFinite()])

    assert finding.message == f"NaN/Inf gradients first appeared in layer `{finding.layer}` (Linear)"


def test_a_loop_that_never_passes_a_loss_has_no_finding(replay):
    made = Synthetic(steps=300)  # longer than what detectors look back on
    made.loss_T[:] = np.nan

    assert replay(made.history(), [NonFinite()]) == (), "missing is not NaN"


def test_an_infinite_loss_is_never_a_missing_one(replay):
    made = Synthetic(steps=40)
    made.loss_T[:] = np.nan
    made.loss_T[20] = np.inf

    assert [(step, layer) for step, layer, _ in found(made, replay)] == [(20, None)], "somebody gave it"


def test_micro_batches_without_a_loss_are_no_skipped_updates_of_a_nan(replay):
    made = Synthetic(steps=40)
    made.loss_T[:], made.skipped_T[made.t_T % 4 < 3] = np.nan, 1

    assert found(made, replay) == [], "their gradients are finite"


@pytest.mark.parametrize("skips", [True, False])
def test_a_nan_loss_with_nan_gradients_is_critical_also_if_the_update_is_skipped(skips, replay):
    made = Synthetic(steps=40).non_finite(step=30, layers=range(12))
    made.loss_T[30], made.skipped_T[30] = np.nan, skips

    assert found(made, replay) == [(30, None, "critical")]


def test_a_nan_loss_with_finite_gradients_harms_no_weight(replay):
    made = Synthetic(steps=40)
    made.loss_T[30] = np.nan

    assert found(made, replay) == [(30, None, "warning")]


@pytest.mark.parametrize("later", [31, 35])
def test_later_harm_makes_a_harmless_nan_critical_and_the_message_tells_both(later, replay):
    made = Synthetic(steps=40).non_finite(step=later, layers=range(12), value=np.inf)
    made.loss_T[30], made.loss_T[later] = np.nan, np.inf
    made.grad_l2_TL[30] = 0

    (finding,) = replay(made.history(), [NonFinite()])

    assert (finding.step, str(finding.severity)) == (30, "critical")
    assert finding.message.startswith("the loss became NaN, a mean over nothing")
    assert finding.message.endswith(f"; at step {later}, the loss became Inf")


def test_a_later_inf_does_not_rewrite_the_first_nan(replay):
    made = Synthetic(steps=40).non_finite(step=35, layers=range(12), value=np.inf)
    made.loss_T[20], made.loss_T[35] = np.nan, np.inf
    made.skipped_T[20], made.grad_l2_TL[20], made.nonfinite_TL[20] = 1, np.nan, np.nan

    (finding,) = replay(made.history(), [NonFinite()])

    assert (finding.step, str(finding.severity)) == (20, "critical")
    assert finding.message == "the loss became NaN; the update was skipped"
