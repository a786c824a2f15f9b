"""The place of a process among the ranks, from the variables of torchrun."""

import pytest

from gradwatch.config.sections.train import TrainSection
from gradwatch.errors import GradwatchError
from gradwatch.train.parallel.environment import Launched, check_parallel

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_a_launcher_is_the_only_rank():
    assert Launched.read() == Launched(rank=0, world_size=1)


def test_the_variables_of_torchrun_are_read(monkeypatch):
    for name, value in zip(NAMES, "8524", strict=True):
        monkeypatch.setenv(name, value)

    assert Launched.read() == Launched(world_size=8, rank=5, local_rank=2, local_world_size=4)


@pytest.mark.parametrize(("rank", "got"), [("", "is not set"), ("first", "got 'first'")])
def test_a_missing_or_wrong_rank_is_a_mistake_with_its_name(rank, got, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)

    with pytest.raises(GradwatchError, match=f"RANK: {got} in the environment"):
        Launched.read()


def test_shard_ranks_must_divide_the_ranks():
    section = TrainSection(steps=1, parallel="hsdp", shard_ranks=2)

    check_parallel(section, 4)
    check_parallel(section, 1)  # one process trains as without
    with pytest.raises(GradwatchError, match=r"train.shard_ranks: got 2 for 3 ranks, expected a divisor of 3"):
        check_parallel(section, 3)
