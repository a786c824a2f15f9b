"""`reproducible` pins every source of randomness, and leaves no trace."""

import os
import random

import numpy as np
import pytest
import torch

from gradwatch.state.rng import random_state
from gradwatch.train.reproducible import CUBLAS, reproducible, seed_all


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def settings():
    return (
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(CUBLAS),
    )


def test_seeding_gives_the_same_numbers_from_every_generator():
    seed_all(5)
    first = draw()
    seed_all(5)
    assert draw() == first
    seed_all(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_any_seed_that_torch_takes_is_taken(seed):
    with reproducible(seed):
        assert torch.initial_seed() == seed


def test_a_block_gives_the_same_numbers_each_time():
    numbers = []
    for _ in range(2):
        with reproducible(3):
            numbers.append(draw())
        draw()
    assert numbers[0] == numbers[1]


def test_inside_only_deterministic_algorithms_are_chosen():
    with reproducible(3):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ[CUBLAS] in {":4096:8", ":16:8"}
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.ones(4).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


def test_generators_go_on_as_if_nothing_had_been():
    seed_all(9)
    random.gauss(0, 1)
    expected_state = random_state()
    expected = draw()
    seed_all(9)
    random.gauss(0, 1)

    with reproducible(3):
        draw()
    state = random_state()
    assert state["python"] == expected_state["python"]
    assert torch.equal(state["torch"], expected_state["torch"])
    assert draw() == expected


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_settings_are_put_back_as_they_were_found(monkeypatch, mode, benchmark, workspace):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.delenv(CUBLAS, raising=False)
    if workspace:
        monkeypatch.setenv(CUBLAS, workspace)
    try:
        torch.set_deterministic_debug_mode(mode)
        found = settings()
        with reproducible(1):
            assert workspace in (None, os.environ[CUBLAS]), "the user's choice was overridden"
        assert settings() == found
    finally:
        torch.set_deterministic_debug_mode(0)


def test_everything_is_put_back_when_the_block_raises():
    @reproducible(1)
    def failing():
        return draw()[0] / 0

    found, state = settings(), random_state()
    with pytest.raises(ZeroDivisionError):
        failing()
    assert settings() == found
    assert random_state()["python"] == state["python"]


def test_blocks_nest():
    with reproducible(1):
        draw()
        outer = random_state()
        with reproducible(2):
            draw()
        assert random_state()["python"] == outer["python"]
        assert torch.are_deterministic_algorithms_enabled()


def test_a_function_can_be_made_reproducible():
    @reproducible(7)
    def numbers():
        return draw()

    assert numbers() == numbers()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_goes_on_as_if_nothing_had_been():
    torch.rand(1, device="cuda")
    state = torch.cuda.get_rng_state()
    with reproducible(3):
        first = torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with reproducible(3):
        assert torch.equal(torch.rand(3, device="cuda"), first)
