"""Batches of one sample each are found if the batches differ; samples that are repeated on purpose are not."""

import pytest
import torch

from gradwatch.probe.batches.equal_samples import EqualSamples
from gradwatch.probe.batches.repeated_samples import INSPECTED_STEPS

N, FEATURES = 8, 3


def found(batch_of):
    reader = EqualSamples()
    return [event.values for step in range(40) for event in reader.inspect(batch_of(step), step=step)]


def memories(step):
    torch.manual_seed(step)
    return torch.stack([torch.randn(FEATURES)] * N)


def test_memories_of_one_array_are_found_after_the_last_look():
    (values,) = found(memories)

    assert values == {"samples": N, "batches": len(INSPECTED_STEPS)}


def test_memories_count_in_any_nest_beside_vectors():
    assert len(found(lambda step: {"state": memories(step), "action": torch.randint(2, (N,))})) == 1


@pytest.mark.parametrize(
    "batch_of",
    [
        pytest.param(lambda step: torch.randn(N, FEATURES), id="samples that differ"),
        pytest.param(lambda step: memories(0), id="one batch"),
        pytest.param(lambda step: memories(0 if step < 10 else 1), id="two batches"),
        pytest.param(lambda step: memories(step)[:1].expand(N, -1), id="one sample, expanded"),
        pytest.param(lambda step: memories(step)[:2], id="too few samples"),
        pytest.param(lambda step: memories(step) if step != 8 else torch.randn(N, FEATURES), id="other samples once"),
        pytest.param(lambda step: (memories(step), torch.randn(N, FEATURES)), id="a second input that differs"),
        pytest.param(lambda step: torch.full((N,), step), id="a vector of times"),
        pytest.param(lambda step: None, id="nothing"),
    ],
)
def test_other_batches_are_not(batch_of):
    assert found(batch_of) == []
