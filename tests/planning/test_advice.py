"""Check that advice on memory is the cheapest change that fits, by plans whose memory is known."""

from types import SimpleNamespace

import pytest

from gradwatch.planning.advice import Advisor, Effect
from gradwatch.planning.result import ModuleRow, Plan

WEIGHTS, SAMPLE, BLOCKS = 1000, 100, 4
"""Bytes of the weights, and of the activations of a sample in a block."""


def rows(nbytes):
    """Return the rows of a model and its blocks, of which each saves some bytes for 10 operations."""
    model = ModuleRow(name="", type="Net", saved_bytes=BLOCKS * nbytes, flops=10 * BLOCKS, order=0)
    work = {"flops": 10, "moved_bytes": 10}
    blocks = [
        ModuleRow(name=f"blocks.{i}", type="Block", saved_bytes=nbytes, order=i + 1, **work) for i in range(BLOCKS)
    ]
    return (model, *blocks)


class KnownMemory:
    """A planner of a model whose peak is weights, moments and activations, each by a formula."""

    def __init__(self, *, samples=10_000, batch_norm=False, device_memory=False):
        self.config = SimpleNamespace(
            data=SimpleNamespace(batch_size=32),
            train=SimpleNamespace(
                accumulate=1, precision="fp32", activation_checkpointing="none", activation_offloading=False
            ),
            optim=SimpleNamespace(name="AdamW", options={}),
        )
        self.samples, self.has_batch_norm, self.has_device_memory = samples, batch_norm, device_memory
        self.blocks = tuple(f"blocks.{i}" for i in range(BLOCKS))
        self.planned = []

    def plan(self, changes=None):
        changes = changes or {}
        self.planned.append(changes)
        choice = changes.get("train.activation_checkpointing", "none")
        if isinstance(choice, str):
            recomputed = {"none": 0, "sqrt": BLOCKS - 2}[choice]
        elif "every" in choice:
            recomputed = BLOCKS - choice["every"]  # the last segment is not
        else:
            recomputed = len(choice["modules"]) / (2 if "save" in choice else 1)
        moments = {"sgd": 1, "adamw8bit": 0.5}.get(changes.get("optim.name"), 2)
        batch, half = changes.get("data.batch_size", 32), "train.precision" in changes
        offloaded = "train.activation_offloading" in changes
        activations = 0 if offloaded else int(batch * SAMPLE * (BLOCKS - recomputed)) // (1 + half)
        peak = int(WEIGHTS * (2 + moments)) + activations
        return Plan(
            peak_bytes=peak,
            parameters=0,
            parts={"optimizer": 0},
            modules=rows(batch * SAMPLE),
            at_peak={},
            phase="backward",
            moved_bytes=0,
            host_bytes=2 * batch * SAMPLE * BLOCKS * offloaded,
            flops=batch * changes.get("train.accumulate", 1) * (3 * BLOCKS + recomputed),
            device="cpu",
            is_traced=True,
        )


def advise(planner, budget):
    return Advisor(planner, budget, progress=lambda text: None).advise()


@pytest.fixture
def planner():
    return KnownMemory()


@pytest.mark.parametrize("batch", [1, 5, 32, 33, 777, 9_999])
def test_the_largest_batch_is_exact_and_found_by_few_plans(planner, batch):
    budget = 4 * WEIGHTS + batch * SAMPLE * BLOCKS + 7  # a bit more, but not enough for another sample

    assert advise(planner, budget).largest_batch == batch
    assert sum(set(changes) == {"data.batch_size"} for changes in planner.planned) <= 8


def test_the_largest_batch_is_at_most_the_data_and_0_if_no_sample_fits(planner):
    assert advise(planner, 10**9).largest_batch == 10_000
    assert advise(planner, 100).largest_batch == 0
    assert advise(KnownMemory(samples=20), 10**9).largest_batch == 20


def test_accumulation_is_cheapest_because_it_computes_nothing_twice(planner):
    advised = advise(planner, 4 * WEIGHTS + 8 * SAMPLE * BLOCKS)

    assert not advised.fits
    assert advised.cheapest.changes == {"data.batch_size": 8, "train.accumulate": 4}
    assert advised.cheapest.extra_work == 0
    assert advised.cheapest.saved_bytes == 24 * SAMPLE * BLOCKS


def test_the_optimal_choice_of_modules_stands_beside_the_simple_ones():
    advised = advise(KnownMemory(batch_norm=True), 4 * WEIGHTS + 32 * SAMPLE * (BLOCKS - 1))

    price = {advice.name: (advice.saved_bytes, advice.extra_work) for advice in advised.changes if advice.fits}
    block = 32 * SAMPLE
    assert price["optimal"] == (block, pytest.approx(1 / (3 * BLOCKS)))
    assert price["sqrt"] == (2 * block, pytest.approx(2 / (3 * BLOCKS)))
    assert price["every"] == (3 * block, pytest.approx(3 / (3 * BLOCKS)))  # of 1 block: 2 blocks are the square root
    assert advised.cheapest.changes == {"train.activation_checkpointing": {"modules": ["blocks.0"]}}
    assert advised.cheapest.effect is Effect.NONE
    assert advised.to_json()["changes"][0]["name"] == "optimal"


def test_a_budget_that_no_recomputation_meets_still_has_all_of_them_with_what_they_save(planner):
    saved = {advice.name: advice.saved_bytes for advice in advise(planner, 10).changes}

    assert {"sqrt", "every", "save-matmuls", "optimal"} <= set(saved)
    assert saved["optimal"] == saved["every"] == (BLOCKS - 1) * 32 * SAMPLE  # the last one would save nothing


def test_host_memory_is_advised_on_a_device_with_its_own_at_the_price_of_the_copies():
    budget = 4 * WEIGHTS + SAMPLE * BLOCKS - 1  # below one sample in all blocks

    advised = advise(KnownMemory(device_memory=True), budget)

    (offloading,) = [advice for advice in advised.changes if advice.changes == {"train.activation_offloading": True}]
    assert advised.cheapest is offloading  # nothing else fits alone
    assert offloading.saved_bytes == 32 * SAMPLE * BLOCKS
    assert offloading.extra_work > 1


def test_changes_are_joined_if_none_fits_alone(planner):
    # below one sample in all blocks, so only together with checkpointing
    advised = advise(planner, 4 * WEIGHTS + SAMPLE * BLOCKS - 1)

    assert advised.cheapest.changes == {
        "train.activation_checkpointing": "sqrt",
        "data.batch_size": 1,
        "train.accumulate": 32,
    }


def test_nothing_is_advised_where_nothing_helps_and_nothing_is_needed_where_it_fits(planner):
    assert advise(planner, 10).cheapest is None
    assert advise(planner, 10**9).fits
    assert advise(planner, 10**9).cheapest is None
