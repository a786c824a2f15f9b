"""A policy far from the one that drew its samples is a finding, until it stays near again."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import gradwatch
from gradwatch.detect.data_and_loss.policy_divergence import DIVERGENCE, PolicyDivergence
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.synthetic.builder import Synthetic

SCHEDULE = gradwatch.Schedule(budget=0)  # samples do not become rarer


def test_ratios_of_other_samples_are_found_in_a_loop_and_their_cause_is_named():
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
    advantage = torch.linspace(-1, 1, 16)

    with gradwatch.watch(actor, optimizer, on_finding=None, schedule=SCHEDULE) as monitor:
        for _ in range(91):
            choice = Categorical(logits=actor(torch.randn(16, 4)))
            log_prob = choice.log_prob(choice.sample())
            old = log_prob.detach() - 1.5  # summed over dimensions in place of averaged, say
            ratio = (log_prob - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    (finding,) = [f for f in monitor.findings() if f.kind == "policy-divergence"]
    assert finding.step <= 90
    cause = next(d for d in diagnose(monitor.history) if finding in d.findings)
    assert cause.cause_id == "other-ratios"


def test_a_finding_ends_where_eight_readings_are_near_again():
    made = Synthetic(steps=240).policy_gradient(divergence=3.0, clipped=0.8, onset=50)
    made.policy[DIVERGENCE][130:] = np.where(np.isnan(made.policy[DIVERGENCE][130:]), np.nan, 0.02)
    (finding,) = PolicyDivergence().detect(made.history(until=121))

    still = PolicyDivergence().recovery(made.history(until=200), finding)
    over = PolicyDivergence().recovery(made.history(until=201), finding)

    assert still is None, "the readings of steps 130 to 190 are seven"
    assert over.step == 130


def test_readings_that_a_loop_passes_count_as_well():
    made = Synthetic(steps=1)
    history = made.history()
    blank = np.full((8, made.layers), np.nan, np.float32)
    for step in range(1, 9):
        history.append(step, run={"loss": 1.0, DIVERGENCE: 0.9}, param_SL=blank)

    (finding,) = PolicyDivergence().detect(history)

    assert finding.onset == 1
