"""The monitor's row, and what happens when a part of the monitor itself goes wrong: training goes on."""

import math
import warnings

import numpy as np
import pytest
import reference
import torch
from torch import nn

import gradwatch
from gradwatch.attempts import MAX_FAILURES
from gradwatch.errors import RunError
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.monitor import Monitor, Schedule, host_stats, total_norm, wiring
from gradwatch.monitor.readings import batch_reader, parameter_readings
from gradwatch.monitor.readings.update_reader import MAX_UPDATES
from gradwatch.monitor.wiring import inspect
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.gradients.histograms import HistogramProbe
from gradwatch.probe.gradients.statistics import GradientProbe
from gradwatch.probe.inspections import Inspections
from gradwatch.probe.updates.from_copy import CopyUpdateProbe

EVERY = Schedule(updates=1, activations=1, histograms=1)
STEPS = 4


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, watcher, *, steps=STEPS, loss_of=lambda loss: loss, **context):
    """Train as any loop would."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 6, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watcher.step(loss_of(loss), batch=x, **context)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


class Broken:
    """What a part of the monitor becomes in these tests."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        raise RuntimeError("out of order")


FAULTS = {
    "the gradient probe": [(GradientProbe, "read")],
    "the update probe": [(CopyUpdateProbe, "before"), (CopyUpdateProbe, "after")],
    "the activation probe": [(ActivationProbe, "arm"), (ActivationProbe, "read")],
    "the histograms": [(HistogramProbe, "read")],
    "the inspection of autograd graph and modes": [(Inspections, "read")],
    "the batch hash": [(batch_reader, "native_hash")],
    "the peak memory": [(host_stats, "peak_memory")],
    "the loss": [(host_stats, "to_number")],
    "the reading of updates": [(parameter_readings.LearningRates, "read")],
    "the recording": [(History, "extend"), (Pipeline, "feed")],
    "the diagnosis": [(Pipeline, "close")],
}
AFTER = "the rest of the run goes without. The summary of the run lists everything that was left out."
PLACES = [(name, *place) for name, places in FAULTS.items() for place in places]


@pytest.mark.parametrize(("name", "owner", "attribute"), PLACES)
def test_what_is_out_of_order_is_named_once_and_left_out(name, owner, attribute, monkeypatch):
    expected, optimizer = make()
    with gradwatch.watch(expected, optimizer) as healthy:
        train(expected, optimizer, healthy)
    model, optimizer = make()
    monkeypatch.setattr(owner, attribute, Broken())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gradwatch.watch(model, optimizer, schedule=EVERY) as watcher:
            train(model, optimizer, watcher)

    assert [str(w.message) for w in caught] == [f"gradwatch: {name} failed (RuntimeError: out of order); {AFTER}"]
    assert caught[0].category is RuntimeWarning
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(expected), strict=True))
    if name not in ("the recording", "the diagnosis"):
        assert len(watcher.history["skipped"]) == STEPS, "the other parts go on"
        assert not watcher.history["skipped"].any()


def test_a_norm_that_is_none_is_named_and_left_out():
    model, optimizer = make()
    with (
        pytest.warns(RuntimeWarning, match=r"the norm of the gradients failed \(ValueError"),
        gradwatch.watch(model, optimizer) as watcher,
    ):
        train(model, optimizer, watcher, grad_norm="large")

    assert np.isnan(watcher.history["grad_norm.before_clip"]).all()
    assert np.isfinite(watcher.history["grad.l2"]).all()


@pytest.mark.parametrize("kind", ["detector", "sink"])
def test_a_detector_or_sink_that_raises_is_left_out(kind, monkeypatch, tmp_path):
    from gradwatch.detect.gradients.vanishing_gradient import VanishingGradient
    from gradwatch.render.tensorboard.sink import TensorBoard

    owner, attribute = {"detector": (VanishingGradient, "detect"), "sink": (TensorBoard, "write")}[kind]
    monkeypatch.setattr(owner, attribute, Broken())
    model, optimizer = make()

    with (
        pytest.warns(RuntimeWarning, match=rf"{kind} .* failed \(RuntimeError: out of order\)"),
        gradwatch.watch(model, optimizer, run=tmp_path / "run") as watcher,
    ):
        train(model, optimizer, watcher, steps=30)

    assert len(gradwatch.load_run(tmp_path / "run")["loss"]) == 30


