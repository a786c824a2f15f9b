"""`gradwatch train --nproc N`: what it says and returns if a rank is killed or fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gradwatch.history.disk.ranks import part_of
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.train import checkpoint


def write(directory, rank, *, steps):
    """Write the run of a rank that was killed after a number of steps."""
    made = Synthetic(layers=1, steps=steps).history()
    history = History(replace(made.info, rank=rank, world_size=2), groups=made.groups)
    (_, param_TSL), run_TS = made.param.rows(), made.run.rows()[1][:, :, 0]
    writer = Writer(part_of(directory, rank), history)
    for step in range(steps):
        run = dict(zip(made.run.statistics, run_TS[step].tolist(), strict=True))
        history.append(step, run=run, param_SL=param_TSL[step])
    writer.append()
    writer.close("running")


@pytest.fixture
def torchrun(monkeypatch):
    """Return a function that puts a torchrun in place whose ranks make some steps and end with codes.

    It returns a list with the run directory, once that is known.
    """

    def replace_by(codes, *, steps=()):
        directories = []

        def run(args):
            named = dict(arg.removeprefix("--").split("=", 1) for arg in args.training_script_args if "=" in arg)
            directory = Path(named.get("directory") or named["resume"])
            directories.append(directory)
            for rank, count in enumerate(steps):
                write(directory, rank, steps=count)
                checkpoint.save(directory / "checkpoints", {"weight": torch.zeros(1)}, step=4, keep=1)
            failures = {
                rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
                for rank, code in codes.items()
            }
            raise ChildFailedError("gradwatch", failures)

        monkeypatch.setattr("torch.distributed.run.run", run)
        return directories

    return replace_by


@pytest.fixture
def train(gradwatch, config, tmp_path):
    out = tmp_path / "runs"
    return lambda: gradwatch("train", "--nproc", "2", config, "--set", "train.parallel=ddp", "--set", f"run.out={out}")


@pytest.mark.parametrize("of_rank_0", [pytest.param(2, id="lost its connection"), pytest.param(-15, id="was ended")])
def test_a_killed_rank_is_named_with_its_step_and_the_way_to_go_on(train, torchrun, of_rank_0):
    directories = torchrun({0: of_rank_0, 1: -9}, steps=(7, 5))

    result = train()

    assert result.code == 128 + 9
    assert " ".join(result.err.split()) == (
        "error: rank 1 was killed at step 5 by SIGKILL (Linux does this when memory runs out), so the other ranks "
        "were stopped; the run got to step 7; continue from its checkpoint of step 4 with: "
        f"gradwatch train --resume {directories[0]}"
    )


def test_a_rank_that_is_killed_before_its_first_step_leaves_no_run(train, torchrun):
    directories = torchrun({1: -11})

    result = train()

    assert (result.code, directories[0].exists()) == (128 + 11, False)
    assert result.err == "error: rank 1 was killed before the first step by SIGSEGV, so the other ranks were stopped\n"


def test_a_rank_that_fails_by_itself_has_said_why(train, torchrun):
    torchrun({0: -15, 1: 2}, steps=(7, 5))

    result = train()

    assert (result.code, result.err) == (2, "")


def test_a_resumed_run_is_the_one_that_is_named(gradwatch, torchrun, recorded):
    run = recorded()
    torchrun({0: -9})

    result = gradwatch("train", "--nproc", "2", "--resume", run, "--set", "train.parallel=ddp")

    assert result.code == 128 + 9
    assert f"gradwatch diagnose {run}" in result.err
