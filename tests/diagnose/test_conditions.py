"""What a history says about its run leads to the cause behind the symptom."""

from dataclasses import replace

import numpy as np
import pytest

from gradwatch.diagnose.condition import Condition
from gradwatch.diagnose.conditions import conditions_of
from gradwatch.diagnose.gradient_noise import noise_scale
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import CONSTANT_SOFTMAX
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Event, Finding, Quantity, Severity


def found(kind, step, *, layer=None, severity=Severity.WARNING, evidence=()):
    return Finding(
        code="GW000",
        kind=kind,
        layer=layer,
        step=step,
        severity=severity,
        message=f"{kind} was seen",
        evidence=evidence,
    )


def top(history, *findings):
    for finding in findings:
        history.report(finding)
    return diagnose(history)[0].cause_id


def test_large_updates_that_follow_a_spike_are_laid_to_its_batch():
    made = Synthetic(steps=120, optimizer="SGD", lr=0.1).spike(step=80, factor=3000)

    assert top(made.history(), found("gradient-spike", 80), found("learning-rate-too-high", 85)) == "odd-batch"


def test_a_model_without_a_trainable_parameter_loses_no_update_to_rounding():
    made, finding = Synthetic(steps=40), found("not-optimized", 10, severity=Severity.CRITICAL)
    frozen = made.history()
    frozen.info = replace(frozen.info, layers=tuple(replace(la, trainable=False) for la in frozen.info.layers))

    assert top(made.history(), finding) == "rounded-updates"
    assert top(frozen, finding) == "", "the finding itself says that nothing is trainable"


def test_a_rate_that_creeps_up_is_too_high_in_spite_of_a_spike():
    made = Synthetic(steps=160, optimizer="SGD", lr=0.1).spike(step=118, factor=3000)
    made.lr_T = 0.1 * 1.05**made.t_T

    cause = top(made.history(), found("gradient-spike", 120), found("learning-rate-too-high", 120))

    assert cause == "learning-rate-too-high"


def test_a_usual_rate_of_sgd_is_not_blamed_for_what_large_gradients_do_at_the_start():
    made = Synthetic(steps=20, optimizer="SGD", lr=0.01)

    cause = top(made.history(), found("learning-rate-too-high", 0), found("non-finite", 1))

    assert cause == "steep-gradients"


def test_a_layer_that_vanished_when_the_weights_blew_up_is_laid_to_the_rate():
    made = Synthetic(steps=40, optimizer="Adam", lr=0.05)
    vanished = found("vanishing-gradient", 10, layer="layers.0.weight", severity=Severity.CRITICAL)

    assert top(made.history(), vanished, found("learning-rate-too-high", 20)) == "learning-rate-too-high"


def test_dead_relus_behind_zero_weights_are_laid_to_the_weights():
    made = Synthetic(steps=40, activations=3)
    made.weight_l2_TL[:] = 0

    assert top(made.history(), found("dead-relu", 10, layer="acts.0")) == "zero-weights"


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        pytest.param("batch-nonfinite", "bad-data", id="they hold a NaN"),
        pytest.param("batch-finite", "singular-formula", id="they hold none"),
    ],
)
def test_what_was_seen_of_the_inputs_decides_between_data_and_formula(event, cause):
    history = Synthetic(steps=60).non_finite(step=40, lasting=True).history()
    history.add_event(Event(kind=event, step=40))

    assert top(history, found("non-finite", 40, severity=Severity.CRITICAL)) == cause


def test_a_gain_of_the_backward_pass_is_laid_to_sums_that_nothing_divides():
    gain = (Quantity(key="backward.gain_decades", label="gain of backprop", value=3.2, unit="decades"),)

    cause = top(Synthetic(steps=40).history(), found("exploding-gradient", 10, layer="layers.3.weight", evidence=gain))

    assert cause == "undivided-sum"


def test_a_loss_that_falls_without_end_is_laid_to_the_loss():
    endless = (Quantity(key="loss.by_first_size", label="loss / first loss", value=-500.0),)

    cause = top(Synthetic(steps=80).history(), found("exploding-gradient", 70, evidence=endless))

    assert cause == "unbounded-loss"


def test_a_loss_that_jumps_by_orders_of_magnitude_is_laid_to_a_divisor():
    jumps = (Quantity(key="size.jumps", label="jumps up and down", value=9.0),)

    cause = top(Synthetic(steps=80).history(), found("exploding-gradient", 40, evidence=jumps))

    assert cause == "small-divisor"


def test_draws_that_an_evaluation_ended_are_laid_to_the_rate():
    ended = (Quantity(key="drawing modules", label="", value=2.0),)
    history = Synthetic(steps=80).history()
    history.add_event(Event(kind="mode-draws-ended", step=40))

    assert top(history, found("train-eval-mismatch", 40, evidence=ended)) == "rate-overwritten"


def test_a_policy_that_became_certain_is_laid_to_the_sign_of_its_entropy():
    fall = (Quantity(key="policy.fall", label="first / newest gradient norm", value=30.0),)

    cause = top(Synthetic(steps=80).history(), found("saturated-activation", 40, layer="layers.3", evidence=fall))

    assert cause == "entropy-added"


