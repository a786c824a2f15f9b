"""Loops that are not understood, scripts that watch themselves, and scripts with several trainings."""

import gc
import time

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.autowatch import script_watch
from gradwatch.autowatch.search import find_models
from gradwatch.config.load import load_config
from gradwatch.diagnose.rank import diagnose
from gradwatch.records import Severity
from gradwatch.train.loop import train as train_config

STEPS = 6


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(model):
    return model(torch.randn(16, 4)).square().mean()


def train(model, optimizer, *, steps=STEPS):
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def move_raw_tensors():
    weight = torch.randn(4, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(STEPS):
        loss = (torch.randn(16, 4) @ weight).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assign_gradients():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        gradients = torch.autograd.grad(loss_of(model), [*model.parameters()])
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.grad = gradient
        optimizer.step()


def go_back_from_vectors():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = model(torch.randn(16, 4))
        outputs.backward(torch.ones_like(outputs))
        optimizer.step()


def move_without_gradients():
    class Evolution(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.add_(torch.randn_like(param), alpha=0.1)

    model = make()
    optimizer = Evolution(model.parameters(), {})
    for _ in range(STEPS):
        loss_of(model)
        optimizer.step()


def never_step():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    return optimizer


def only_look_at_gradients():
    model = make()
    for _ in range(STEPS):
        loss_of(model).backward()


NO_LOSS = "the optimizer steps without a backward pass from a loss of one number"
NO_STEP = "there was a forward or backward pass, but no step of an optimizer from a loss of one number"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (move_raw_tensors, "no module has the parameters of the optimizer"),
        (assign_gradients, NO_LOSS),
        (go_back_from_vectors, NO_LOSS),
        (move_without_gradients, NO_LOSS),
        (never_step, NO_STEP),
        (only_look_at_gradients, NO_STEP),
    ],
)
def test_a_loop_that_is_not_understood_is_named_once_and_leaves_no_run(script, reason, unedited, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")):
        kept = script()

    said = [line for line in capsys.readouterr().err.splitlines() if "watching model" not in line]
    assert said[-1].startswith(f"gradwatch: I do not understand this loop: {reason}; see docs/get-started/")
    assert sum("I do not understand" in line for line in said) == 1
    assert not (tmp_path / "run").exists()
    del kept


def test_a_loop_without_a_backward_pass_is_told_so(unedited, monitors, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            loss_of(model)
            optimizer.zero_grad()
            optimizer.step()
    monitors[-1].close()

    assert [found.kind for found in gradwatch.load_run(tmp_path / "run").findings] == ["no-gradient"]
    assert "no backward pass through the model (almost certain)" in capsys.readouterr().err


def test_a_loop_without_an_update_is_told_so(unedited, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()

    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"gradwatch: the script made {STEPS} backward passes, but never called optimizer.step()")
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_a_tensor_beside_a_watched_model_is_named_as_left_out(unedited, tmp_path, capsys):
    """As the temperature of a soft actor-critic, which no module has."""
    with unedited(run=str(tmp_path / "run")):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        temperature = torch.zeros(1, requires_grad=True)
        other = torch.optim.Adam([temperature])
        for _ in range(STEPS):
            train(model, optimizer, steps=1)
            other.zero_grad()
            temperature.exp().sum().backward()
            other.step()

    said = capsys.readouterr().err.splitlines()
    left_out = [line for line in said if "is not watched" in line]
    assert len(left_out) == 1
    assert "(Adam): no module has the parameters of the optimizer" in left_out[0]
    assert not any("I do not understand" in line for line in said)


@pytest.mark.filterwarnings("error")
def test_a_model_may_be_trained_again_with_another_optimizer(unedited, tmp_path, capsys):
    """The hooks of the first training leave the model during the first pass of the second one."""
    with unedited(run=str(tmp_path / "run")):
        model = make()
        for _ in range(2):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert capsys.readouterr().err.count("watching") == 2


def test_a_script_that_watches_itself_is_left_alone(unedited, monitors, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")) as script:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradwatch.watch(model, optimizer, on_finding=None):
            train(model, optimizer)

    assert (script.is_over, len(monitors), [*tmp_path.iterdir()]) == (True, 1, [])
    assert capsys.readouterr().err == ""


def test_a_script_that_trains_from_a_config_is_left_alone(unedited, monitors, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(
        "model: {name: mlp, depth: 2, width: 8}\ndata: {name: synthetic, samples: 64, batch_size: 8}\n"
        f"optim: {{name: sgd, lr: 0.1}}\ntrain: {{steps: 3}}\nrun: {{out: {tmp_path / 'trained'}}}\n"
    )
    with unedited(run=str(tmp_path / "run")) as script:
        train_config(load_config(config), log_format="plain")
        model = make()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert (script.is_over, len(monitors), (tmp_path / "run").exists()) == (True, 0, False)


def test_a_script_that_watches_itself_later_gets_the_name_of_the_run(unedited, monitors, tmp_path):
    with unedited(run=str(tmp_path / "run")) as script:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()  # for a summary of the model, say
        with gradwatch.watch(model, optimizer, run=tmp_path / "run", on_finding=None) as own:
            assert script.is_over

    assert (own.run_dir, len(monitors)) == (tmp_path / "run", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_each_training_of_a_script_has_its_own_run(unedited, monitors, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")):
        for fold in range(3):
            model = make()
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=STEPS + fold)
    monitors[-1].close()  # in a script, the end of the process does it
    runs = [gradwatch.load_run(tmp_path / name) for name in ("run", "run-2", "run-3")]

    assert [len(run.history["loss"]) for run in runs] == [STEPS, STEPS + 1, STEPS + 2]
    assert capsys.readouterr().err.count("no problems found in") == 3


def test_an_optimizer_that_is_built_again_for_each_update_is_one_training(unedited, monitors, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")):
        model = make()
        for _ in range(30):
            train(model, torch.optim.Adam(model.parameters()), steps=1)
    monitors[-1].close()

    (folder,) = tmp_path.iterdir()
    assert len(gradwatch.load_run(folder).history["loss"]) == 30
    assert "optimizer rebuilt for each update" in capsys.readouterr().err


def test_stages_of_a_training_with_an_optimizer_each_have_their_own_runs(unedited, monitors, tmp_path):
    with unedited(run=str(tmp_path / "run")):
        model = make()
        for steps in (STEPS, STEPS, 1):
            train(model, torch.optim.Adam(model.parameters()), steps=steps)

    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["run", "run-2", "run-3"]


class Forecaster(nn.Module):
    """A model whose loss is a method: what is called first is the embedding of a category."""

    def __init__(self):
        super().__init__()
        self.category, self.body = nn.Embedding(4, 8), nn.Linear(8, 1)

    def loss(self, category, past):
        return (self.body(self.category(category) + past).squeeze() - past.sum(1)).square().mean()


def test_a_category_that_all_samples_share_is_no_batch(unedited, monitors):
    torch.manual_seed(0)
    for shared in (True, False):
        with unedited():
            model = Forecaster()
            optimizer = torch.optim.Adam(model.parameters())
            known = torch.randint(0, 4, (16,))
            for _ in range(12):
                category = torch.zeros(16, dtype=torch.long) if shared else known.clone()
                loss = model.loss(category, torch.randn(16, 8))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        kinds = {finding.kind for finding in monitors[-1].findings()}
        assert ("constant-batch" in kinds) == (not shared)


def count_of(kind):
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


@pytest.mark.parametrize(("prefix", "kinds"), [("module.", {"failed-load"}), ("", set())])
def test_a_load_that_matches_no_name_of_the_model_is_found(prefix, kinds, unedited, monitors):
    with unedited():
        model = make()
        state = {prefix + name: value.clone() for name, value in make().state_dict().items()}
        keys = model.load_state_dict(state, strict=False)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01))

    (monitor,) = monitors
    monitor.close()
    found = [finding for finding in monitor.findings() if finding.kind == "failed-load"]
    assert bool(keys.missing_keys) == bool(kinds)
    assert {finding.kind for finding in found} == kinds
    assert all(finding.severity is Severity.WARNING and finding.since == 0 for finding in found)
    assert {diagnosis.cause_id for diagnosis in diagnose(monitor.history)} == (
        {"names-of-another-model"} if kinds else set()
    )


def test_trainings_above_the_limit_end_the_last_one_and_cost_no_search(unedited, monitors, monkeypatch, capsys):
    searches = []
    monkeypatch.setattr(script_watch, "MAX_LOOPS", 1)
    monkeypatch.setattr(
        script_watch, "find_models", lambda *args, **options: searches.append(args) or find_models(*args, **options)
    )

    with unedited() as script:
        for _ in range(3):
            model = make()
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert not script.loops

    assert (len(searches), len(monitors)) == (1, 1)
    assert capsys.readouterr().err.count("it is number 2 of this script") == 1


def test_models_of_earlier_trainings_are_not_kept(unedited, monitors):
    class Counted(nn.Linear):
        pass

    with unedited():
        for _ in range(4):
            model = Counted(4, 1)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        del model
        monitors.clear()

        until_s = time.monotonic() + 20  # the threads of the monitors end when they have been idle for a second
        while count_of(Counted) > 2 and time.monotonic() < until_s:
            time.sleep(0.2)
        assert count_of(Counted) <= 2  # the last is watched


def test_a_critic_that_steps_more_often_belongs_to_one_step(unedited, monitors):
    with unedited():
        model, critic = make(), make()
        slow, fast = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, critic))
        sums = []
        for _ in range(STEPS):
            for _ in range(3):
                last = loss_of(critic)
                fast.zero_grad()
                last.backward()
                fast.step()
            loss = loss_of(model)
            slow.zero_grad()
            loss.backward()
            slow.step()
            sums.append((last + loss).item())

    (monitor,) = monitors
    np.testing.assert_allclose(monitor.history["loss"], sums, rtol=1e-6)
    assert monitor.history.info.models == ("model", "critic")


def test_after_one_long_wait_a_critic_of_many_steps_belongs_to_one_step(unedited, monitors):
    with unedited():
        model, critic = make(), make()
        slow, fast = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, critic))
        for _ in range(10):
            for module, optimizer in [(critic, fast)] * 20 + [(model, slow)]:
                optimizer.zero_grad()
                loss_of(module).backward()
                optimizer.step()

    (monitor,) = monitors
    # the first 20 steps of the critic are taken for the training, until the other model steps
    assert len(monitor.history["loss"]) == (20 - 15) + 1 + 9


