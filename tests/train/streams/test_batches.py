"""Batches of a stream: shared among shards without loss, and the same from any position, with and without workers."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from gradwatch.errors import GradwatchError
from gradwatch.train.parallel.parts import Part
from gradwatch.train.streams.batches import StreamBatches


class Numbers(IterableDataset):
    """Sample i is i, with noise from all three global generators."""

    def __init__(self, size=22):
        self.size = size

    def __iter__(self):
        return map(self.sample, range(self.size))

    def sample(self, i):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]), i


class Stateful(Numbers):
    """Continues at its own position, and counts what it reads."""

    def __init__(self, size=22):
        super().__init__(size)
        self.begin, self.reads = 0, 0

    def state_dict(self):
        return {"begin": self.begin}

    def load_state_dict(self, state):
        self.loaded = state["begin"]

    def __iter__(self):
        self.begin = vars(self).pop("loaded", 0)
        for i in range(self.begin, self.size):
            self.begin, self.reads = i + 1, self.reads + 1
            yield self.sample(i)


class SplitsItself(Numbers):
    """Has a shard method, as the datasets of Hugging Face."""

    def __init__(self, size=22, num_shards=1, index=0):
        super().__init__(size)
        self.num_shards, self.index = num_shards, index

    def shard(self, *, num_shards, index):
        return SplitsItself(self.size, num_shards, index)

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.index, None, self.num_shards)


def batches_of(dataset, **options):
    return StreamBatches(dataset, **{"batch_size": 4, "seed": 3} | options)


def numbers(found):
    return [targets.tolist() for _, targets in found]


def assert_equal(found, expected):
    assert numbers(found) == numbers(expected)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(found, expected, strict=True)), "the noise"


def begun_with(dataset, shards, *, epoch=0, **options):
    """Return batches of a run that began with this number of shards; they are read in this process."""
    reader = batches_of(dataset, **options)
    nothing = {str(i): {"samples": 0, "state": None, "is_ended": False} for i in range(shards)}
    reader.load_state_dict({"epoch": epoch, "batch": 0, "turn": 0, "count": shards, "shards": nothing})
    return reader


@pytest.mark.parametrize("dataset", [Numbers(), SplitsItself()], ids=lambda dataset: type(dataset).__name__)
def test_the_shards_of_all_ranks_and_workers_share_the_samples_of_a_pass(dataset):
    readers = [begun_with(dataset, shards=4, batch_size=8, part=Part(rank=rank, world_size=2)) for rank in range(2)]

    found = [list(reader.epoch(0)) for reader in readers]

    assert numbers(found[0])[:2] == [[0, 4, 8, 12], [2, 6, 10, 14]], "of shard 0 and of shard 2"
    assert sorted(i for part in found for batch in numbers(part) for i in batch) == list(range(22))


def test_workers_read_what_one_process_reads_from_any_position():
    with_workers = batches_of(Numbers(), workers=2)
    expected = list(begun_with(Numbers(), shards=2, epoch=1).epoch(1))

    found = list(itertools.islice(with_workers.epoch(1), 4))
    state = with_workers.state_dict()
    with_workers.close()
    resumed = batches_of(Numbers(), workers=1)
    with pytest.warns(RuntimeWarning, match="Numbers has no state_dict and load_state_dict, so the first 16 samples"):
        resumed.load_state_dict(state)
    found += resumed.epoch(1, 4)

    assert [len(batch) for batch in numbers(expected)] == [4, 4, 4, 4, 3, 3]
    assert_equal(found, expected)


def test_a_dataset_with_a_state_goes_on_without_reading_again():
    expected = list(batches_of(Stateful()).epoch(0))
    begun = batches_of(Stateful())
    found = list(itertools.islice(begun.epoch(0), 3))

    dataset = Stateful()
    resumed = batches_of(dataset)
    resumed.load_state_dict(begun.state_dict())
    found += resumed.epoch(0, 3)

    assert_equal(found, expected)
    assert dataset.reads == 22 - 12


def test_each_pass_has_other_random_numbers_and_leaves_the_global_generators():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    reader = batches_of(Numbers())
    first, second = list(reader.epoch(0)), list(reader.epoch(1))

    assert numbers(first) == numbers(second)
    assert not torch.equal(first[0][0], second[0][0])
    assert torch.equal(torch.rand(3), expected)


def test_batches_ahead_are_read_into_the_next_pass_and_the_position_stays():
    reader = batches_of(Numbers(10))
    all_of_two_passes = [*batches_of(Numbers(10)).epoch(0), *batches_of(Numbers(10)).epoch(1)]
    next(iter(reader.epoch(0)))

    ahead = reader.ahead(1, 3)

    assert_equal([batch for batch, _ in ahead], all_of_two_passes[2:5])
    assert [numbers_B.tolist() for _, numbers_B in ahead] == [[8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert_equal(list(reader.epoch(0, 1)), all_of_two_passes[1:3])


def test_ranks_that_cannot_share_the_shards_split_the_rest_again():
    begun = batches_of(Numbers())
    list(itertools.islice(begun.epoch(0), 3))
    readers = [batches_of(Numbers(), batch_size=8, part=Part(rank=rank, world_size=2)) for rank in range(2)]

    for reader in readers:
        with pytest.warns(RuntimeWarning, match="began with its stream in 1 shards, which 2 ranks cannot share"):
            reader.load_state_dict(begun.state_dict())

    assert [numbers(reader.epoch(0, 3)) for reader in readers] == [[[12, 14, 16, 18], [20]], [[13, 15, 17, 19], [21]]]


def test_a_dataset_that_may_split_itself_must_say_so():
    class Unclear(Numbers):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            yield from range(info.id if info else 0, self.size)

    with pytest.raises(GradwatchError, match=r"Unclear.__iter__ calls get_worker_info, so it may split .* is_sharded"):
        batches_of(Unclear(), workers=2)

    batches_of(Unclear())  # nothing to split
    Unclear.is_sharded = True
    batches_of(Unclear(), workers=2)


class ByWorker(Numbers):
    """Splits its samples by the worker, as the documentation of torch shows."""

    is_sharded = True

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return itertools.islice(super().__iter__(), info.id, None, info.num_workers)


def test_a_dataset_that_splits_itself_by_worker_is_read_by_workers_whatever_the_resumed_run_asks_for():
    begun = batches_of(ByWorker(), workers=2)
    found = list(itertools.islice(begun.epoch(0), 3))
    begun.close()

    resumed = batches_of(ByWorker())
    with pytest.warns(RuntimeWarning, match="read again"):
        resumed.load_state_dict(begun.state_dict())
    found += resumed.epoch(0, 3)

    assert sorted(i for batch in numbers(found) for i in batch) == list(range(22))


def test_errors_of_a_stream_name_the_sample():
    class Broken(Numbers):
        def __iter__(self):
            yield from itertools.islice(super().__iter__(), 5)
            raise RuntimeError("the connection is gone")

    with pytest.raises(RuntimeError, match="the connection is gone") as caught:
        list(batches_of(Broken()).epoch(0))
    assert caught.value.__notes__ == ["while reading sample 5 of the stream (pass 0)"]

    class Ragged(Numbers):
        def __iter__(self):
            return ((torch.zeros(i), i) for i in range(3))

    with pytest.raises(
        GradwatchError, match=r"sample 0 have shape \(0,\), and the inputs of sample 1 have shape \(1,\)"
    ):
        list(batches_of(Ragged()).epoch(0))
