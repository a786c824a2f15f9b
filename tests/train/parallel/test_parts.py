"""Parts of a global batch: together they are the batch, in its order."""

import numpy as np
import pytest

from gradwatch.train.batches import Batches
from gradwatch.train.parallel.parts import Part, StandIn


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_samples", [7, 8, 13])
def test_the_parts_are_the_batch_in_order_and_differ_by_one_sample(world_size, num_samples):
    indices = np.arange(100, 100 + num_samples)

    parts = [Part(rank=rank, world_size=world_size).of(indices) for rank in range(world_size)]

    assert np.concatenate(parts).tolist() == indices.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_without_a_sample_read_the_first_one_as_a_stand_in():
    dataset = [(np.float32(i), i) for i in range(7)]
    of_rank = [Batches(dataset, batch_size=5, part=Part(rank=rank, world_size=3)) for rank in range(3)]

    first, last = zip(*(list(batches.epoch(0)) for batches in of_rank), strict=True)

    assert [batch[1].tolist() for batch in first] == [[0, 1], [2, 3], [4]]
    assert [batch[1].tolist() for batch in last] == [[5], [6], [5]]
    assert [isinstance(batch, StandIn) for batch in (*first, *last)] == [False] * 5 + [True]


def test_a_batch_size_below_the_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match=r"data.batch_size: got 2 for 3 ranks, expected at least one sample for each"):
        Batches([(0.0, 0)] * 9, batch_size=2, part=Part(rank=0, world_size=3))