def test_a_model_that_takes_no_hooks_is_watched_by_its_gradients(monkeypatch):
    monkeypatch.setattr(wiring, "ActivationProbe", Broken())
    model, optimizer = make()

    with pytest.warns(RuntimeWarning, match="the activation probe failed"):
        watcher = gradwatch.watch(model, optimizer)

    with watcher:
        train(model, optimizer, watcher)
    assert np.isfinite(watcher.history["grad.l2"]).all()


def test_without_its_probe_observe_still_gives_the_norm(monkeypatch):
    model, optimizer = make()
    model(torch.ones(2, 6)).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    monkeypatch.setattr(GradientProbe, "read", Broken())

    with gradwatch.watch(model, optimizer) as watcher:
        with pytest.warns(RuntimeWarning, match="gradient probe"):
            norm, *_ = [watcher.observe() for _ in range(MAX_FAILURES)]

        assert norm == pytest.approx(expected, rel=1e-6)
        assert watcher.observe() == norm


def train_to_the_end(model, optimizer, watcher, **keywords):
    train(model, optimizer, watcher, **keywords)
    watcher.pipeline.finish()


def full_disk(self):
    raise RunError("runs/x: no space left on device")


def test_a_full_disk_ends_the_record_in_watch_and_not_the_training(monkeypatch, tmp_path):
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as watcher:
        train(model, optimizer, watcher, steps=2)
        assert len(watcher.history["loss"]) == 2
        monkeypatch.setattr(Writer, "append", full_disk)
        with pytest.warns(RuntimeWarning, match="no space left on device") as caught:
            train_to_the_end(model, optimizer, watcher, steps=5)
        assert len(watcher.history["loss"]) == 7
        monkeypatch.undo()
        train(model, optimizer, watcher, steps=2)

    assert len([w for w in caught if "no space" in str(w.message)]) == 1
    assert len(watcher.history["loss"]) == 9
    assert len(gradwatch.load_run(tmp_path / "run")["loss"]) == 2, "no row after a gap"


def test_a_full_disk_reaches_who_trains_with_this_package(monkeypatch, tmp_path):
    model, optimizer = make()
    recorded = []

    def record(history):
        recorded.append(Writer(tmp_path / "run", history))
        return Pipeline(history, writer=recorded[0])

    watcher, _ = assemble(model, [optimizer], pipeline=record)
    monkeypatch.setattr(Writer, "append", full_disk)

    with pytest.raises(RunError, match="no space left"):
        train_to_the_end(model, optimizer, watcher)

    recorded[0].close("failed")


def assemble(model, optimizers, *, pipeline=None, schedule=EVERY):
    params, info = inspect(
        {"": model} if optimizers else {},
        optimizers,
        activations=None,
        name="test",
        precision="fp32",
        loss_scaling=False,
        accumulate=1,
        total_steps=None,
    )
    history = History(info, groups=max(1, len(optimizers)))
    pipeline = (pipeline or Pipeline)(history)
    return Monitor(params, optimizers=optimizers, pipeline=pipeline, schedule=schedule), history


