"""Made-up runs: consistent in themselves, the same for the same seed, ill exactly where they were made ill."""

import numpy as np
import pytest

from gradwatch.history.synthetic.builder import Synthetic

ILLNESSES = {
    "vanishing": lambda s: s.vanishing(),
    "exploding": lambda s: s.exploding(rate=3.0),
    "dead": lambda s: s.dead(4),
    "rising sparsity": lambda s: s.rising_sparsity((2, 5)),
    "oscillating": lambda s: s.oscillating(),
    "spike": lambda s: s.spike(),
    "no gradient": lambda s: s.no_gradient(3),
    "zero gradient": lambda s: s.no_gradient(3, zero=True),
    "imbalance": lambda s: s.imbalance(7),
    "non-finite": lambda s: s.non_finite(lasting=True),
    "dead relu": lambda s: s.dead_relu(1),
    "saturated": lambda s: s.saturated(0),
    "loss-scale skips": lambda s: s.loss_scale_skips(),
    "sparse embedding": lambda s: s.sparse_embedding(),
}


def made(name="", **kwargs):
    return ILLNESSES.get(name, lambda s: s)(Synthetic(activations=2, **kwargs)).history()


@pytest.mark.parametrize("name", ["", *ILLNESSES])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_statistics_are_consistent_with_each_other(name, optimizer):
    history = made(name, optimizer=optimizer)
    numel = 64 * 64
    l2, absmax, mean, std = (history[f"grad.{s}"].astype(np.float64) for s in ("l2", "absmax", "mean", "std"))
    finite = np.isfinite(l2)

    assert finite.any(), "nothing to look at"
    np.testing.assert_allclose((numel * (mean**2 + std**2))[finite], l2[finite] ** 2, rtol=1e-4, atol=1e-30)
    assert (absmax <= l2 * (1 + 1e-6))[finite].all(), "no element exceeds the norm"
    at_least = l2 / np.sqrt(np.maximum(numel * (1 - history["grad.zero_frac"]), 1))
    assert (absmax >= at_least * (1 - 1e-5))[finite].all(), "the largest is no smaller than the root mean square"
    assert np.isfinite(absmax[finite]).all()
    assert ((history["grad.nonfinite"] > 0) == (~finite & ~np.isnan(history["grad.zero_frac"]))).all()
    zero_frac = history["grad.zero_frac"]
    assert ((zero_frac >= 0) & (zero_frac <= 1) | np.isnan(zero_frac)).all()
    assert (zero_frac[l2 == 0] == 1).all()


@pytest.mark.parametrize("name", ["", *ILLNESSES])
def test_the_same_seed_makes_the_same_run(name):
    one, two = made(name, seed=3), made(name, seed=3)
    for table in ("param", "act", "run"):
        np.testing.assert_array_equal(getattr(one, table).rows()[1], getattr(two, table).rows()[1])
    assert not np.array_equal(one["loss"], made(name, seed=4)["loss"], equal_nan=True)


def test_the_total_norm_is_that_of_the_layers():
    history = made()
    expected = np.sqrt((history["grad.l2"].astype(np.float64) ** 2).sum(axis=1))
    np.testing.assert_allclose(history["grad_norm.before_clip"], expected, rtol=1e-6)


@pytest.mark.parametrize("statistic", ["weight.l2", "update.ratio"])
def test_weights_and_updates_are_measured_every_ten_steps(statistic):
    values = made()[statistic]
    assert np.isfinite(values[::10]).all()
    assert np.isnan(np.delete(values, np.s_[::10], axis=0)).all()


def test_a_healthy_run_learns_with_steady_gradients():
    history = Synthetic(steps=400, layers=6).history()
    assert history["loss"][-50:].mean() < 0.4 * history["loss"][:10].mean()
    steps = np.abs(np.diff(np.log10(history["grad.l2"]), axis=0))
    assert np.median(steps) < 0.3, "norms jump by half a decade"
    assert (history["update.ratio"][::10] < 0.01).all()


