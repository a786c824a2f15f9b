"""Updates that do little but shrink the weights are found; other ways to become smaller are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwatch
from gradwatch.detect.data_and_loss.loss_plateau_rules.examples import make_contracting, make_flat
from gradwatch.detect.data_and_loss.loss_plateau_rules.inward_updates import INWARD, find_inward_updates
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.dynamics import ADAM_STEP


def sign(history):
    return find_inward_updates(history, share=(0.5, 1.5), intervals=4, left=0.5)


@pytest.mark.parametrize("inward", [0.6, 1.0, 1.3])
def test_updates_that_point_at_the_origin_are_found(inward):
    found = sign(make_contracting(inward=inward, until=191))

    assert {q.key: q.value for q in found.evidence}[INWARD] == pytest.approx(inward, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [{"inward": 0.3}, {"inward": 3.0}, {"learned": 0.7}, {"until": 31}],
    ids=["a gradient leads", "the loop makes them smaller", "much is learned", "too early"],
)
def test_other_falls_of_the_norm_are_no_news(options):
    assert sign(make_contracting(**{"until": 191} | options)) is None


@pytest.mark.parametrize(("width", "is_found"), [(8, True), (500, False)])
def test_small_matrices_that_decay_do_not_speak_for_a_large_one_that_learns(width, is_found):
    made = make_flat()
    made.weight_l2_TL[:, 1:] *= 0.99 ** made.t_T[:, None]
    made.update_factor_TL = 0.01 * made.weight_l2_TL / (made.lr_T[:, None] * made.width * ADAM_STEP)
    large, *others = made.info.layers
    made.info = replace(made.info, layers=(replace(large, shape=(width, 500)), *others))

    assert (sign(made.history(191)) is not None) == is_found


def test_a_matrix_that_some_updates_leave_out_is_not_told():
    made = Synthetic(steps=191)
    made.loss_T[:] = 2.3
    made.weight_l2_TL *= 0.99 ** made.t_T[:, None]
    made.update_factor_TL[::20] = 0.0  # every second measurement

    assert sign(made.history()) is None


@pytest.mark.parametrize(("decay", "is_found"), [(0.0, False), (1e-4, False), (1.0, True)])
def test_the_share_of_a_decay_is_measured_in_a_training(decay, is_found, monitored):
    history = monitored(lambda params: torch.optim.SGD(params, lr=0.02, weight_decay=decay))

    assert (sign(history) is not None) == is_found


@pytest.fixture
def monitored(tmp_path):
    """Return a function that trains a classifier of random labels for 61 steps, and returns its history."""

    def train(make_optimizer):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        optimizer = make_optimizer(model.parameters())
        generator = np.random.default_rng(0)
        with gradwatch.watch(model, optimizer, run=tmp_path / "run") as monitor:
            for _ in range(61):
                inputs = torch.from_numpy(generator.standard_normal((32, 16)).astype(np.float32))
                labels = torch.from_numpy(generator.integers(0, 4, 32))
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=inputs)
        return monitor.history

    return train
