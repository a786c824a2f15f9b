"""`gradwatch run` starts a script as Python does: its arguments, standard input, children, errors and exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

import gradwatch as package

SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main():
    print(sys.argv, __file__, os.getcwd(), sys.stdin.readline())
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
    data = TensorDataset(torch.randn(64, 4))
    for (x,) in DataLoader(data, 8, num_workers=1, multiprocessing_context="spawn", shuffle=True):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item())
    raise ValueError("the end")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs a command in a folder with a script."""
    monkeypatch.chdir(tmp_path)

    def call(*command, script=SCRIPT, stdin="a line"):
        (tmp_path / "train.py").write_text(script)
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=100)

    return call


def gradwatch_run(*args):
    return [sys.executable, "-m", "gradwatch", "run", *args]


def test_a_script_runs_as_python_runs_it(start):
    plain = start(*warm_python.command(), "train.py", "0.1")

    watched = start(*gradwatch_run("--run", "mine", "--", "train.py", "0.1"))

    assert (watched.returncode, watched.stdout) == (plain.returncode, plain.stdout)
    assert plain.stderr in watched.stderr  # the traceback, with no frame of gradwatch
    assert plain.returncode == 1
    run = package.load_run("mine")
    assert len(run.history["loss"]) == 8
    assert run.history.ending.kind == "failed"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_exit_code_is_that_of_the_script(start, script, code):
    assert start(*gradwatch_run("train.py"), script=script).returncode == code


def test_pytest_takes_the_package_for_imported_and_warns_of_nothing(start):
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "train.py"]

    watched = start(*gradwatch_run("--", *command), script="def test_nothing(): pass")

    assert watched.returncode == 0, watched.stdout + watched.stderr


def test_a_command_that_trains_nothing_says_so(start):
    done = start(*gradwatch_run("--", sys.executable, "-c", "print(1)"))

    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr == ("gradwatch: no process of this command trained a model: no optimizer of torch took a step\n")


def test_the_environment_keeps_its_sitecustomize(start, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('mine')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")]))

    done = start(*gradwatch_run("train.py"), script="import sys; print(sys.path[1][-3:])")

    assert done.stdout == "mine\nmine\nown\n"  # once for the command itself


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--", "trian.py"], "run: there is no file trian.py; did you mean 'train.py'?"),
        (["--", "pyhton9", "train.py"], "run: there is no command 'pyhton9'"),
        (["--", "python", "-I", "train.py"], "run: got the option -I of Python, which leaves out the hook"),
    ],
)
def test_a_command_that_cannot_be_watched_is_a_mistake(args, message, gradwatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

    result = gradwatch("run", *args)

    assert result.code == 2
    assert message in result.err
