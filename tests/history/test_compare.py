"""Where two histories part, and which of their layers differ."""

import numpy as np
import pytest

from gradwatch import catalogue
from gradwatch.events import LOSS_WITHHELD
from gradwatch.history.compare import choose_tolerance, compare
from gradwatch.history.store import History
from gradwatch.records import ActivationInfo, LayerInfo, RunInfo

# S = statistics, L = layers


def _info(names, precision="fp32"):
    layer = {"module_type": "Linear", "shape": (4, 4), "dtype": "float32", "trainable": True, "group": 0}
    layers = tuple(LayerInfo(name=name, module=name.rpartition(".")[0], **layer) for name in names)
    return RunInfo(name="run", created="2026-01-01T00:00:00+00:00", layers=layers, precision=precision)


def _run(steps=20, *, names=("a.weight", "b.weight"), precision="fp32", change=None):
    """Return a history whose numbers are the same each time, but for what `change(step, run, param_SL)` changes."""
    history = History(_info(names, precision))
    for step in range(steps):
        run = {"loss": 2.0 / (1 + step), "batch_hash": float(step), "step_ms": np.random.default_rng().random()}
        param_SL = np.full((len(catalogue.PARAM_NAMES), len(names)), 0.5, np.float32)
        if change:
            change(step, run, param_SL)
        history.append(step, run=run, param_SL=param_SL)
    return history


def _from(first, **values):
    """Return a change of statistics from a step on, by factor."""

    def change(step, run, param_SL):
        if step >= first:
            for name, factor in values.items():
                run[name] *= factor

    return change


def test_two_runs_of_the_same_numbers_are_the_same_though_their_times_differ():
    found = compare(_run(), _run())

    assert (found.steps, found.bits, found.rounding) == (20, None, None)
    assert [(gap.decades, gap.spread) for gap in found.gaps] == [(0, 0), (0, 0)]


def test_a_difference_of_one_bit_is_found_and_is_no_difference_beyond_rounding():
    other = _run(change=_from(7, loss=1 + 2.0**-52))

    found = compare(_run(), other)

    assert (found.bits.step, found.bits.statistic, found.bits.layer) == (7, "loss", None)
    assert found.bits.first != found.bits.second
    assert found.bits.others == 0
    assert found.rounding is None


def test_the_first_bit_and_the_first_difference_beyond_rounding_are_told_apart():
    def change(step, run, param_SL):
        run["loss"] *= 1 + 1e-9 * 10.0**step

    found = compare(_run(), _run(change=change))

    assert found.bits.step == 0
    assert found.rounding.step == 5, "1e-4 is the first above 6.1e-5"


def test_of_what_parts_at_one_step_the_first_in_the_step_s_order_is_reported():
    def change(step, run, param_SL):
        if step >= 3:
            run["loss"] += 1
            run["batch_hash"] += 1
            param_SL[0] *= 2

    found = compare(_run(), _run(change=change))

    assert (found.rounding.step, found.rounding.statistic) == (3, "batch_hash")
    assert found.rounding.others == 3, "the loss and a norm of two layers"


def test_a_batch_is_the_same_or_not_whatever_the_tolerance():
    found = compare(_run(), _run(change=_from(4, batch_hash=1 + 1e-12)), tolerance=0.5)

    assert (found.rounding.step, found.rounding.statistic) == (4, "batch_hash")


def test_a_mean_near_zero_tells_nothing_beyond_rounding():
    def change(step, run, param_SL):
        param_SL[catalogue.PARAM_NAMES.index("grad.mean")] = -1e-9

    found = compare(_run(), _run(change=change))

    assert found.bits.statistic == "grad.mean"
    assert found.rounding is None


def test_missing_numbers_are_the_same_and_one_that_is_missing_in_one_run_is_not():
    def broken(step, run, param_SL):
        run["loss"] = np.nan if step >= 5 else run["loss"]

    assert compare(_run(change=broken), _run(change=broken)).bits is None
    assert compare(_run(), _run(change=broken)).rounding.step == 5


@pytest.mark.parametrize(("precision", "expected"), [("fp32", 2.0**-14), ("fp16", 2.0**-8), ("bf16", 2.0**-6)])
def test_the_coarser_format_says_what_rounding_is(precision, expected):
    assert choose_tolerance(_run(1), _run(1, precision=precision)) == expected


def test_layers_are_matched_by_name_and_ordered_by_how_far_they_are_apart():
    def larger(step, run, param_SL):
        param_SL[0, 0] *= 100
        param_SL[0, 1] *= 10.0 ** (-1) ** step

    found = compare(
        _run(names=("a.weight", "b.weight", "c.weight")), _run(names=("b.weight", "a.weight"), change=larger)
    )

    assert [gap.layer for gap in found.gaps] == ["b.weight", "a.weight"]
    assert found.gaps[0].decades == pytest.approx(2)
    assert (found.gaps[1].decades, found.gaps[1].spread) == pytest.approx((0, 1), abs=1e-6), "apart, either way"
    assert (found.only_first, found.only_second) == (("c.weight",), ())