def test_a_last_activation_in_its_tail_is_laid_to_targets_that_it_cannot_reach():
    history = Synthetic(steps=60, activations=3).history()

    assert top(history, found("saturated-activation", 40, layer="acts.2")) == "targets-out-of-range"


def test_a_broadcast_on_the_tape_is_told_from_a_plateau_without_one():
    tape, plain = Synthetic(steps=200).history(), Synthetic(steps=200).history()
    tape.add_event(Event(kind="graph-broadcast", step=0))

    assert top(tape, found("loss-plateau", 0)) == "broadcast-targets"
    assert top(plain, found("loss-plateau", 160)) == "unrelated-loss"


def noisy(factor):
    """A run of four micro-batches per step, whose first one's gradient is so many times the whole step's."""
    made = Synthetic(steps=100)
    made.info = replace(made.info, accumulate=4)
    history = made.history()
    norm_T = history["grad_norm.before_clip"]
    return with_statistic(history, "grad_norm.micro", factor * norm_T[:, None], missing=True)


def test_the_noise_scale_is_zero_where_all_micro_batches_agree_and_infinite_where_they_cancel():
    same, cancelled = noise_scale(noisy(1.0)), noise_scale(noisy(2.0))

    assert same is not None
    assert same.samples == pytest.approx(0, abs=1e-6)
    assert cancelled is not None
    assert np.isinf(cancelled.samples), "four independent micro-batches of twice the norm hold no signal"


def test_a_plateau_in_the_noise_is_laid_to_small_batches():
    assert Condition.NOISY in conditions_of(noisy(2.0), found("loss-plateau", 160))
    assert Condition.NOISY not in conditions_of(noisy(1.2), found("loss-plateau", 160))
    assert top(noisy(2.0), found("loss-plateau", 160)) == "noisy-batches"


def test_layers_without_anything_between_them_are_told_from_those_with_activations_and_from_recurrent_ones():
    made = Synthetic(steps=200)
    recurrent = Synthetic(steps=200)
    recurrent.info = replace(made.info, layers=tuple(replace(la, module_type="GRU") for la in made.info.layers))
    plateau = found("loss-plateau", 160)

    assert Condition.LINEAR in conditions_of(made.history(), plateau)
    assert Condition.LINEAR not in conditions_of(Synthetic(steps=200, activations=3).history(), plateau)
    assert Condition.LINEAR not in conditions_of(recurrent.history(), plateau)
    history = made.history()
    history.report(plateau)
    assert "no nonlinearity between linear layers" in diagnose(history)[0].confirm, "a rival: functions cannot be seen"


def of_an_activation(module_type, *, mean, std, place=1):
    made = Synthetic(steps=40, activations=3)
    acts = [replace(act, module_type=module_type) if i == place else act for i, act in enumerate(made.info.activations)]
    made.info = replace(made.info, activations=tuple(acts))
    evidence = (Quantity(key="act.mean", value=mean), Quantity(key="act.std", value=std))
    return made.history(), found("saturated-activation", 10, layer=acts[place].name, evidence=evidence)


def test_a_gate_that_is_shut_for_every_sample_is_not_laid_to_the_inputs():
    history, finding = of_an_activation("Sigmoid", mean=2e-9, std=1e-10)

    assert top(history, finding) == "zeroed-branch"


@pytest.mark.parametrize(("is_none", "cause"), [(0, "constant-output"), (1, "detached-layer")])
def test_a_softmax_over_one_unit_explains_a_head_with_a_zero_gradient_but_no_unused_head(is_none, cause):
    made = Synthetic(steps=40)
    history, head = made.history(), made.info.layers[-1].module
    history.add_event(CONSTANT_SOFTMAX.observe(head).at(0))
    evidence = (Quantity(key="grad.is_none", value=is_none),)

    assert top(history, found("no-gradient", 10, layer=head, evidence=evidence)) == cause


def test_a_sigmoid_at_both_ends_is_laid_to_its_inputs():
    history, finding = of_an_activation("Sigmoid", mean=0.49, std=0.5)

    assert top(history, finding) == "unscaled-inputs"


def test_a_softmax_that_is_the_only_activation_has_no_range_that_targets_could_miss():
    history, finding = of_an_activation("Softmax", mean=0.05, std=0.19, place=2)

    assert top(history, finding) == "large-scores"


def test_an_embedding_is_not_told_to_follow_the_rule_for_layers():
    made = Synthetic(steps=40)
    made.info = replace(made.info, layers=tuple(replace(la, module_type="Embedding") for la in made.info.layers))
    history = made.history()
    history.report(found("poor-initialization", 0, layer=made.info.layers[0].name))

    (diagnosis,) = diagnose(history)

    assert diagnosis.cause_id == "large-embeddings"
    assert diagnosis.remedies[0].code == "torch.nn.init.normal_(model.layers[0].weight, std=0.05)"


def test_who_draws_weights_too_small_is_not_told_to_clip():
    history = Synthetic(steps=40).history()
    history.report(found("poor-initialization", 0, layer="layers.0.weight"))
    history.report(found("vanishing-gradient", 10, layer="layers.0.weight"))

    assert not any("clip" in remedy.text for remedy in diagnose(history)[0].remedies)