def test_an_optimizer_that_never_steps_does_not_hold_up_the_others(unedited, monitors):
    with unedited():
        model, idle = make(), make()
        optimizer, never = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, idle))
        train(model, optimizer, steps=40)
        del never

    (monitor,) = monitors
    assert len(monitor.history["loss"]) == 25  # the first row waits for 16 updates


def test_loops_that_are_found_while_an_optimizer_calls_its_hooks_go_on(unedited, monitors):
    def train_alone(model):  # no forward pass of a module shows the loop before the first step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            loss = nn.functional.linear(torch.randn(16, 4), model.weight, model.bias).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with unedited():
        for _ in range(3):
            train_alone(nn.Linear(4, 1))

    assert len(monitors) == 3


def step_after_backward(model, optimizers):
    """As Pyro, which makes an optimizer for each parameter when the parameter gets its first gradient."""
    for _ in range(STEPS):
        loss_of(model).backward()
        for param in model.parameters():
            if param not in optimizers:
                optimizers[param] = torch.optim.SGD([param], lr=0.1)
            optimizers[param].step()
            optimizers[param].zero_grad()


def step_during_backward(model, optimizers):
    """As loops that free each gradient as soon as its parameter has moved."""

    def step(param):
        if param not in optimizers:
            optimizers[param] = torch.optim.SGD([param], lr=0.1)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        loss_of(model).backward()