def test_sgd_follows_the_size_of_the_gradient_and_adam_does_not():
    shrunk = {}
    for optimizer in ("SGD", "AdamW"):
        full, small = Synthetic(optimizer=optimizer), Synthetic(optimizer=optimizer)
        small.grad_l2_TL *= 1e-3
        shrunk[optimizer] = np.nanmedian(small.history()["update.ratio"] / full.history()["update.ratio"])
    assert shrunk["SGD"] == pytest.approx(1e-3)
    assert shrunk["AdamW"] == pytest.approx(1.0, abs=0.05)


def test_a_skipped_step_moves_nothing():
    s = Synthetic(precision="fp16")
    s.skipped_T[10] = 1
    assert (s.history()["update.ratio"][10] == 0).all()


def test_replay_grows_by_a_step_at_a_time_and_ends_as_history():
    steps = [h.step for h in Synthetic(steps=30).replay()]
    assert steps == list(range(30))
    assert Synthetic(steps=30).history(until=7).step == 6
    assert Synthetic(steps=30).history(until=0).step == -1


def test_names_are_those_of_the_history():
    s = Synthetic(layers=3)
    assert s.names() == s.history().param.layers
    assert s.names((0, -1)) == ("layers.0.weight", "layers.2.weight")
    assert s.names(1) == ("layers.1.weight",)


def ratio(name, **kwargs):
    """Return the gradient norms of a run that was made ill, in units of the healthy one of the same seed."""
    return made(name, **kwargs)["grad.l2"].astype(np.float64) / made("", **kwargs)["grad.l2"]


def test_vanishing_is_geometric_towards_the_input():
    log_L = np.log10(np.median(ratio("vanishing"), axis=0))
    np.testing.assert_allclose(log_L, np.linspace(-8, 0, 12), atol=1e-3)


def test_exploding_grows_until_it_overflows():
    history = made("exploding")
    log_T = np.log(ratio("exploding")[100:140, 0])
    np.testing.assert_allclose(np.diff(log_T), np.log(3.0), rtol=1e-3)
    assert np.isinf(history["grad.l2"][-1]).all()
    assert history["loss"][-1] > 1e6


def test_faults_keep_to_their_layers_and_steps():
    np.testing.assert_allclose(np.delete(ratio("dead"), 4, axis=1), 1)
    np.testing.assert_allclose(ratio("dead")[:100], 1)
    np.testing.assert_allclose(np.delete(ratio("spike"), 150, axis=0), 1)
    np.testing.assert_allclose(ratio("spike")[150], 100, rtol=1e-6)
    np.testing.assert_allclose(np.delete(ratio("imbalance"), 7, axis=1), 1)
    assert np.isnan(made("no gradient")["grad.l2"][:, 3]).all()
    assert (made("zero gradient")["grad.l2"][:, 3] == 0).all()


def test_oscillation_alternates():
    log_T = np.log10(ratio("oscillating")[60:, 0])
    assert (np.sign(np.diff(log_T)) == np.sign(np.diff(log_T))[0] * (-1.0) ** np.arange(len(log_T) - 1)).all()


def test_sparsity_creeps_up_and_stays():
    zero_T = made("rising sparsity")["grad.zero_frac"][:, 2]
    assert zero_T[0] == 0
    assert (np.diff(zero_T) >= 0).all()
    assert zero_T[-1] == pytest.approx(0.005 * 149)


def test_activations_fall_ill_in_place():
    history = made("dead relu")
    assert (history["act.dead_frac"][10:, 1] == np.float32(0.95)).all()
    assert (history["act.dead_frac"][:, 0] < 0.2).all()
    assert made("saturated").info.activations[0].module_type == "Sigmoid"


def test_skips_of_the_loss_scale_are_marked_and_halve_it():
    history = made("loss-scale skips")
    assert history["skipped"][:4].tolist() == [1, 1, 1, 0]
    assert history["loss_scale"][:4].tolist() == [65536, 32768, 16384, 8192]
    assert np.isinf(history["grad.l2"][:3]).all()
    assert np.isfinite(history["grad.l2"][3:]).all()
    assert history.info.loss_scaling


def test_lookalikes_say_in_the_run_info_what_they_are():
    assert made("sparse embedding").info.layers[0].module_type == "Embedding"
