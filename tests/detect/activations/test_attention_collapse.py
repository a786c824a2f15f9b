"""Collapsed attention is a finding of its layer, until its heads look at several keys again."""

import pytest
import torch
from torch.nn import functional as F

import gradwatch
from gradwatch.data import text
from gradwatch.detect.activations.attention_collapse import AttentionCollapse
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.models import gpt


@pytest.mark.parametrize("rate", [1e-3, 5e-2])
def test_a_rate_that_is_too_high_for_attention_is_named_before_the_loss_rises(rate):
    torch.manual_seed(0)
    splits = text.build(context=32)
    model = gpt.build(splits.spec, layers=2, heads=2, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))

    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(91):  # from 40 to 60, as the processor rounds
            inputs, targets = splits.train.batch(torch.randint(len(splits.train), (8,)))
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=inputs)

    found = [d for d in diagnose(monitor.history) if d.cause_id == "attention-logits"]
    assert len(found) == (rate == 5e-2)
    for diagnosis in found:
        assert "lower" in diagnosis.remedies[0].text


def test_a_finding_ends_where_five_samples_have_usual_logits():
    made = Synthetic(steps=200, activations=2).attention(1, logit=300.0, entropy=0.02, onset=60)
    made.max_logit_TA[100:, 1] = 20.0
    (finding,) = AttentionCollapse().detect(made.history(until=81))

    still = AttentionCollapse().recovery(made.history(until=131), finding)
    over = AttentionCollapse().recovery(made.history(until=141), finding)

    assert still is None, "samples at steps 100 to 130 are four"
    assert over.step == 100


def test_layers_that_collapse_together_are_one_finding_that_names_the_worst_first():
    made = Synthetic(steps=200, activations=3).attention(0, logit=200.0, entropy=0.02, onset=60)
    made = made.attention(1, logit=300.0, entropy=0.01, onset=60).attention(2, logit=250.0, entropy=0.02, onset=100)
    early, late = made.history(until=81), made.history(until=121)

    (first,) = AttentionCollapse().detect(early)
    assert first.names == ("acts.1", "acts.0")
    assert "each of 2 layers look at single keys: the largest logit is 300 in acts.1" in first.message
    late.report(first)
    (second,) = AttentionCollapse().detect(late)
    assert second.names == ("acts.2",), "what is known is not told again"
    made.max_logit_TA[140:, 1] = 20.0
    assert AttentionCollapse().recovery(made.history(until=191), first) is None, "acts.0 is still collapsed"
