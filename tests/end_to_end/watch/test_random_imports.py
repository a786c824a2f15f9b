"""Watching neither brings forward nor undoes what a module draws when the training imports it."""

import subprocess
import sys

import pytest

SCRIPT = """
import random, sys
import numpy as np
import torch
from torch import nn

place, is_watched, run = sys.argv[1], sys.argv[2] == "watched", sys.argv[3]
torch.manual_seed(0), np.random.seed(0), random.seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())


def draw(*_):
    import rich.style  # draws from Python's generator
    import drawing  # draws from all


if place == "forward":
    model[1].register_forward_pre_hook(draw)
elif place == "backward":
    model[0].weight.register_hook(draw)
else:
    optimizer.register_step_post_hook(draw)

if is_watched:
    import gradwatch

    monitor = gradwatch.watch(model, optimizer, run=run, record=True, on_finding=None)
for _ in range(12):
    x = torch.randn(16, 8) * random.random() + float(np.random.rand())
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if is_watched:
        monitor.step(loss, batch=x)
if is_watched:
    monitor.close()
print(loss.item(), random.getstate(), np.random.get_state()[1].tobytes().hex(), torch.get_rng_state().tolist())
"""

REPORT = """
import sys
import torch, gradwatch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gradwatch.watch(model, optimizer, run=sys.argv[1]) as monitor:
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
print((monitor.run_dir / "report.html").exists(), "rich" in sys.modules)
"""


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_generators_are_those_of_the_training_unwatched(place, tmp_path):
    (tmp_path / "drawing.py").write_text(
        "import random, torch\nimport numpy as np\nrandom.random(), np.random.rand(), torch.rand(3)\n", encoding="utf-8"
    )
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    printed = [
        subprocess.run(
            [sys.executable, str(tmp_path / "script.py"), place, how, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for how in ("plain", "watched")
    ]

    assert printed[0]
    assert printed[1] == printed[0]


def test_a_run_with_report_and_charts_does_not_import_what_draws(tmp_path):
    command = [sys.executable, "-c", REPORT, str(tmp_path / "run")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert printed == "True False\n"
