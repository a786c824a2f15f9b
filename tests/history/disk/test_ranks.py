"""The ranks of a distributed training are parts of its run directory, and a part that differs is named."""

from dataclasses import replace

import pytest

import gradwatch
from gradwatch.history.disk.ranks import name_of, part_of, rank_parts, ranks_text
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def write(directory, rank, *, steps, status="finished", world_size=3):
    """Write a run of one rank, with a number of steps."""
    made = Synthetic(layers=1, steps=steps).history()
    info = replace(made.info, rank=rank, world_size=world_size, name=name_of(directory, rank))
    history = History(info, groups=made.groups)
    (steps_T, param_TSL), run_TS = made.param.rows(), made.run.rows()[1][:, :, 0]
    writer = Writer(directory, history)
    for i, step in enumerate(steps_T.tolist()):
        run = dict(zip(made.run.statistics, run_TS[i].tolist(), strict=True))
        history.append(step, run=run, param_SL=param_TSL[i])
    writer.append()
    writer.close(status)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "ddp"


def write_all(directory, *, steps=(12, 12, 12), statuses=("finished",) * 3):
    for rank, (count, status) in enumerate(zip(steps, statuses, strict=True)):
        write(part_of(directory, rank), rank, steps=count, status=status)


def test_a_run_has_the_runs_of_its_ranks(directory):
    write_all(directory)

    run = gradwatch.load_run(directory)

    assert {rank: (part.info.rank, part.info.name) for rank, part in run.ranks.items()} == {
        0: (0, "ddp"),
        1: (1, "ddp (rank 1)"),
        2: (2, "ddp (rank 2)"),
    }
    assert run.ranks[0] is run
    assert str(run).splitlines()[1] == "3 ranks"
    part = gradwatch.load_run(rank_parts(directory)[2])
    assert list(part.ranks) == [2]
    assert str(part).splitlines()[1] == "rank 2 of 3"


def test_a_rank_that_ended_early_is_named_with_its_ending(directory):
    write_all(directory, steps=(12, 7, 12), statuses=("finished", "running", "failed"))  # "running" without a process

    text = ranks_text(read(directory))

    assert text == "3 ranks; rank 1 killed at step 7; rank 2 failed at step 12"


def test_a_rank_that_was_not_watched_is_named(directory):
    write(directory, 0, steps=12)
    write(part_of(directory, 1), 1, steps=12)

    assert ranks_text(read(directory)) == "3 ranks; rank 2 has no record"


def test_a_run_of_one_process_says_nothing_of_ranks(directory):
    write(directory, 0, steps=12, world_size=1)

    run = gradwatch.load_run(directory)

    assert ranks_text(run.history) == ""
    assert "rank" not in str(run)
    assert run.ranks == {0: run}