@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (lambda loss: loss, lambda loss: loss),
        (lambda loss: loss.item(), lambda loss: loss),
        (lambda loss: loss.detach().reshape(1, 1), lambda loss: loss),
        (lambda loss: torch.stack([loss, 3 * loss]), lambda loss: 2 * loss),
        (lambda loss: np.float64(loss.item()), lambda loss: loss),
        (lambda loss: None, lambda loss: math.nan),
    ],
)
def test_a_loss_may_be_any_number_or_none(loss_of, expected):
    seen = []
    model, optimizer = make()
    with gradwatch.watch(model, optimizer) as watcher:
        train(model, optimizer, watcher, loss_of=lambda loss: (seen.append(loss.item()), loss_of(loss))[1])

    np.testing.assert_allclose(watcher.history["loss"], [expected(loss) for loss in seen], rtol=1e-6)
    assert not watcher.attempts.warned


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(5, 2), 5),
        ({"ids": [None, torch.ones(7)]}, 7),
        ((torch.tensor(1.0), torch.ones(3)), 3),
        (["text", 1], None),
    ],
)
def test_a_batch_may_be_any_nest(batch, samples):
    model, optimizer = make()
    with gradwatch.watch(model, optimizer) as watcher:
        watcher.step(1.0, batch=batch)
    run = {name: watcher.history[name][0] for name in ("samples_per_s", "step_ms", "batch_hash")}

    assert np.isfinite(run["batch_hash"])
    if samples is None:
        assert np.isnan(run["samples_per_s"])
    else:
        assert run["samples_per_s"] * run["step_ms"] / 1e3 == pytest.approx(samples)


def test_a_batch_without_anything_to_read_has_no_hash():
    model, optimizer = make()
    with gradwatch.watch(model, optimizer) as watcher:
        watcher.step(1.0, batch=object())

    assert np.isnan(watcher.history["batch_hash"]).all(), "two such batches may hold different data"


def test_the_total_norm_is_that_of_the_probe_to_the_last_bit():
    model, optimizer = make()
    model(torch.ones(2, 6)).sum().backward()
    watcher, _ = assemble(model, [optimizer])

    observed = watcher.observe()

    assert observed == total_norm(to_host(GradientProbe(list(model.parameters())).read()))
    watcher.step(0.0)
    assert watcher.history["grad_norm.before_clip"][0] == observed


def test_the_total_norm_leaves_out_what_is_none_and_keeps_what_is_nan():
    row_SL = np.zeros((6, 3), np.float32)
    row_SL[0] = 3, math.nan, 4
    row_SL[5] = 0, math.nan, 0

    assert total_norm(row_SL) == 5
    row_SL[5, 1] = 2
    assert math.isnan(total_norm(row_SL))


def test_without_optimizers_the_run_itself_is_recorded():
    model, optimizer = make()
    watcher, history = assemble(model, [])
    with watcher:
        train(model, optimizer, watcher, statistics={"lr.0": 0.1})

    assert len(history["loss"]) == STEPS
    assert history["lr.0"].tolist() == [0.1] * STEPS
    assert np.isnan(history["batch_hash"]).all()


def test_peak_memory_stands_in_every_row():
    model, optimizer = make()
    with gradwatch.watch(model, optimizer) as watcher:
        train(model, optimizer, watcher, steps=12)

    assert (watcher.history["peak_memory_bytes"] > 2**20).all()


