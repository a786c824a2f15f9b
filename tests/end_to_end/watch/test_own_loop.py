"""A loop of the user's own, run as a script: what it prints, how it ends, and what is written."""

import json
import os
import subprocess

import pytest
import warm_python

from gradwatch import load_run
from gradwatch.history.disk import writer

LOOP = """
import time
import torch
import gradwatch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(bad_step, last_step, *, pause_s=0.0, **options):
    monitor = gradwatch.watch(model, optimizer, run="runs/mine", **options)
    for step in range(120):
        inputs = torch.rand(32, 8)
        if step == bad_step:
            inputs[3] = float("nan")
        loss = (model(inputs).squeeze(1) - inputs.mean(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=inputs)
        time.sleep(pause_s)
        if step == last_step:
            raise KeyError("a mistake of the loop")
    print("the loop ended")


"""


@pytest.fixture
def run_loop(tmp_path):
    """Run the loop in an interpreter of its own, in an empty folder; return the process and the run's status."""

    def run(call):
        (tmp_path / "loop.py").write_text(LOOP + call)
        ended = subprocess.run(
            [*warm_python.command(), "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        header = tmp_path / "runs" / "mine" / "run.json"
        return ended, json.loads(header.read_text())["status"] if header.exists() else None

    return run


def test_a_nan_is_printed_at_its_step_and_a_loop_that_never_closes_ends_with_a_summary(run_loop):
    ended, status = run_loop("train(50, None)")

    found, problems, cause, details = ended.stderr.splitlines()
    assert found.startswith("gradwatch: step 50: critical non-finite (GW001)")
    assert problems == "gradwatch: 1 problem in 120 steps: non-finite (step 50)"
    assert cause.startswith("gradwatch: most likely cause: ")
    assert details == "gradwatch: details: gradwatch diagnose runs/mine"
    assert (ended.stdout, ended.returncode, status) == ("the loop ended\n", 0, "finished")


def test_a_loop_that_fails_is_recorded_as_failed(run_loop):
    ended, status = run_loop("train(None, 60)")

    assert "KeyError: 'a mistake of the loop'" in ended.stderr
    assert ended.stderr.splitlines()[-2] == "gradwatch: no problems found in 61 steps; too short for: rising-sparsity"
    assert (ended.returncode, status) == (1, "failed")


def test_a_finding_is_raised_if_the_loop_asks_for_it(run_loop):
    ended, status = run_loop('train(50, None, pause_s=0.05, on_finding="raise")')

    assert "gradwatch.errors.FindingError: step 50: critical non-finite (GW001)" in ended.stderr
    assert (ended.stdout, ended.returncode, status) == ("", 1, "failed")


def test_a_finding_is_raised_at_the_end_of_a_loop_that_is_shorter_than_a_turn_of_the_worker(run_loop):
    with_block = (
        LOOP.partition("def train")[0]
        + """
with gradwatch.watch(model, optimizer, run="runs/mine", on_finding="raise") as monitor:
    for _ in range(5):
        loss = model(torch.full((4, 8), float("nan"))).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
"""
    )
    ended, _ = run_loop(with_block)

    assert "gradwatch.errors.FindingError: step 0: critical non-finite (GW001)" in ended.stderr
    assert ended.returncode == 1


def test_a_function_is_called_with_each_finding_and_may_fail(run_loop):
    ended, status = run_loop(
        "def fail(finding):\n    print(finding.kind)\n    raise OSError('no route')\ntrain(50, None, on_finding=fail)"
    )

    assert sorted(ended.stdout.splitlines()) == ["non-finite", "the loop ended"]
    assert "sink FindingHandler failed (OSError: no route)" in ended.stderr
    assert status == "finished"


def test_nothing_is_printed_if_the_loop_wants_nothing(run_loop):
    ended, _ = run_loop("train(50, None, on_finding=None)")

    assert (ended.stderr, ended.stdout) == ("", "the loop ended\n")


def test_a_wrong_value_is_reported_before_anything_is_written(run_loop):
    ended, status = run_loop('train(None, None, on_finding="rase")')

    assert (
        "on_finding: got 'rase', expected 'print', 'raise', a function or None; did you mean 'raise'?" in ended.stderr
    )
    assert status is None


CHILD = {
    "goes on in its copy of the loop": "loop(monitor, 40)\n    (monitor.findings(), monitor.close())\n    os._exit(0)",
    "ends as a program": "loop(monitor, 40)\n    sys.exit(0)",
    "leaves with an error": "with monitor:\n        loop(monitor, 3)\n        1 / 0",
    "fills the blocks of the fast path": "loop(monitor, 3000)\n    os._exit(0)",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.parametrize("child", CHILD.values(), ids=CHILD)
def test_a_forked_child_that_goes_on_with_a_monitor_leaves_the_run_whole(tmp_path, child):
    (tmp_path / "mine.py").write_text(
        f"""import os, sys, torch, gradwatch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())

def loop(monitor, steps):
    for _ in range(steps):
        inputs = torch.randn(8, 4)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=inputs)

monitor = gradwatch.watch(model, optimizer, run="runs/mine")
loop(monitor, 20)
if not os.fork():
    {child}
os.wait()
loop(monitor, 20)
monitor.close()
"""
    )

    ended = subprocess.run([*warm_python.command(), "mine.py"], cwd=tmp_path, capture_output=True, text=True)

    run = load_run(tmp_path / "runs" / "mine")
    assert (ended.returncode, run.step, run.steps("loss").tolist()) == (0, 39, list(range(40)))
    assert writer.status(tmp_path / "runs" / "mine") == "finished"
    assert ended.stderr.count("a forked child process goes on with this monitor") == 1
    assert ended.stderr.count("in 40 steps") == 1, "only the parent prints a summary"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_that_exits_leaves_the_run_to_its_parent(run_loop):
    ended, status = run_loop("train(None, None)\nimport os\nif os.fork():\n    os.wait()\n")

    assert ended.stderr.count("in 120 steps") == 1
    assert (ended.returncode, status) == (0, "finished")
