"""A finding about a lasting state has an onset and is withdrawn when the state is over; events that happened stay."""

import numpy as np
import pytest

from gradwatch.detect import detectors
from gradwatch.events import BROADCAST, PAIRED, UNPAIRED, UNREGISTERED, WEIGHTS_MOVED
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect


def lived(kind, stored):
    """The open and the withdrawn findings of one kind over a whole run."""
    history = redetect(stored, [d for d in detectors() if d.kind == kind])
    return history.findings, history.withdrawn


def no_gradient(layers, until, *, zero=False, steps=200):
    made = Synthetic(steps=steps)
    grad_l2_TL, zero_frac_TL, nonfinite_TL = (a.copy() for a in (made.grad_l2_TL, made.zero_frac_TL, made.nonfinite_TL))
    made.no_gradient(layers, zero=zero)
    made.grad_l2_TL[until:], made.zero_frac_TL[until:] = grad_l2_TL[until:], zero_frac_TL[until:]
    made.nonfinite_TL[until:] = nonfinite_TL[until:]
    return made


@pytest.mark.parametrize(
    ("layers", "zero", "reason"),
    [((0, 1), False, "it got a gradient"), (4, True, "it got a gradient"), (None, False, "it got a gradient")],
    ids=["None", "exactly zero", "the whole model"],
)
def test_a_missing_gradient_is_withdrawn_at_the_first_gradient(layers, zero, reason):
    stored = no_gradient(layers, 60, zero=zero).history()

    left, (finding,) = lived("no-gradient", stored)

    assert left == []
    assert (finding.since, finding.ended, finding.reason) == (0, 60, reason)
    assert finding.when == "from step 0 to 59"


def test_the_layers_that_still_miss_a_gradient_are_reported_anew_however_late():
    made = no_gradient((0, 1), 300, steps=400)
    made.grad_l2_TL[300:, 1], made.zero_frac_TL[300:, 1], made.nonfinite_TL[300:, 1] = np.nan, np.nan, np.nan

    (left,), (over,) = lived("no-gradient", made.history())

    assert over.names == made.names((0, 1))
    assert over.reason == "1 of 2 tensors got a gradient"
    assert left.names == made.names(1)
    assert left.step > 256, "the window no longer shows the start of the run"


def test_a_single_step_with_a_gradient_is_an_accident():
    made = no_gradient(4, 60)
    made.grad_l2_TL[61:, 4], made.nonfinite_TL[61:, 4] = np.nan, np.nan

    left, over = lived("no-gradient", made.history())

    assert [f.layer for f in left] == ["layers.4.weight"]
    assert over == []


def dead(level, back=None):
    made = Synthetic(steps=240)
    usual_T = made.grad_l2_TL[:, 5].copy()
    made.dead(5, onset=60, level=level)
    if back:
        made.grad_l2_TL[back:, 5], made.zero_frac_TL[back:, 5] = usual_T[back:], 0
    return made.history()


@pytest.mark.parametrize("level", [0.0, 1e-9])
def test_a_dead_layer_is_withdrawn_once_it_has_had_a_gradient_for_a_while(level):
    left, (finding,) = lived("dead-layer", dead(level, back=140))

    assert left == []
    assert (finding.since, finding.ended) == (60, 140)


def test_a_layer_that_stays_dead_and_one_that_flickers_stay_open():
    (dead_for_good,), over = lived("dead-layer", dead(0.0))
    assert (dead_for_good.since, over) == (60, [])

    made = Synthetic(steps=240)
    usual_T = made.grad_l2_TL[:, 5].copy()
    made.dead(5, onset=60)
    made.grad_l2_TL[150:160, 5] = usual_T[150:160]
    left, over = lived("dead-layer", made.history())
    assert (len(left), over) == (1, []), "ten steps with a gradient are no recovery"


def dead_relu(fraction, back=None, until=None):
    made = Synthetic(steps=300, activations=3).dead_relu(1, fraction=fraction, onset=60)
    if back:
        made.dead_frac_TA[back:until, 1], made.silent_TA[back:until, 1] = 0.1, 0
    return made.history()


