"""A run from scratch whose weights hardly move is found; a tuned model, a warm-up and a loss that falls are not."""

from dataclasses import replace

import numpy as np
import pytest

from gradwatch.detect.updates.learning_rate_too_low import LearningRateTooLow
from gradwatch.detect.updates.learning_rate_too_low_rules.short_travel import find_short_travel
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect


def made(*, travel=0.05, fall=0.03, steps=241):
    run = Synthetic(steps=steps, optimizer="SGD")
    run.loss_T[:] = 2.3 * (1 - fall * run.t_T / run.steps)
    run.grad_l2_TL[:] = 1.0
    run.update_factor_TL[:] = travel / steps * run.weight_l2_TL / (run.lr_T[:, None] * run.grad_l2_TL)
    return run


def sign(run):
    return find_short_travel(run.history(), travel=0.1, spread=10.0, fall=0.1, patience=200, alike=0.1)


@pytest.mark.parametrize(("travel", "is_found"), [(1e-3, True), (0.09, True), (0.11, False), (1.0, False)])
def test_the_length_of_the_way_decides(travel, is_found):
    assert (sign(made(travel=travel)) is not None) == is_found


@pytest.mark.parametrize(("fall", "is_found"), [(-0.1, True), (0.0, True), (0.09, True), (0.2, False)])
def test_a_loss_that_falls_is_no_news(fall, is_found):
    assert (sign(made(fall=fall)) is not None) == is_found


def test_a_short_run_is_no_news():
    assert sign(made(steps=191)) is None


def test_a_rate_that_rises_is_no_news():
    run = made()
    run.lr_T *= np.linspace(0.5, 1, run.steps)

    assert sign(run) is None


def test_skipped_updates_are_no_news():
    assert sign(made().loss_scale_skips()) is None


def test_a_model_that_was_trained_before_is_not_judged():
    run = made()
    run.weight_l2_TL *= 1 + 0.2 * np.linspace(-1, 1, run.layers)

    assert sign(run) is None


def test_matrices_of_one_rule_may_have_many_sizes():
    run = made()
    run.weight_l2_TL[:, ::3] *= 2  # as of a few kernels with another rule

    assert sign(run)


def test_the_finding_is_withdrawn_once_the_loss_has_fallen():
    run = made(steps=400)
    run.loss_T[300:] *= 0.7
    findings, withdrawn = open_and_withdrawn(run.history())

    assert not findings
    assert [f.step for f in withdrawn] == [200]


def open_and_withdrawn(stored):
    history = redetect(stored, [LearningRateTooLow()])
    return history.findings, history.withdrawn


@pytest.mark.parametrize(("unread", "is_found"), [(0.5, True), (0.9, False)])
def test_the_rows_of_embeddings_that_are_read_count(unread, is_found):
    run = made(travel=0.05)
    run.info = replace(run.info, layers=tuple(replace(i, module_type="Embedding") for i in run.info.layers))
    run.zero_frac_TL[:] = unread

    assert (sign(run) is not None) == is_found
