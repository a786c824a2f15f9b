"""A classifier that predicts only the majority class is reported for information, until it predicts another class."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.detect import detectors
from gradwatch.detect.data_and_loss.loss_plateau_rules.constant_predictions import find_constant_predictions
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import MAJORITY_PREDICTED, MINORITY_PREDICTED, UNPAIRED
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Severity

VALUES = {"class": 0.0, "share": 0.98, "others": 80.0}


def train(*, steps, separation, weight=None):
    """Train on 3 % of positive samples, whose first number is larger, and return the monitor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(steps):
            labels = (torch.rand(256, 1) < 0.03).float()
            inputs = torch.randn(256, 8)
            inputs[:, :1] += separation * labels
            loss = F.binary_cross_entropy_with_logits(model(inputs), labels, pos_weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=inputs)
    return monitor


def test_rare_positives_that_are_never_found_are_reported_with_their_cause():
    monitor = train(steps=200, separation=1.5)

    (finding,) = monitor.findings()
    assert (finding.kind, finding.severity) == ("majority-class", Severity.INFO)
    assert "every prediction is class 0" in finding.message
    (diagnosis,) = diagnose(monitor.history)
    assert diagnosis.cause_id == "class-imbalance"


def test_positives_that_are_found_are_not():
    assert train(steps=200, separation=8.0).findings() == ()


def test_the_finding_is_gone_if_rare_positives_weigh_more():
    assert train(steps=200, separation=1.5, weight=torch.tensor(32.0)).findings() == ()


def test_the_finding_ends_when_another_class_is_predicted():
    made = Synthetic(steps=300).add_event(MAJORITY_PREDICTED, step=80, values=VALUES)
    history = made.add_event(MINORITY_PREDICTED, step=200).history()

    detected = redetect(history, [d for d in detectors() if d.kind == "majority-class"])

    assert detected.findings == []
    (over,) = detected.withdrawn
    assert (over.step, over.ended, over.reason) == (130, 200, "another class is predicted, too")


def test_a_long_planned_run_waits_for_longer():
    made = Synthetic(steps=300).add_event(MAJORITY_PREDICTED, step=80, values=VALUES)
    made.info = replace(made.info, total_steps=10_000)

    assert redetect(made.history(), [d for d in detectors() if d.kind == "majority-class"]).findings == []


def test_rare_labels_that_predictions_do_not_fit_are_for_information():
    made = Synthetic(steps=300).add_event(UNPAIRED, step=100, values={"explained": 0.0})
    common = find_constant_predictions(made.history(), patience=128, travel=0.0)
    rare = find_constant_predictions(
        made.add_event(MAJORITY_PREDICTED, step=110, values=VALUES).history(), patience=128, travel=0.0
    )

    assert common.severity is None
    assert rare.severity is Severity.INFO
    assert rare.message.endswith("only 2 % of the labels are not class 0, so little may be predictable")