def test_histograms_count_every_parameter_of_every_optimizer():
    model, _ = make()
    optimizers = [torch.optim.SGD(model[2].parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    watcher, history = assemble(model, optimizers)
    model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    watcher.step(0.0)
    watcher.pipeline.finish()

    sizes = [p.numel() for p in model.parameters()]
    assert [history.histograms[i][0].step for i in range(len(sizes))] == [0] * len(sizes)
    assert [seen.grad_KB[k].sum() for seen, k in map(history.histograms.get, range(len(sizes)))] == sizes
    assert [seen.weight_KB[k].sum() for seen, k in map(history.histograms.get, range(len(sizes)))] == sizes


def test_parameters_take_turns_with_their_histograms():
    model, optimizer = make()
    params = list(model.parameters())
    schedule = Schedule(updates=2, activations=0, histograms=8, budget=0)
    shown = {}
    with gradwatch.watch(model, optimizer, schedule=schedule) as watcher:
        for _ in range(17):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            watcher.step(0.0)
            watcher.pipeline.finish()
            history = watcher.pipeline.history
            if history.histograms_step == history.step:
                newest = {i: of for i, of in history.histograms.items() if of[0].step == history.step}
                shown[history.step] = sorted(newest)
                for i, (seen, k) in newest.items():
                    expected_B = reference.histogram(params[i].grad, seen.edges_B)
                    np.testing.assert_array_equal(seen.grad_KB[k], expected_B, f"step {history.step}, parameter {i}")

    every = list(range(len(params)))
    assert shown.pop(0) == every, "the first step has all"
    assert set(shown) <= set(range(2, 17, 2))
    assert max(map(len, shown.values())) < len(params)
    for first in (2, 10):
        turns = [places for step, places in shown.items() if first <= step < first + 8]
        assert sorted(i for places in turns for i in places) == every, "each once in eight steps"


def test_a_loop_that_records_no_step_is_warned_once_and_costs_no_more_samples():
    model, optimizer = make()
    watcher = gradwatch.watch(model, optimizer, on_finding=None, schedule=Schedule(updates=1, activations=1))

    class NotCalled:
        def step(self, loss, batch):
            pass

    with pytest.warns(RuntimeWarning, match="100 updates without a call of `monitor.step") as caught:
        train(model, optimizer, NotCalled(), steps=MAX_UPDATES + 3)
    hooks = [*model[1]._forward_hooks.values(), *model[1]._forward_pre_hooks.values()]
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward()
    norm = float(model[0].weight.grad.norm())
    optimizer.step()
    watcher.step(loss)
    train(model, optimizer, watcher, steps=1)
    watcher.close()

    history = watcher.history
    assert ([warning.filename for warning in caught], hooks) == ([__file__], [])
    assert history.step == 1
    assert history["grad.l2"][0][0] == pytest.approx(norm)  # of the newest update
    assert np.isfinite(history["update.ratio"]).all()
    assert np.isfinite(history["act.mean"]).all()
    assert history.histograms[0][0].step == 0


def test_after_close_step_records_nothing_and_says_so_once():
    model, optimizer = make()
    watcher = gradwatch.watch(model, optimizer)
    train(model, optimizer, watcher)
    watcher.close()

    with pytest.warns(RuntimeWarning, match="step\\(\\) after close\\(\\) records nothing") as caught:
        train(model, optimizer, watcher)

    assert len(caught) == 1
    assert len(watcher.history["loss"]) == STEPS
    watcher.close()


def test_units_that_die_are_reported_with_the_step_since_which_they_have_not_fired():
    model, optimizer = make()
    with gradwatch.watch(model, optimizer, schedule=Schedule(updates=0, activations=5, histograms=0)) as monitor:
        train(model, optimizer, monitor, steps=60)
        with torch.no_grad():
            model[0].bias[:7] = -1e3
        train(model, optimizer, monitor, steps=60)

    history = monitor.history
    silent_T, since_T, units_T = (history[f"act.{name}"][:, 0] for name in ("silent", "silent_since", "units"))
    assert (silent_T[-1], units_T[-1]) == (7, 8)
    assert since_T[-1] in history.steps("act.silent")
    assert 60 <= since_T[-1] <= 120 - 60 / 4, "never before they died, and no later than a quarter of the way"
    found = next(f for f in monitor.findings() if f.kind == "dead-relu")
    assert "7 of 8 units since step 60" in found.message
    assert [(q.name, q.value, q.unit) for q in found.evidence][-1] == ("act.silent of 1 since step 60", 7, "of 8 units")


def test_a_model_is_compiled_for_the_first_step_and_for_steps_with_and_without_samples():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        compiled = torch.compile(model, backend=backend)
        for _ in range(25):
            optimizer.zero_grad()
            loss = compiled(torch.randn(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert len(graphs) == 3
    assert len(monitor.history.act.rows()[0]) == 3, "steps 0, 10 and 20 are sampled"


def test_the_weights_of_a_skipped_first_step_are_measured(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)  # the gradients overflow
    first = [float(param.detach().norm()) for param in model.parameters()]
    with gradwatch.watch(model, optimizer, scaler=scaler, run=tmp_path / "run") as watched:
        for _ in range(3):
            loss = 100 * model(torch.randn(8, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watched.step(loss)
    history = watched.history

    assert history["skipped"][0] == 1
    assert history["weight.l2"][0] == pytest.approx(first, rel=1e-6)
    assert np.isnan(history["update.ratio"][0]).all()
