"""Check that the plan of a training stands beside its measured peak."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradwatch.config.load import load_config
from gradwatch.events import MEMORY_PLANNED
from gradwatch.planning import forecast
from gradwatch.planning.training import ConfigPlanner
from gradwatch.train.loop import train

CONFIG = """\
model: {{name: mlp, depth: 2}}
data: {{name: digits}}
optim: {{name: adamw, lr: 1e-3}}
train: {{steps: 2, device: cpu}}
run: {{out: {out}}}
"""


def test_the_plan_of_a_training_is_recorded_at_its_end_unless_the_training_is_short(tmp_path, monkeypatch):
    path = tmp_path / "mlp.yaml"
    path.write_text(CONFIG.format(out=tmp_path))
    config = load_config(path)
    short = train(config, log_format="json", forecast=forecast.planned_peak)
    state = torch.get_rng_state()
    monkeypatch.setattr(forecast, "MAX_SHARE", float("inf"))

    planned = train(config, log_format="json", forecast=forecast.planned_peak)

    assert MEMORY_PLANNED.name not in [event.kind for event in short.history.events]
    (peak,) = [e.values["peak_bytes"] for e in planned.history.events if e.kind == MEMORY_PLANNED.name]
    assert peak == ConfigPlanner(lambda changes: load_config(path)).plan().peak_bytes
    assert torch.equal(torch.get_rng_state(), state)  # the second training draws what the first has drawn
    assert "planned for the tensors of a step" in (planned.directory / "report.html").read_text()


@pytest.mark.parametrize(("tensors", "elapsed_s"), [(2, 12.0), (200, 210.0)])
def test_a_training_is_planned_if_that_takes_at_most_a_twentieth_of_its_time(tensors, elapsed_s, monkeypatch):
    # half a second to load the planner, and 50 ms for each tensor
    planned = []
    monkeypatch.setattr(forecast, "ConfigPlanner", lambda *_, **__: planned.append(1))
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(tensors))

    for factor in (0.99, 1.01):
        forecast.planned_peak(
            SimpleNamespace(
                config=SimpleNamespace(train=SimpleNamespace(compile=False)),
                progress=SimpleNamespace(elapsed_s=factor * elapsed_s),
                model=model,
                ranks=None,
                splits=None,
            )
        )
        assert len(planned) == (factor > 1)
