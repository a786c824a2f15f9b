"""Check that the update of tensors without data is traced as a GPU would make it, and what a trace leaves behind."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwatch.planning.trace import trace

LAYERS, WIDTH = 4, 128
WEIGHT_BYTES = LAYERS * WIDTH * WIDTH * 4


@pytest.mark.parametrize(
    ("kind", "settings", "copies"),
    [
        # weights, gradients, momentum, and the decayed gradients
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}, 4),
        # weights, gradients, two moments, and the roots of the second
        (torch.optim.AdamW, {}, 5),
        # weights, gradients, momentum, and the decayed gradient of one tensor, as each was asked for by itself
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4, "foreach": False}, 3 + 1 / LAYERS),
    ],
)
def test_an_update_on_a_gpu_takes_temporaries_of_all_tensors_at_once(kind, settings, copies):
    mode = FakeTensorMode()
    with mode, torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    chosen = optimizer.param_groups[0]["foreach"]

    def run(number):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return 1.0

    plan = trace(
        run,
        batch=(),
        model=model,
        optimizer=optimizer,
        device=torch.device("cuda"),
        mode=mode,
        has_device_memory=True,
    )

    assert plan.peak_bytes == pytest.approx(copies * WEIGHT_BYTES, rel=0.01)  # and the counters of the steps
    assert optimizer.param_groups[0]["foreach"] is chosen


def test_older_objects_are_given_back_to_the_garbage_collector(monkeypatch):
    calls = []
    collector = SimpleNamespace(
        get_freeze_count=lambda: 0,
        freeze=lambda: calls.append("freeze"),
        collect=lambda: calls.append("collect"),
        unfreeze=lambda: calls.append("unfreeze"),
    )
    monkeypatch.setattr("gradwatch.planning.trace.gc", collector)
    model = nn.Linear(2, 1)

    def run(number):
        calls.append("run")
        model(torch.ones(1, 2)).sum().backward()
        return 1.0

    trace(run, batch=(), model=model, optimizer=None, device=torch.device("cpu"), mode=None)

    assert calls == ["freeze", "run", "collect", "run", "unfreeze"]
