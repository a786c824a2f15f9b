"""A rank reads its local gradients at few steps, and leaves nothing behind."""

import torch
from torch import nn

from gradwatch.attempts import Attempts
from gradwatch.monitor.ranks.reader import RankReader


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, steps, scale=1.0):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        for param in model.parameters():
            param.grad *= scale  # as an average over ranks changes it
        optimizer.step()


def test_the_gradient_is_read_before_and_after_the_loop_changes_it():
    model, optimizer = make()
    events = []
    RankReader({"": model}, [optimizer], events.append, Attempts()).attach()

    train(model, optimizer, 20, scale=0.5)

    assert [event.step for event in events] == [0, 1, 2, 3, 4, 8, 16]
    for values in (event.values for event in events):
        assert values["product"] == 0.5 * values["local"]
        assert values["reduced"] == 0.25 * values["local"]
        assert "random" in values, "dropout draws in the forward pass"


def test_no_hook_stays_after_the_removal():
    model, optimizer = make()
    attached = RankReader({"": model}, [optimizer], lambda event: None, Attempts()).attach()
    train(model, optimizer, 2)  # step 2 is read as well, so the gradients have hooks

    for hook in attached:
        hook.remove()

    assert not [param for param in model.parameters() if param._backward_hooks]
    left = [model._forward_hooks, model._forward_pre_hooks, optimizer._optimizer_step_pre_hooks]
    assert not any(left)
