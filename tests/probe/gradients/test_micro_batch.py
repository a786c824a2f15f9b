"""The first micro-batch's gradient is measured alone, and gives the noise scale that the samples have."""

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.diagnose.gradient_noise import noise_scale
from gradwatch.monitor import Schedule


def norm_of(params):
    return torch.cat([p.grad.flatten() for p in params]).norm().item()


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled loss"])
def test_it_is_the_norm_of_the_first_micro_batch(scaled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    monitor = gradwatch.watch(
        model, optimizer, accumulate=3, scaler=scaler if scaled else None, schedule=Schedule(updates=2)
    )
    expected = []
    for _ in range(5):
        batches = [torch.randn(6, 4) for _ in range(3)]
        for i, x in enumerate(batches):
            scaler.scale(model(x).square().mean() / 3).backward()
            if i == 0:
                expected.append(3 * norm_of(list(model.parameters())) / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        monitor.step(1.0, batch=batches)
    monitor.close()

    micro_T = monitor.history["grad_norm.micro"]

    assert micro_T[::2] == pytest.approx(expected[::2], rel=1e-5)
    assert all(value != value for value in micro_T[1::2])


def test_the_noise_scale_is_that_of_the_samples():
    torch.manual_seed(0)
    x, y = torch.randn(4000, 3), torch.randn(4000, 1)
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = Schedule(updates=1, activations=0, budget=0)
    monitor = gradwatch.watch(model, optimizer, accumulate=4, schedule=schedule)
    for _ in range(250):
        rows = torch.randint(4000, (4, 8))
        for part in rows:
            ((model(x[part]) - y[part]).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(1.0, batch=rows.flatten())
    monitor.close()

    error = model(x) - y
    each = (2 * error * torch.cat([x, torch.ones(4000, 1)], 1)).detach()  # gradient of every sample
    exact = float(each.var(0).sum() / each.mean(0).square().sum())
    found = noise_scale(monitor.history)
    assert found is not None
    assert found.samples == pytest.approx(exact, rel=0.3)
    assert found.steps == 250


def test_without_accumulation_nothing_is_measured():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer) as monitor:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        monitor.step(1.0)

    assert noise_scale(monitor.history) is None
    assert not model.bias._backward_hooks