def step_without_modules(model, optimizers):
    """As a function of the parameters, without a forward pass of a module."""
    for _ in range(STEPS + 1):
        first, last = model[0], model[2]
        hidden = nn.functional.linear(torch.randn(16, 4), first.weight, first.bias).relu()
        nn.functional.linear(hidden, last.weight, last.bias).square().mean().backward()
        for param in model.parameters():
            if param not in optimizers:
                optimizers[param] = torch.optim.SGD([param], lr=0.1)
            optimizers[param].step()
            optimizers[param].zero_grad()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("script", [step_after_backward, step_during_backward, step_without_modules])
def test_optimizers_that_are_made_one_by_one_are_one_loop(script, unedited, monitors, tmp_path, capsys):
    with unedited(run=str(tmp_path / "run")):
        script(make(), optimizers := {})
        gc.collect()
    monitors[-1].close()
    said = capsys.readouterr().err

    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (said.count("watching"), "(4 x SGD)" in said) == (1, True)
    assert len(gradwatch.load_run(tmp_path / "run").history["loss"]) == STEPS - 1
    del optimizers


def test_weights_frozen_for_an_evaluation_before_the_first_step_are_watched_once_they_train(unedited, monitors):
    with unedited():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss_of(model.requires_grad_(False))
        train(model.requires_grad_(True), optimizer)

    (monitor,) = monitors
    assert all(layer.trainable for layer in monitor.history.info.layers)
    assert len(monitor.history["loss"]) == STEPS
    assert [event.kind for event in monitor.history.events] == []


def test_gradients_that_are_cleared_again_are_no_part_of_the_loss(unedited, monitors):
    with unedited():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(STEPS):
            loss_of(model).backward()  # such as an adversary's
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    np.testing.assert_allclose(monitors[0].history["loss"], losses, rtol=1e-6)


def test_a_failure_ends_the_watching_and_not_the_script(unedited, monkeypatch, capsys):
    with unedited() as script:
        monkeypatch.setattr(type(script.loops), "reached_by", lambda *_: 1 / 0)
        model = make()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert script.is_over
    assert "stopped watching after an unexpected ZeroDivisionError" in capsys.readouterr().err


def functions_of_torch():
    kinds = (torch.optim.Optimizer, nn.Module, torch.amp.GradScaler)
    return [torch.autograd.backward, *(function for kind in kinds for function in vars(kind).values())]


def test_all_of_torch_is_as_before_after_the_end(unedited):
    before = functions_of_torch()
    with unedited():
        during = functions_of_torch()

    assert all(a is b for a, b in zip(before, functions_of_torch(), strict=True))
    assert sum(a is not b for a, b in zip(before, during, strict=True)) == 8


def test_an_error_about_a_tensor_changed_in_place_is_the_script_s_own_with_the_way_to_both_lines(unedited):
    def step():
        model = make()
        torch.optim.SGD(model.parameters(), lr=0.1)
        hidden = torch.sigmoid(model(torch.randn(16, 4)))
        hidden += 1
        hidden.sum().backward()

    with unedited(), pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        step()

    (note,) = raised.value.__notes__
    assert note.startswith("gradwatch: `gradwatch run --in-place -- ...` names the line that saved this tensor")
    assert "step" in [entry.name for entry in raised.traceback]
