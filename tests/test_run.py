"""A recorded run in Python and in a notebook."""

import re
import subprocess
import sys

import numpy as np
import pandas
import pytest
import torch

import gradwatch
from gradwatch.errors import RunError
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Severity


@pytest.fixture
def saved(tmp_path):
    """Return a recorded run of thirty steps with one finding, and its directory."""
    made = Synthetic(layers=3, steps=30).history()
    history = History(made.info, groups=made.groups)
    (steps_T, param_TSL), run_TS = made.param.rows(), made.run.rows()[1][:, :, 0]
    with Writer(tmp_path / "run", history) as writer:
        for i, step in enumerate(steps_T.tolist()):
            run = dict(zip(made.run.statistics, run_TS[i].tolist(), strict=True))
            history.append(step, run=run, param_SL=param_TSL[i])
            writer.append()
        found = Finding(
            code="GW103", kind="dead-layer", layer="layers.1.weight", step=9, severity=Severity.WARNING, message="<It>."
        )
        history.report(found)
        writer.report(found)
    return history, tmp_path / "run"


def _text(page):
    return re.sub(r"<[^>]*>", "", page)


def test_a_run_holds_the_arrays_of_its_history(saved):
    history, directory = saved

    run = gradwatch.load_run(directory)

    np.testing.assert_array_equal(run["grad.l2"], history["grad.l2"])
    np.testing.assert_array_equal(run["loss"], history["loss"])
    np.testing.assert_array_equal(run.steps("loss"), history.steps("loss"))
    assert run.param.layers == history.param.layers
    assert run.findings == tuple(history.findings)
    assert run.frame("grad.l2").shape == history["grad.l2"].shape
    assert (run.step, run.info, run.events) == (29, history.info, [])


def test_a_run_is_written_as_parquet(saved, tmp_path):
    gradwatch.load_run(saved[1]).to_parquet(str(tmp_path / "run.parquet"))

    losses = pandas.read_parquet(tmp_path / "run.parquet", filters=[("statistic", "==", "loss")])
    np.testing.assert_array_equal(losses.value, saved[0]["loss"])


def test_it_says_in_a_line_what_it_is(saved):
    assert repr(gradwatch.load_run(saved[1])) == "<Run synthetic: 30 steps, 1 finding>"


def test_it_prints_problems_and_where_to_read_more(saved):
    run = gradwatch.load_run(saved[1])

    assert str(run).splitlines() == [
        "synthetic: 1 problem in 30 steps: dead-layer (step 9)",
        f"most likely cause: {run.diagnoses[0]}",
        f"details: gradwatch diagnose {saved[1]}",
    ]


def test_its_findings_and_diagnoses_print_as_lines(saved):
    run = gradwatch.load_run(saved[1])

    assert str(run.findings) == "step 9: warning dead-layer (GW103) in layers.1.weight: <It>."
    assert str(run.diagnoses) == str(run.diagnoses[0])
    assert str(run.withdrawn) == "none"


def test_a_notebook_shows_verdict_finding_and_layers(saved):
    text = _text(gradwatch.load_run(saved[1])._repr_html_())

    assert "▲ 1 problem (warning): branch multiplied by zero" in text
    assert "GW103 dead-layer" in text
    assert "layers.2" in text
    assert "&lt;It&gt;." in text


def test_a_statistic_is_drawn(saved):
    assert len(gradwatch.load_run(saved[1]).plot("grad.l2").axes[0].lines) >= 3


def test_reading_and_showing_a_run_takes_no_torch(saved):
    program = (
        "import sys, gradwatch; run = gradwatch.load_run(sys.argv[1]); run._repr_html_(); "
        "print({'torch', 'matplotlib', 'IPython', 'pandas', 'pyarrow'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", program, saved[1]], capture_output=True, text=True, timeout=60)

    assert done.stdout == "set()\n", done.stderr


def test_every_public_name_is_found_at_the_root():
    assert {name: getattr(gradwatch, name) for name in gradwatch.__all__}.keys() == set(gradwatch.__all__)


def test_a_run_without_micro_batches_has_no_noise_scale(saved):
    assert gradwatch.noise_scale(gradwatch.load_run(saved[1]).history) is None


def test_a_run_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(RunError, match="there is no such run directory"):
        gradwatch.load_run(tmp_path / "none")


def _train(monitor, model, optimizer, *, steps=3, bad=None):
    for step in range(steps):
        loss = model(torch.randn(4, 3)).square().mean() * (float("nan") if step == bad else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)


@pytest.fixture
def training():
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_monitor_prints_its_steps_and_the_way_to_call_it(training):
    with gradwatch.watch(*training) as monitor:
        early = str(monitor)
        _train(monitor, *training)
        late = str(monitor)

    assert early == "watch: no step was recorded: call `monitor.step(loss)` after each `optimizer.step()`"
    assert (
        late
        == "watch: no problems found in 3 steps; too short for: rising-sparsity, oscillating-gradient, loss-plateau"
    )
    assert str(monitor.findings()) == "none"


@pytest.mark.parametrize("is_written", [True, False])
def test_a_monitor_prints_the_problem_its_cause_and_where_to_read_more(is_written, training, tmp_path):
    run = tmp_path / "mine" if is_written else None
    with gradwatch.watch(*training, run=run, on_finding=None) as monitor:
        _train(monitor, *training, bad=2)

    problem, cause, details = str(monitor).splitlines()
    (diagnosis,) = monitor.close()
    assert problem == f"{'mine' if is_written else 'watch'}: 1 problem in 3 steps: non-finite (step 2)"
    assert cause == f"most likely cause: {diagnosis}"
    assert details == (f"details: gradwatch diagnose {run}" if run else "details: print(monitor.findings())")
    assert str(monitor.findings()) == str(monitor.findings()[0])
    assert str(diagnosis) == f"{diagnosis.cause} ({diagnosis.sureness}); fix: {diagnosis.remedies[0].text}"


def test_a_monitor_shows_itself_in_a_notebook(training):
    with gradwatch.watch(*training) as monitor:
        early = _text(monitor._repr_html_())
        _train(monitor, *training)
        text = _text(monitor._repr_html_())

    assert "no steps recorded" in early
    assert "✔ no problems found" in text
    assert "3 steps" in text
