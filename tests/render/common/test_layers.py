"""Layers as people know them, from the statistics of parameter tensors."""

import numpy as np
import pytest

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import LayerInfo, RunInfo
from gradwatch.render.common.layers import (
    grad_norms,
    layers,
    matrices,
    median_distances,
    newest_known,
    norms_now,
    update_ratios,
    update_ratios_over_run,
    zero_fracs,
)


def _param(name: str, shape: tuple[int, ...]) -> LayerInfo:
    module, _, _ = name.rpartition(".")
    return LayerInfo(
        name=name, module=module, module_type="Linear", shape=shape, dtype="float32", trainable=True, group=0
    )


PARAMS = (_param("fc.weight", (4, 3)), _param("fc.bias", (4,)), _param("norm.weight", (4,)), _param("scale", (2, 2)))


def _norms(l2, nonfinite):
    return grad_norms(np.array([l2], np.float32), np.array([nonfinite], np.float32), layers(PARAMS))[0].tolist()


def test_the_parameters_of_a_module_are_one_layer():
    known = layers(PARAMS)

    assert [layer.name for layer in known] == ["fc", "norm", "scale"]
    assert known[0].size == 16
    assert known[0].names == {"fc", "fc.weight", "fc.bias"}


def test_gradients_flow_through_matrices_and_not_through_norms():
    assert [layer.name for layer in matrices(PARAMS)] == ["fc", "scale"]
    assert [layer.name for layer in matrices(PARAMS[2:3])] == ["norm"], "unless there is nothing else"


def test_the_norm_of_a_layer_is_that_of_all_its_elements():
    assert _norms([3, 4, 1, 2], [0, 0, 0, 0]) == [5, 1, 2]


def test_a_layer_has_no_gradient_only_where_none_of_its_parameters_has():
    nan = np.nan

    assert _norms([3, nan, nan, 2], [0, nan, nan, 0]) == pytest.approx([3, nan, 2], nan_ok=True)


def test_a_broken_gradient_is_never_taken_for_a_missing_one():
    nan, inf = np.nan, np.inf

    assert _norms([nan, 4, 1, inf], [7, 0, 0, 1]) == [inf, 1, inf]


def test_tiny_norms_do_not_underflow_when_squared():
    assert _norms([3e-30, 4e-30, 1, 1], [0, 0, 0, 0])[0] == pytest.approx(5e-30)


def test_the_zero_fraction_of_a_layer_counts_elements():
    zero = np.array([[0.5, 1.0, np.nan, 0.0]])

    assert zero_fracs(zero, layers(PARAMS), PARAMS)[0] == pytest.approx([(6 + 4) / 16, np.nan, 0.0], nan_ok=True)


def test_update_ratios_are_the_last_sampled_ones():
    history = Synthetic(layers=3, steps=38).history()

    assert np.isnan(history.param.newest("update.ratio")).all(), "step 37 is not sampled"
    expected = history["update.ratio"][30]
    assert update_ratios(history, layers(history.info.layers)) == pytest.approx(expected, rel=1e-5)


def test_what_an_optimizer_in_turn_did_not_move_last_is_known_from_before():
    history = Synthetic(layers=3, steps=31).history()
    before = history["update.ratio"][20]
    history.param.newest("update.ratio")[1] = np.nan  # step 30 was another optimizer's

    known = newest_known(history.param, "update.ratio")

    assert known[1] == before[1] > 0
    assert known[[0, 2]].tolist() == history["update.ratio"][30][[0, 2]].tolist()


def test_what_was_never_measured_stays_missing():
    history = Synthetic(layers=2, steps=5, activations=1).history()
    history.act.truncate(-1)

    assert np.isnan(newest_known(history.act, "act.dead_frac")).tolist() == [True]


def test_the_distance_from_the_median_layer_is_in_powers_of_ten_per_element():
    of = layers(tuple(_param(f"{i}.weight", (4, 1 + 24 * (i == 4))) for i in range(7)))
    norms_M = np.array([1.0, 1.0, 1e-3, 100.0, 5.0, 0.0, np.nan])

    distances_M = median_distances(norms_M, of)

    assert distances_M == pytest.approx([0, 0, 3, 2, 0, np.inf, np.inf])
    assert median_distances(np.array([np.inf, 1.0]), of[:2]) == pytest.approx([np.inf, 0])


def test_layers_without_any_gradient_are_all_infinitely_far():
    assert median_distances(np.array([np.nan, 0.0]), layers(PARAMS)[:2]).tolist() == [np.inf, np.inf]


def test_a_model_without_parameters_has_no_layers():
    history = History(RunInfo(name="", created="", layers=()))
    history.append(0, run={"loss": 1.0}, param_SL=np.zeros((len(history.param.statistics), 0)))

    assert norms_now(history, layers(())).shape == (0,)


def test_update_ratios_over_the_run_end_in_the_newest(healthy):
    of = layers(healthy.history.info.layers)

    steps_T, ratios_TM = update_ratios_over_run(healthy.history, of)

    assert ratios_TM.shape == (len(steps_T), len(of))
    assert set(steps_T) <= set(healthy.history.steps("update.ratio"))
    assert ratios_TM[-1] == pytest.approx(update_ratios(healthy.history, of))
