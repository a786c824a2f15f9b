"""A penalty on all weights does not hide a layer that the rest of the loss does not reach."""

import pytest
import torch
from torch import nn

import gradwatch


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_layer_that_only_a_penalty_reaches_is_named(optimizer_of, is_cut):
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(40):
            x = torch.randn(32, 8)
            hidden = encoder(x)
            error = (head(hidden.detach() if is_cut else hidden) - x.sum(1, keepdim=True)).square().mean()
            loss = error + 1e-4 * sum(param.square().sum() for param in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    named = [finding.layer for finding in monitor.findings() if finding.kind == "no-gradient"]
    assert named == ["encoder"] * is_cut
    assert [diagnosis.cause_id for diagnosis in monitor.close()][:1] == ["detached-layer"] * is_cut
