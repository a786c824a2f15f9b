"""A formula that is finite today is reported once, as info, and changes no verdict."""

import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.records import Severity


def trained(loss_of, steps=12):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    labels = torch.arange(32) % 4
    with gradwatch.watch(model, optimizer) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(torch.randn(32, 8)), labels)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def test_the_log_of_a_softmax_is_a_note_at_step_0_with_the_stable_form():
    monitor = trained(lambda scores, labels: F.nll_loss(scores.softmax(1).log(), labels))

    (finding,) = monitor.findings()
    assert (finding.code, finding.severity, finding.step, finding.layer) == ("GW003", Severity.INFO, 0, "2")
    assert "log_softmax" in finding.message
    (diagnosis,) = monitor.close()
    assert diagnosis.cause_id == "latent-formula"
    assert diagnosis.remedies[0].code == "torch.log_softmax(x, -1)"


def test_several_formulas_of_one_layer_are_named_in_one_note():
    def loss_of(scores, labels):
        spread = scores.square().mean(1) - scores.mean(1) ** 2
        return F.cross_entropy(scores, labels) + 0.01 * spread.mean() + 0.01 * scores.square().sum(1).sqrt().mean()

    (finding,) = trained(loss_of).findings()

    assert "x.var(-1, correction=0)" in finding.message
    assert "torch.linalg.vector_norm(x, dim=-1)" in finding.message


def test_a_likelihood_by_hand_has_both_of_its_logarithms_in_one_note():
    def loss_of(scores, labels):
        p, y = scores.sigmoid(), F.one_hot(labels, 4)
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    (finding,) = trained(loss_of).findings()

    assert "use log_softmax or logsigmoid" in finding.message
    assert "use torch.nn.functional.logsigmoid(-x)" in finding.message


def test_the_fused_loss_has_no_note():
    assert not trained(F.cross_entropy).findings()
