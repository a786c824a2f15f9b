"""The sinks of a loop of one's own have the names and settings of a config; a tracker that fails stops no training."""

import importlib.machinery
import re
import sys

import pytest
import torch

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.monitor.setup.own_sinks import check_sinks, make_sinks
from gradwatch.render import packages


def test_without_settings_a_run_directory_gets_charts_and_report():
    assert check_sinks(None, has_directory=True) == ({"tensorboard": {}, "html": {}}, [])
    assert check_sinks(None, has_directory=False) == ({}, [])


def test_settings_add_and_remove_sinks():
    asked = {"tensorboard": {"enabled": False}, "callable": {"target": print, "every": 5}}

    assert check_sinks(asked, has_directory=True)[0] == {"html": {}, "callable": {"target": print, "every": 5}}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"wanb": {}}, r"sinks\.wanb: got 'wanb'.*did you mean 'wandb'"),
        ({"wandb": {"projct": "x"}}, r"sinks\.wandb\.projct: unknown setting.*did you mean 'project'"),
        ({"callable": {"target": print, "every": "2"}}, r"sinks\.callable\.every: got '2', expected a whole number"),
        ({"callable": {}}, r"sinks\.callable\.target: missing"),
        (["wandb"], r"sinks: got \[wandb\], expected the settings of each sink below its name"),
        ({"terminal": {}}, r"sinks\.terminal: shows a training from a config; here, on_finding prints the findings"),
        ({"html": {}}, r"sinks\.html: writes to a run directory, and there is none; give run="),
    ],
)
def test_a_wrong_setting_is_one_clear_error(asked, message):
    (problem,) = check_sinks(asked, has_directory=False)[1]

    assert re.search(message, str(problem))


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)

    model = torch.nn.Linear(1, 1)
    with pytest.raises(GradwatchError, match=r"^sinks\.wandb: the package wandb is not installed; pip install wandb$"):
        gradwatch.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks={"wandb": {}})


def test_the_folder_that_wandb_writes_is_not_the_package(monkeypatch):
    folder = importlib.machinery.ModuleSpec("wandb", None, is_package=True)  # as Python finds a folder without a file
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: folder)

    assert packages.installation("wandb") == "pip install wandb"


def test_a_tracker_that_cannot_start_is_left_out_with_a_warning(monkeypatch):
    def start(**options):
        torch.rand(1)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("gradwatch.render.trackers.wandb.Wandb", start)
    generator = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match=r"sinks\.wandb: ConnectionError: no route to host .*the run goes without"):
        assert make_sinks({"wandb": {}}, None) == []
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_function_gets_the_run_of_a_loop():
    got, model = [], torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sinks = {"callable": {"target": got.append, "every": 2}}
    with gradwatch.watch(model, optimizer, sinks=sinks, on_finding=None) as monitor:
        for _ in range(5):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert [(each["event"], each.get("step")) for each in got] == [
        ("start", None),
        *(("step", step) for step in (0, 2, 4)),
        ("end", 4),
    ]
    assert got[3]["values"]["curves/loss"] == pytest.approx(loss.item())