@pytest.mark.parametrize("fraction", [1.0, 0.9, 0.66])
def test_dead_units_are_withdrawn_once_most_have_fired_in_five_samples(fraction):
    left, (finding,) = lived("dead-relu", dead_relu(fraction, back=150))

    assert left == []
    assert (finding.since, finding.ended) == (60, 150)
    assert finding.reason == "90 % of its units fired again"


@pytest.mark.parametrize(("back", "until"), [(None, None), (150, 180)], ids=["for good", "three samples"])
def test_units_that_stay_dead_stay_open(back, until):
    (left,), over = lived("dead-relu", dead_relu(1.0, back, until))

    assert (left.since, over) == (60, [])
    assert str(left).startswith("since step 60 (found at step 70): critical dead-relu (GW201) in acts.1: ")


@pytest.mark.parametrize(("fraction", "onset"), [(0.95, 0), (0.95, 60)], ids=["from the start", "later"])
def test_a_saturated_activation_is_withdrawn_once_half_of_it_is_gone(fraction, onset):
    made = Synthetic(steps=300, activations=3)
    made.saturated_frac_TA[:] = 0.02
    made.saturated(1, fraction=fraction, onset=onset, module_type="Tanh")
    made.saturated_frac_TA[150:, 1] = 0.1

    left, (finding,) = lived("saturated-activation", made.history())

    assert left == []
    assert (finding.since, finding.ended) == (onset, 150)


def flat(steps=700, *, falls_at=None, noise=0.03):
    made = Synthetic(steps=steps)
    made.loss_T = 2.3 * np.exp(noise * made.rng.standard_normal(steps))
    if falls_at:
        made.loss_T *= np.where(made.t_T < falls_at, 1, np.exp(-0.01 * (made.t_T - falls_at)))
    return made


def test_a_plateau_is_withdrawn_when_the_loss_has_clearly_fallen():
    left, (finding,) = lived("loss-plateau", flat(falls_at=300).history())

    assert left == []
    assert finding.since == 0
    assert 290 <= finding.ended <= 340
    assert finding.reason.startswith("the loss fell to ")


@pytest.mark.parametrize("noise", [0.03, 0.3, 1.0])
def test_noise_alone_withdraws_no_plateau(noise):
    _, over = lived("loss-plateau", flat(3000, noise=noise).history())

    assert over == []


def test_a_plateau_that_the_graph_proves_is_never_withdrawn():
    made = flat(falls_at=100).add_event(BROADCAST, layer="layers.11", text="16 x 16 differences")

    left, _ = lived("loss-plateau", made.history())

    assert [f.layer for f in left] == ["layers.11"]


def test_constant_predictions_are_withdrawn_only_when_predictions_begin_to_fit():
    made = flat(falls_at=200).add_event(UNPAIRED, step=100)
    left, over = lived("loss-plateau", made.history())
    assert (len(left), over) == (1, [])

    left, over = lived("loss-plateau", made.add_event(PAIRED, step=300).history())
    assert (left, len(over)) == ([], 1)


def test_a_tiny_rate_that_grows_is_withdrawn_at_its_first_large_update():
    made = Synthetic(steps=200)
    made.loss_T[:] = 2.3
    made.lr_T[:80] = 1e-8

    left, (finding,) = lived("learning-rate-too-low", made.history())

    assert left == []
    assert (finding.since, finding.ended) == (0, 80)


def test_a_tiny_rate_does_no_harm_once_the_loss_is_gone():
    made = Synthetic(steps=200, lr=1e-8)
    made.loss_T[:100], made.loss_T[100:] = 2.3, 0.01

    left, (finding,) = lived("learning-rate-too-low", made.history())

    assert left == []
    assert finding.reason == "less than 10 % of the loss was left"


def test_a_loss_that_becomes_nan_withdraws_no_tiny_rate():
    made = Synthetic(steps=200, lr=1e-8)
    made.loss_T[:100], made.loss_T[100:] = 2.3, np.nan

    left, over = lived("learning-rate-too-low", made.history())

    assert (len(left), over) == (1, [])


def groups_that_decay(slow, *, over=40, steps=100):
    """A run of one group per layer, of which some decay by a factor of ten every `over` / 8 steps."""
    made = Synthetic(steps=steps, layers=6)
    made.loss_T[:] = np.maximum(made.loss_T, 2.0)
    fall_T = 10.0 ** (-8 * np.minimum(made.t_T / over, 1))
    for layer in range(1, 6):
        made.own_rate(layer, factor=1.0)
    made.update_factor_TL[:, list(slow)] *= fall_T[:, None]
    return made, fall_T


