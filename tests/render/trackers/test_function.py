"""A function gets a dictionary for each point and finding: what all trackers are sent."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gradwatch.errors import GradwatchError
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Severity
from gradwatch.render.common.layers import layers, norms_now
from gradwatch.render.trackers.function import Function
from gradwatch.render.trackers.tracker_sink import MAX_ALERTS_PER_KIND


def replay(sink, history):
    """Show a history to a sink step by step, as a training does."""
    steps = history.steps("loss").tolist()
    grown = History(history.info, groups=history.groups)
    sink.open(grown)
    for step in steps:
        at = history.run.steps().tolist().index(step)
        run = {name: history.run.window(name, len(steps))[at, 0] for name in history.run.statistics}
        params = np.stack([history.param.window(name, len(steps))[at] for name in history.param.statistics])
        grown.extend(grown.row(step, run=run, param_SL=params))
        sink.write(grown)
    return grown


def events(history, diagnoses=(), findings=(), **options):
    got = []
    sink = Function(target=got.append, **options)
    grown = replay(sink, history)
    for found in findings:
        sink.report(found)
    sink.close(grown, diagnoses)
    return got


def of(kind, got):
    return [each for each in got if each["event"] == kind]


def made(layer, *, kind="dead-layer", severity=Severity.CRITICAL, step=3):
    return Finding(code="GW401", kind=kind, layer=layer, step=step, severity=severity, message="It is dead.")


def test_points_come_every_few_steps_and_at_the_end():
    got = events(Synthetic(layers=3, steps=25).history(), every=10)

    assert [each["event"] for each in got] == ["start", "step", "step", "step", "step", "end"]
    assert [each["step"] for each in of("step", got)] == [0, 10, 20, 24]


def test_a_point_has_the_curves_of_the_run(healthy):
    got = events(healthy.history, every=10)
    last, history = of("step", got)[-1]["values"], healthy.history

    assert last["curves/loss"] == history["loss"][-1]
    assert last["curves/total_norm"] == history["grad_norm.before_clip"][-1]
    assert last["curves/lr"] == 1e-3


def test_each_validation_comes_at_its_step(healthy):
    validations = [each for each in of("step", events(healthy.history)) if "curves/loss_validation" in each["values"]]

    steps_T, losses_T = healthy.history.steps("val_loss"), healthy.history["val_loss"]
    known = {step: loss for step, loss in zip(steps_T.tolist(), losses_T.tolist(), strict=True) if loss == loss}
    assert {each["step"]: each["values"]["curves/loss_validation"] for each in validations} == pytest.approx(known)


def test_the_number_of_names_does_not_grow_with_the_layers():
    few, many = (of("step", events(Synthetic(layers=n, steps=3).history()))[-1]["values"] for n in (4, 60))

    assert many.keys() == few.keys()


def test_quantiles_are_of_the_norms_of_all_layers(healthy):
    last = of("step", events(healthy.history))[-1]["values"]
    norms = norms_now(healthy.history, layers(healthy.history.info.layers))

    assert last["layers/grad_norm_median"] == pytest.approx(np.median(norms))
    assert (last["layers/grad_norm_min"], last["layers/grad_norm_max"]) == pytest.approx((norms.min(), norms.max()))


def test_layers_with_findings_get_curves_up_to_a_limit():
    history, got = Synthetic(layers=9, steps=3).history(), []
    sink = Function(target=got.append, max_layers=2)
    sink.open(history)
    for i in (7, 2, 5):
        sink.report(made(f"layers.{i}.weight"))
    sink.write(history)
    sink.close(history, ())

    values = of("step", got)[0]["values"]
    shown = {tag: value for tag, value in values.items() if tag.startswith("layers/grad_norm/")}
    norms = norms_now(history, layers(history.info.layers))
    assert shown == {"layers/grad_norm/layers.7": norms[7], "layers/grad_norm/layers.2": norms[2]}


def test_one_finding_with_many_layers_does_not_take_all_curves():
    history, got = Synthetic(layers=9, steps=3).history(), []
    sink = Function(target=got.append)
    sink.open(history)
    sink.report(replace(made(None), layers=tuple(f"layers.{i}.weight" for i in range(9))))
    sink.report(made("layers.8.weight", kind="no-gradient"))
    sink.write(history)
    sink.close(history, ())

    names = [tag for tag in of("step", got)[0]["values"] if tag.startswith("layers/grad_norm/")]
    assert names == [f"layers/grad_norm/layers.{i}" for i in (0, 1, 2, 8)]


def test_the_function_gets_every_finding_and_its_withdrawal():
    got, history = [], Synthetic(layers=9, steps=3).history()
    sink = Function(target=got.append)
    sink.open(history)
    found = [made(f"layers.{i}.weight") for i in range(MAX_ALERTS_PER_KIND + 2)]
    found.append(made(None, kind="loss-plateau", severity=Severity.INFO))
    for each in found:
        sink.report(each)
    over = replace(found[0], withdrawn=9, ended=8, reason="it got a gradient")
    sink.withdraw(over)
    sink.close(history, ())

    assert of("finding", got) == [{"event": "finding", **each.to_json()} for each in found]
    assert of("withdrawn", got) == [{"event": "withdrawn", **over.to_json()}]


def test_the_steps_of_a_rewind_come_again():
    history, got = Synthetic(layers=3, steps=25).history(), []
    sink = Function(target=got.append, every=5)
    grown = replay(sink, history)
    grown.truncate(9)
    sink.write(grown)
    at_10 = history.row(10, run={"loss": 1.0}, param_SL=np.ones(history.param.shape))
    grown.extend(at_10)
    sink.write(grown)
    sink.close(grown, ())

    assert [each["step"] for each in of("step", got)] == [0, 5, 10, 15, 20, 10]


def test_the_end_is_the_document_of_diagnose_as_strict_json(vanishing):
    got = []
    sink = Function(target=got.append)
    sink.open(vanishing.history)
    sink.close(vanishing.history, vanishing.diagnoses)

    (end,) = of("end", got)
    assert end["verdict"] == "critical"
    assert end["diagnoses"][0]["cause"] == vanishing.diagnoses[0].cause
    json.dumps(end, allow_nan=False)


def test_a_function_that_raises_is_reported_and_gets_the_end(healthy):
    got = []

    def flaky(event):
        if event["event"] == "step":
            raise KeyError("no such chart")
        got.append(event)

    sink = Function(target=flaky)
    with pytest.warns(RuntimeWarning, match=r"Function fails \(KeyError: 'no such chart'\)"):
        sink.close(replay(sink, healthy.history), ())

    assert [each["event"] for each in got] == ["start", "end"]


def test_a_function_of_a_config_is_named_by_its_module():
    with pytest.raises(GradwatchError, match=r"sinks\.callable\.target: module 'json' has no 'dupms'; did you mean"):
        Function(target="json:dupms")
