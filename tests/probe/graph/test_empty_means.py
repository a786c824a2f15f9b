"""A loss over nothing is told as that, with the step of its batch; a NaN that harms the weights is critical."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.records import Severity

FAULTY_STEP = 20


def watched(loss_of, *, guard=False):
    """Return the finding and the diagnosis of a run in which one batch has this loss."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(FAULTY_STEP + 20):
            x = torch.randn(8, 16)
            y = x[:, :4].argmax(1)
            loss = loss_of(model(x), y) if step == FAULTY_STEP else F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            if not guard or torch.isfinite(loss):
                loss.backward()
                optimizer.step()
            monitor.step(loss)
        (diagnosis,) = monitor.close()
    finding = next(f for f in monitor.findings() if f.kind == "non-finite")
    assert finding.step == FAULTY_STEP
    return finding, diagnosis


IGNORED = torch.full((8,), -100)
NONE = torch.zeros(8, dtype=torch.bool)
ZEROS = torch.zeros(8, 4)

IGNORED_LABELS = {
    "mean": lambda z, y: F.cross_entropy(z, IGNORED),
    "another index": lambda z, y: F.cross_entropy(z, torch.zeros(8).long(), ignore_index=0),
    "sum / number": lambda z, y: F.cross_entropy(z, IGNORED, reduction="sum") / (IGNORED >= 0).sum(),
    "smoothed": lambda z, y: F.cross_entropy(z, IGNORED, label_smoothing=0.1),
    "of positions": lambda z, y: F.cross_entropy(z.view(2, 4, 4).transpose(1, 2), torch.full((2, 4), -100)),
    "with class weights": lambda z, y: F.cross_entropy(z, IGNORED, weight=torch.tensor([1.0, 2.0, 1.0, 1.0])),
}
NO_VALUES = {
    "losses of nothing": lambda z, y: F.cross_entropy(z, y, reduction="none")[NONE].mean(),
    "outputs of nothing": lambda z, y: F.cross_entropy(z[NONE], y[NONE]),
    "squares of nothing": lambda z, y: F.mse_loss(z[NONE], torch.zeros(0, 4)),
    "flags of nothing": lambda z, y: F.binary_cross_entropy_with_logits(z[NONE], torch.zeros(0, 4)),
    "sum / length": lambda z, y: z[NONE].square().sum() / torch.tensor(0.0),
}
HARMFUL = {
    "all flags masked": lambda z, y: (
        (F.binary_cross_entropy_with_logits(z, z.detach(), reduction="none") * ZEROS).sum() / ZEROS.sum()
    ),
    "class of weight 0": lambda z, y: F.cross_entropy(z, 0 * y, weight=torch.tensor([0.0, 1, 1, 1])),
    "log of 0": lambda z, y: (z - z.detach()).log().mean(),
    "long target": lambda z, y: F.ctc_loss(
        z.log_softmax(1)[:, None], torch.ones(1, 9).long(), torch.tensor([8]), torch.tensor([9])
    ),
}


@pytest.mark.parametrize("loss_of", IGNORED_LABELS.values(), ids=IGNORED_LABELS)
def test_ignored_labels_are_named_with_their_batch_and_harm_nothing(loss_of):
    finding, diagnosis = watched(loss_of)

    assert finding.severity is Severity.WARNING
    assert "every label is ignore_index" in finding.message
    assert f"batch of step {FAULTY_STEP}" in finding.message
    assert diagnosis.cause_id == "empty-mean"


@pytest.mark.parametrize("loss_of", NO_VALUES.values(), ids=NO_VALUES)
@pytest.mark.parametrize("guard", [False, True])
def test_a_mean_of_no_values_is_proved_by_the_shapes_whether_or_not_a_backward_follows(loss_of, guard):
    finding, diagnosis = watched(loss_of, guard=guard)

    assert finding.severity is Severity.WARNING
    assert "no value is left to take the mean of" in finding.message
    assert diagnosis.cause_id == "empty-mean"


def test_labels_are_read_if_no_backward_has_freed_them():
    finding, diagnosis = watched(IGNORED_LABELS["mean"], guard=True)

    assert finding.severity is Severity.WARNING
    assert "every label of the batch is ignore_index (-100)" in finding.message
    assert "the update was skipped" in finding.message
    assert diagnosis.cause_id == "empty-mean"


@pytest.mark.parametrize("loss_of", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("guard", [False, True])
def test_a_nan_from_values_that_count_is_critical_also_if_the_update_is_skipped(loss_of, guard):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        finding, diagnosis = watched(loss_of, guard=guard)

    assert finding.severity is Severity.CRITICAL
    assert diagnosis.cause_id != "empty-mean"


def test_one_empty_term_among_others_harms_no_weight():
    finding, diagnosis = watched(
        lambda z, y: F.cross_entropy(z, y) + F.mse_loss(z, z.detach() + 1, reduction="none")[NONE].mean()
    )

    assert finding.severity is Severity.WARNING
    assert "no value is left" in finding.message
    assert diagnosis.cause_id == "empty-mean"