def test_one_decayed_schedule_is_one_finding_that_names_its_pattern(monkeypatch):
    made, fall_T = groups_that_decay(range(5))
    run = made._run

    def with_rates():
        values = run()
        return values | {f"lr.{g}": values[f"lr.{g}"] * fall_T for g in range(5)}

    monkeypatch.setattr(made, "_run", with_rates)

    (finding,), over = lived("learning-rate-too-low", made.history())

    assert over == []
    assert finding.names == made.names(range(5))
    assert finding.layer == finding.names[0]
    assert "all parameter groups but the last has fallen to 1e-08 of where it began" in finding.message
    assert finding.since < finding.step
    assert finding.place == "layers.0.weight, layers.1.weight, layers.2.weight and 2 more"


def test_a_batch_that_repeats_is_withdrawn_when_others_arrive():
    numbers = np.r_[[0] * 40, 1:80]
    made = Synthetic(steps=len(numbers))
    made.batch_hash_T = np.random.default_rng(0).integers(0, 1 << 48, 200).astype(float)[numbers]

    left, (finding,) = lived("constant-batch", made.history())

    assert left == []
    assert finding.ended == 40
    assert finding.reason == "other batches arrived"


def stuck(back=None):
    made = Synthetic(steps=200)
    made.update_factor_TL[:back, 4] = 0
    made.weight_l2_TL = made.weight_l2_TL * np.ones((200, 12))
    made.weight_l2_TL[:back, 4] = made.weight_l2_TL[0, 4]
    return made


def test_weights_that_begin_to_move_are_withdrawn():
    (stays,), over = lived("not-optimized", stuck().history())
    assert (stays.since, over) == (0, [])

    left, (finding,) = lived("not-optimized", stuck(100).history())
    assert left == []
    assert (finding.since, finding.ended, finding.reason) == (0, 100, "its weights moved")


def test_a_layer_that_another_optimizer_moves_later_is_withdrawn_at_that_step():
    made = stuck()
    infos = list(made.info.layers)
    infos[4] = type(infos[4])(**{f: getattr(infos[4], f) for f in infos[4].__slots__} | {"group": None})
    made.info = type(made.info)(**{f: getattr(made.info, f) for f in made.info.__slots__} | {"layers": tuple(infos)})
    made.add_event(WEIGHTS_MOVED, step=80, values={"first": 4.0, "last": 4.0})

    left, (finding,) = lived("not-optimized", made.history())

    assert (left, finding.ended) == ([], 80)


def test_tensors_that_are_no_parameters_are_never_withdrawn():
    made = Synthetic(steps=100).add_event(UNREGISTERED, layer="convs", text="8 tensors", values={"tensors": 8.0})

    left, over = lived("not-optimized", made.history())

    assert ([f.layer for f in left], over) == (["convs"], [])


def test_vanishing_gradients_are_withdrawn_when_they_come_back_and_the_loss_falls():
    made = Synthetic(steps=300)
    usual_TL, loss_T = made.grad_l2_TL.copy(), made.loss_T.copy()
    made.vanishing(decades=8)
    made.grad_l2_TL[100:], made.loss_T[100:] = usual_TL[100:], loss_T[:200]

    left, (finding,) = lived("vanishing-gradient", made.history())

    assert left == []
    assert finding.reason.startswith("the loss fell, and gradients shrank only ")


def test_a_loss_scale_that_finds_its_place_is_withdrawn():
    made = Synthetic(steps=200).loss_scale_skips(range(24))

    left, (finding,) = lived("loss-scale-collapse", made.history())

    assert left == []
    assert (finding.since, finding.ended) == (0, 24)


@pytest.mark.parametrize(
    ("kind", "made", "onset"),
    [
        ("gradient-spike", Synthetic(steps=300).spike(step=83, factor=200), 83),
        ("non-finite", Synthetic(steps=300).non_finite(step=83, layers=range(5)), 83),
    ],
    ids=["spike", "NaN"],
)
def test_an_event_that_happened_is_never_withdrawn(kind, made, onset):
    (finding,), over = lived(kind, made.history())

    assert over == []
    assert finding.since == onset
