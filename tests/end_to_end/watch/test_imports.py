"""What watching imports changes no training: modules draw what they did, and no optimizer of torch gets a namesake."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, random, sys
from collections import Counter
from pathlib import Path
import numpy as np
import torch
from torch import nn


def train(place, is_watched, folder):
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

        monitor = gradwatch.watch(model, optimizer, run=folder / place, record=True, on_finding=None)
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
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    (folder / f"{place}-{is_watched}.json").write_text(json.dumps([loss.item(), state]))


def report(folder):
    import gradwatch

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, run=folder / "report") as monitor:
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    (folder / "report.json").write_text(json.dumps("rich" in sys.modules))


def names(folder):
    def below(kind):
        return [name for sub in kind.__subclasses__() for name in (sub.__name__, *below(sub))]

    before = Counter(below(torch.optim.Optimizer))
    import gradwatch

    model = nn.Linear(2, 1)
    with gradwatch.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        added = Counter(below(torch.optim.Optimizer)) - before
    (folder / "names.json").write_text(json.dumps(sorted(added)))


torch.optim.Adam([torch.zeros(1)])  # the first optimizer imports a compiler, which takes seconds
# each has a process of its own, in which nothing that draws was imported before
trainings = [(train, place, is_watched) for place in ("forward", "backward", "step") for is_watched in (False, True)]
for run, *args in (report,), (names,), *trainings:
    if (child := os.fork()) == 0:
        run(*args, Path(sys.argv[1]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, (run, *args)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draws")
    (folder / "drawing.py").write_text(
        "import random, torch\nimport numpy as np\nrandom.random(), np.random.rand(), torch.rand(3)\n", encoding="utf-8"
    )
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    subprocess.run([sys.executable, str(folder / "script.py"), str(folder)], check=True)
    return folder


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_generators_are_those_of_the_training_unwatched(place, folder):
    plain, watched = (json.loads((folder / f"{place}-{how}.json").read_text()) for how in (False, True))

    assert (folder / place / "run.json").exists()
    assert watched == plain


def test_a_run_with_report_and_charts_does_not_import_what_draws(folder):
    assert (folder / "report" / "report.html").exists()
    assert json.loads((folder / "report.json").read_text()) is False


def test_libraries_that_look_optimizers_up_by_name_find_torchs_own(folder):
    assert json.loads((folder / "names.json").read_text()) == []