def test_a_layer_that_is_dead_in_one_run_only_is_the_farthest_apart():
    def dead(step, run, param_SL):
        param_SL[:, 1] = 0
        param_SL[0, 0] *= 1000

    gaps = compare(_run(), _run(change=dead)).gaps

    assert [(gap.layer, gap.decades) for gap in gaps] == [("b.weight", -np.inf), ("a.weight", pytest.approx(3))]


def test_runs_of_different_length_are_compared_at_the_steps_that_both_keep():
    found = compare(_run(20), _run(6))

    assert (found.steps, found.bits) == (6, None)


def _sampled(every, *names):
    """Return a change that leaves out sampled statistics, but for every few steps."""

    def change(step, run, param_SL):
        for name in names:
            if step % every:
                param_SL[catalogue.PARAM_NAMES.index(name)] = np.nan

    return change


def _missing(name, steps, value=np.nan):
    def change(step, run, param_SL):
        run[name] = 0.5 if step not in steps else value

    return change


@pytest.mark.parametrize("name", ["weight.l2", "update.ratio"])
def test_sampled_statistics_are_compared_at_the_steps_that_both_have_sampled(name):
    def moved(step, run, param_SL):
        _sampled(4, name)(step, run, param_SL)
        if step >= 8:
            param_SL[catalogue.PARAM_NAMES.index(name), 1] = 7.0

    assert compare(_run(change=_sampled(2, name)), _run(change=_sampled(4, name))).bits is None
    found = compare(_run(change=_sampled(2, name)), _run(change=moved)).bits
    assert (found.step, found.statistic, found.layer) == (8, name, "b.weight")


def test_a_weight_that_is_nan_in_one_run_is_a_difference_where_its_neighbors_were_sampled():
    def broken(step, run, param_SL):
        if step >= 6:
            param_SL[catalogue.PARAM_NAMES.index("weight.l2"), 0] = np.nan

    found = compare(_run(), _run(change=broken)).bits

    assert (found.step, found.statistic, found.layer) == (6, "weight.l2", "a.weight")


@pytest.mark.parametrize("name", ["batch_hash", "grad_norm.micro", "val_loss", "lr.0", "loss_scale"])
def test_a_number_that_only_one_run_has_measured_is_no_difference(name):
    assert compare(_run(change=_missing(name, range(20))), _run(change=_missing(name, range(3)))).bits is None


@pytest.mark.parametrize("name", ["loss", "grad_norm.before_clip", "grad_norm.after_clip"])
def test_a_number_that_is_nan_in_one_run_is_a_difference(name):
    found = compare(_run(change=_missing(name, [7])), _run(change=_missing(name, []))).rounding

    assert (found.step, found.statistic) == (7, name)


def test_a_validation_of_nan_is_a_difference_and_a_missing_one_is_not():
    def validated(step, run, param_SL):
        if step % 5 == 0:
            run |= {"val_loss": np.nan if step == 10 else 0.5, "val_accuracy": 0.1}

    def finite(step, run, param_SL):
        if step % 2 == 0:
            run |= {"val_loss": 0.5, "val_accuracy": 0.1}

    found = compare(_run(change=validated), _run(change=finite)).bits

    assert (found.step, found.statistic) == (10, "val_loss")


def test_a_loss_that_the_loop_withholds_is_not_measured():
    withheld = _run(change=_missing("loss", range(20)))
    withheld.add_event(LOSS_WITHHELD.emit(step=0))

    assert compare(withheld, _run()).bits is None


def test_units_silent_since_earlier_samples_are_compared_until_one_run_samples_alone():
    def run(every, silent):
        activations = (ActivationInfo(name="act", module_type="ReLU"),)
        history = History(RunInfo(name="run", created="", layers=(), activations=activations))
        for step in range(12):
            act_SL = np.full((len(catalogue.ACT_NAMES), 1), 0.5, np.float32)
            act_SL[catalogue.ACT_NAMES.index("act.silent")] = silent(step)
            param_SL = np.empty((len(catalogue.PARAM_NAMES), 0), np.float32)
            history.append(step, run={"loss": 1.0}, param_SL=param_SL, act_SL=None if step % every else act_SL)
        return history

    assert compare(run(2, lambda step: 3), run(4, lambda step: 3 + step)).bits is None
    assert compare(run(2, lambda step: 3), run(2, lambda step: 3 + (step > 5))).bits.step == 6
