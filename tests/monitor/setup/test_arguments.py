"""Mistakes in the call of `watch`: each is named with its place, its value, what was expected, and the way out."""

import random
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.detect.gradients.dead_layer import DeadLayer
from gradwatch.errors import GradwatchError

MODEL = nn.Sequential(nn.Linear(4, 4))
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
STEP_LR = torch.optim.lr_scheduler.StepLR(SGD, 10)
DEAD_LAYER = ", ".join(("enabled", *(field.name for field in fields(DeadLayer))))
OPTIMIZER = "expected a torch.optim.Optimizer, or a list of them"

MISTAKES = [
    (
        {"model": SGD, "optimizer": MODEL},
        "model: got an optimizer, and optimizer a model; write watch(model, optimizer)",
    ),
    (
        {"model": nn.Linear},
        "model: got the class Linear, expected a torch.nn.Module, or a dict of them by name; "
        "create it first: Linear(...)",
    ),
    ({"model": {"critic": 3}}, "model.critic: got 3, expected a torch.nn.Module"),
    (
        {"optimizer": STEP_LR},
        f"optimizer: got an object of type StepLR, {OPTIMIZER}; "
        "a learning-rate schedule needs no watching: pass its optimizer",
    ),
    (
        {"optimizer": list(MODEL.parameters())},
        f"optimizer: got an object of type list, {OPTIMIZER}; pass [] if the loop moves the weights by hand",
    ),
    ({"optimizer": [SGD, SGD]}, "optimizer.1: the same SGD is given twice; remove one"),
    (
        {"detect": {"dead-layr": {}}},
        "detect.dead-layr: got 'dead-layr', expected a detector such as dead-layer, dead-relu, failed-load "
        "(`gradwatch list detectors` shows all); did you mean 'dead-layer'?",
    ),
    (
        {"detect": {"dead-layer": {"step": 3}}},
        f"detect.dead-layer.step: unknown setting of dead-layer, expected one of {DEAD_LAYER}; did you mean 'steps'?",
    ),
    (
        {"detect": {"dead-layer": {"decades": np.ones(2), 4: 5}, "GW102": {"every": 0}}},
        f"detect.dead-layer.4: unknown setting of dead-layer, expected one of {DEAD_LAYER}\n"
        "detect.dead-layer.decades: got an object of type ndarray, expected a number\n"
        "detect.GW102.every: got 0, expected a whole number of at least 1",
    ),
    (
        {"schedule": {"updates": 5}},
        "schedule: got an object of type dict, expected a gradwatch.Schedule, the steps between two measurements; "
        "write gradwatch.Schedule(updates=5)",
    ),
    (
        {"schedule": STEP_LR},
        "schedule: got an object of type StepLR, expected a gradwatch.Schedule, the steps between two measurements; "
        "leave it out: learning rates are read from the optimizer",
    ),
    (
        {"schedule": gradwatch.Schedule(updates=-1, budget=3)},
        "schedule.updates: got -1, expected a whole number of at least 0\n"
        "schedule.budget: got 3, expected a fraction from 0 to 1",
    ),
    (
        {"accumulate": 0, "total_steps": 100.0, "on_finding": "rais", "record": True},
        "accumulate: got 0, expected a whole number of at least 1\n"
        "total_steps: got 100.0, expected a whole number of at least 1, or None; write 100\n"
        "record: incidents are written into a run directory, and there is none; give run=...\n"
        "on_finding: got 'rais', expected 'print', 'raise', a function or None; did you mean 'raise'?",
    ),
    ({"run": __file__}, f"run: got {__file__!r}, which is a file; expected the path of a directory, or None"),
    (
        {"run": "runs/never", "resume": True, "overwrite": True},
        "overwrite: a run that is replaced cannot be resumed; give one of them",
    ),
    ({"resume": True}, "resume: there is no run directory; give run=..."),
    (
        {"scaler": True, "loss_fn": torch.ones(1)},
        "scaler: got True, expected a torch.amp.GradScaler, or None\n"
        "loss_fn: got an object of type Tensor, expected a function or a module, or None",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[message.partition(":")[0] for _, message in MISTAKES])
def test_a_mistake_in_the_call_is_named_and_nothing_is_attached(wrong, message):
    with pytest.raises(GradwatchError, match=f"^{re.escape(message)}$"):
        gradwatch.watch(**{"model": MODEL, "optimizer": SGD} | wrong)

    assert not SGD._optimizer_step_pre_hooks
    assert not MODEL._forward_pre_hooks


def test_a_threshold_may_be_spelled_otherwise_and_is_used_without_a_random_number():
    states = random.getstate(), torch.get_rng_state()

    monitor = gradwatch.watch(MODEL, SGD, detect={"dead_layer": {"enabled": False}}, total_steps=np.int64(9))
    monitor.close()

    assert monitor.history.info.total_steps == 9
    assert "dead-layer" not in {detector.kind for detector in monitor.pipeline._ingest._detectors}
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_an_optimizer_of_another_model_gives_a_warning():
    with pytest.warns(RuntimeWarning, match="SGD holds none of the model's parameters; make the optimizer after"):
        gradwatch.watch(nn.Linear(4, 4), SGD).close()
