"""A loop may call the monitor, and clip, in hooks of its own optimizer."""

import pytest
import torch
from torch import nn

import gradwatch


@pytest.mark.parametrize("clips", [True, False])
def test_a_hook_of_the_loop_may_call_the_monitor_after_the_update(clips):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    # before the hooks of the monitor, so that torch calls these next
    optimizer.register_step_post_hook(lambda *_: monitor.step(loss))
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(120):
            x = torch.randn(32, 6)
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    assert monitor.history.step == 119
    assert not monitor.history.findings
