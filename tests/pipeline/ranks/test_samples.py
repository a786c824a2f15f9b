"""Samples that ranks share are found from a few hashes, and epochs, draws with replacement and padding are none."""

import numpy as np
import pytest
import torch

from gradwatch.monitor.ranks.samples import SampleReader, hash_samples, sample_values
from gradwatch.pipeline.ranks.samples import find_shared

BATCH = 16


def epochs(length, world, rank, num, *, seed=0):
    """Indices of a DistributedSampler with set_epoch: shuffled anew, padded to whole batches of all ranks."""
    parts = []
    for epoch in range(num):
        order = np.random.default_rng((seed, epoch)).permutation(length)
        parts.append(np.resize(order, -(-length // world) * world)[rank::world])
    return np.concatenate(parts)


def own_orders(length, world, rank, num):
    """Each rank shuffles the whole dataset with a seed of its own."""
    return epochs(length, 1, 0, num, seed=rank)


def ranges(length, world, rank, num):
    """Ranges of samples that overlap by a third."""
    size = length // world * 3 // 2 if world == 2 else length // 2
    begin = (length - size) * rank // (world - 1)
    return np.tile(np.arange(begin, begin + size), num)


def trailing(length, world, rank, num):
    """One stream, in which each rank is 3 batches later than the rank before it."""
    return np.arange(num * length)[3 * BATCH * (world - rank) :]


def half(length, world, rank, num):
    """Half of each batch is the same on all ranks."""
    stream = np.arange(num * length).reshape(-1, BATCH)
    own = stream + (rank + 1) * 10**6
    return np.where(np.arange(BATCH) < BATCH // 2, stream, own).ravel()


def draws(length, world, rank, num):
    """Samples that are drawn with replacement from the whole dataset."""
    return np.random.default_rng(rank).integers(0, length, num * length)


def rotation(length, world, rank, num):
    """Each epoch gives a rank the shard that another rank had."""
    shards = np.array_split(np.arange(length), world)
    return np.concatenate([shards[(rank + epoch) % world] for epoch in range(num)])


def warm_up(length, world, rank, num):
    """One batch of all ranks, and then shards."""
    return np.concatenate([np.arange(-BATCH, 0), epochs(length, world, rank, num)])


def read(indices, last_step, *, shape=(6,)):
    """Return the state of a rank that has trained on samples of a dataset with these indices."""
    reader, values = SampleReader(), {}
    for step in range(last_step + 1):
        chosen = indices[step * BATCH : (step + 1) * BATCH]
        rows = [torch.randn(shape, generator=torch.Generator().manual_seed(int(i) + 10**8)) for i in chosen]
        if rows:
            reader.read({"x": torch.stack(rows)}, step=step)
        if step.bit_count() == 1:
            values = reader.values(step) or values
    return values


def shared(order, *, length, world, num, last_step=32):
    return find_shared({rank: read(order(length, world, rank, num), last_step) for rank in range(world)})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("order", "onset"), [(own_orders, (0, 3)), (ranges, (0, 25)), (trailing, (3, 3)), (half, (0, 0))]
)
def test_shared_samples_are_found_with_their_first_step(order, onset, world):
    found = shared(order, length=960, world=world, num=2)

    assert found is not None
    assert onset[0] <= found.step <= onset[1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("order", [epochs, draws, rotation, warm_up], ids=lambda order: order.__name__)
@pytest.mark.parametrize("length", [50, 517, 4096])
def test_what_ranks_share_in_healthy_trainings_is_not_reported(order, length, world):
    assert shared(order, length=length, world=world, num=2 if length > 512 else 12) is None


def test_the_fraction_of_shared_samples_is_estimated():
    found = shared(half, length=960, world=2, num=2)

    assert found.fraction == pytest.approx(0.5, abs=0.15)  # of 256 kept samples: 5 standard deviations


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_equal_samples_have_equal_hashes_in_any_layout_and_batch(dtype):
    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 40, 50) * 50).to(dtype)
    pair = (batch, torch.arange(8))

    hashes = hash_samples(sample_values(pair))

    assert len(set(hashes.tolist())) == 8
    turned = [tensor.flip(0).contiguous() for tensor in pair]
    turned[0] = turned[0].contiguous(memory_format=torch.channels_last)
    assert torch.equal(hash_samples(sample_values(turned)), hashes.flip(0))
