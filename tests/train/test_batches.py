"""Batches: an order that follows from (seed, epoch), the same from the middle and with workers, at little cost."""

import os
import pickle
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from gradwatch.data import Splits, digits, text
from gradwatch.data._memory import InMemory
from gradwatch.data._transforms import apply
from gradwatch.errors import GradwatchError
from gradwatch.train.batches import Batches

AUGMENT = [{"RandomCrop": {"size": 8, "padding": 1}}, {"RandomRotation": {"degrees": 20}}]


class Numbers(Dataset):
    """Sample i is i, with noise from all three global generators."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return noise, index


@pytest.fixture
def counted():
    return InMemory(torch.arange(10.0).unsqueeze(1), torch.arange(10))


@pytest.fixture(scope="module")
def augmented():
    splits = digits.build()
    few = InMemory(splits.train.inputs[:40], splits.train.targets[:40])
    return apply(Splits(few, None, splits.spec), augment=AUGMENT).train


def order(batches, epoch, start=0):
    return [targets.tolist() for _, targets in batches.epoch(epoch, start)]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for number, ((x, y), (x_expected, y_expected)) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(x, x_expected), f"inputs of batch {number}"
        assert torch.equal(y, y_expected), f"targets of batch {number}"


def test_an_epoch_visits_every_sample_once(counted):
    batches = Batches(counted, batch_size=3, shuffle=True)

    found = order(batches, 0)

    assert [len(batch) for batch in found] == [3, 3, 3, 1]
    assert len(batches) == 4
    assert sorted(i for batch in found for i in batch) == list(range(10))


def test_drop_last_leaves_out_the_short_batch(counted):
    batches = Batches(counted, batch_size=3, shuffle=True, drop_last=True)

    assert [len(batch) for batch in order(batches, 0)] == [3, 3, 3]
    assert len(batches) == 3


def test_without_shuffle_the_samples_keep_their_order(counted):
    assert order(Batches(counted, batch_size=4), 7) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_order_follows_from_seed_and_epoch_alone(counted):
    used = Batches(counted, batch_size=3, seed=1, shuffle=True)
    orders = [order(used, epoch) for epoch in range(5)]
    fresh = Batches(counted, batch_size=3, seed=1, shuffle=True)

    assert order(fresh, 3) == orders[3], "whatever was read before"
    assert len({str(o) for o in orders}) == 5, "each epoch has its own"
    assert order(Batches(counted, batch_size=3, seed=2, shuffle=True), 0) != orders[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_be_entered_anywhere(augmented, workers):
    whole = list(Batches(augmented, batch_size=16, seed=3, shuffle=True).epoch(1))
    batches = Batches(augmented, batch_size=16, seed=3, shuffle=True, workers=workers)

    for start in (1, 2, 3):
        assert_equal(list(batches.epoch(1, start)), whole[start:])
    batches.close()


def test_workers_and_random_transforms_change_nothing(augmented):
    alone = Batches(augmented, batch_size=16, seed=3, shuffle=True)
    together = Batches(augmented, batch_size=16, seed=3, shuffle=True, workers=2)

    for epoch in (0, 1):
        assert_equal(list(together.epoch(epoch)), list(alone.epoch(epoch)))
    together.close()


def test_workers_stay_for_the_next_epoch_also_after_one_that_was_left(augmented):
    batches = Batches(augmented, batch_size=8, seed=0, shuffle=True, workers=2)
    first = batches.epoch(0)
    next(first)
    pids = [worker.pid for worker in batches._loader._iterator._workers]

    found = list(batches.epoch(1))

    assert [worker.pid for worker in batches._loader._iterator._workers] == pids, "no new processes"
    assert_equal(found, list(Batches(augmented, batch_size=8, seed=0, shuffle=True).epoch(1)))
    batches.close()


def test_workers_leave_ctrl_c_to_the_main_process(augmented):
    batches = Batches(augmented, batch_size=8, seed=0, workers=1)
    epoch = batches.epoch(0)
    found = [next(epoch)]
    (worker,) = batches._loader._iterator._workers

    os.kill(worker.pid, signal.SIGINT)
    found += epoch

    assert worker.is_alive()
    assert_equal(found, list(Batches(augmented, batch_size=8, seed=0).epoch(0)))
    batches.close()


def test_what_a_worker_gets_can_be_pickled(augmented):
    """Where processes are not forked (macOS, Windows, Python 3.14) a worker gets its dataset so."""
    reader = Batches(augmented, batch_size=8, seed=4)._reader

    inputs, _ = pickle.loads(pickle.dumps(reader))[1, np.arange(5)]

    assert torch.equal(inputs, reader[1, np.arange(5)][0])


def test_close_ends_the_workers(augmented):
    batches = Batches(augmented, batch_size=8, workers=1)
    list(batches.epoch(0))
    (worker,) = batches._loader._iterator._workers

    batches.close()

    worker.join(timeout=10)
    assert not worker.is_alive()


def test_augmentation_of_a_sample_follows_from_its_epoch_and_index(augmented):
    small = dict(zip(*[iter_samples(augmented, batch_size=3, epoch=2)[i] for i in (1, 0)], strict=True))
    large = dict(zip(*[iter_samples(augmented, batch_size=40, epoch=2)[i] for i in (1, 0)], strict=True))
    later = dict(zip(*[iter_samples(augmented, batch_size=40, epoch=3)[i] for i in (1, 0)], strict=True))

    assert small == large, "whatever batch it is in"
    assert all(small[i] != later[i] for i in small), "and another in another epoch"


def iter_samples(dataset, *, batch_size, epoch):
    """Return the bytes of the inputs and the index of each sample, wherever the shuffle puts it."""
    marked = InMemoryIndex(dataset)
    inputs, indices = zip(*Batches(marked, batch_size=batch_size, seed=5, shuffle=True).epoch(epoch), strict=True)
    return [x.numpy().tobytes() for x in torch.cat(inputs)], torch.cat(indices).tolist()


class InMemoryIndex(Dataset):
    """A dataset with each sample's index as its target."""

    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        return self.base[index][0], index


@pytest.mark.parametrize("workers", [0, 1])
def test_noise_of_any_global_generator_is_a_function_of_the_sample(workers):
    batches = Batches(Numbers(6), batch_size=4, seed=9, workers=workers)

    found, again = list(batches.epoch(0)), list(Batches(Numbers(6), batch_size=2, seed=9).epoch(0))
    batches.close()

    noise = torch.cat([x for x, _ in found])
    assert torch.equal(noise, torch.cat([x for x, _ in again]))
    assert len(noise.unique()) == 18, "each sample and generator has its own"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["memory", "augmented", "numbers"])
def test_global_generators_are_left_alone(counted, augmented, kind, workers):
    dataset = {"memory": counted, "augmented": augmented, "numbers": Numbers(10)}[kind]

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    batches = Batches(dataset, batch_size=4, shuffle=True, workers=workers)
    for _ in batches.epoch(0):
        assert states() == before, "also between batches"
    batches.close()

    assert states() == before


def test_windows_of_text_are_read_by_the_batch():
    splits = text.build(context=32)

    inputs, targets = next(Batches(splits.train, batch_size=8, shuffle=True).epoch(0))

    assert inputs.shape == targets.shape == (8, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_larger_than_the_data_is_refused_where_it_would_be_dropped(counted):
    with pytest.raises(
        GradwatchError, match=r"data\.batch_size: got 11 for 10 samples, .*at most 10, or drop_last: false"
    ):
        Batches(counted, batch_size=11, drop_last=True)

    assert order(Batches(counted, batch_size=11), 0) == [list(range(10))]


def test_a_batch_without_samples_is_refused(counted):
    with pytest.raises(GradwatchError, match=r"data\.batch_size: got 0, expected at least 1"):
        Batches(counted, batch_size=0)


class Ragged(Dataset):
    is_random = False

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.zeros(3, 4 + index // 5), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_unequal_shape_are_named_with_the_way_out(workers):
    batches = Batches(Ragged(), batch_size=3, workers=workers)

    with pytest.raises(
        GradwatchError,
        match=r"^data: .*sample 3 have shape \(3, 4\), and the inputs of sample 5 have shape \(3, 5\).*Resize",
    ):
        list(batches.epoch(0))
    batches.close()


def test_samples_that_no_batch_can_hold_are_named():
    class Strange(Ragged):
        def __getitem__(self, index):
            return object(), 0

    with pytest.raises(GradwatchError, match=r"samples cannot be stacked into a batch: .*object"):
        list(Batches(Strange(), batch_size=2).epoch(0))


def test_an_error_in_a_sample_says_which_one():
    class Broken(Ragged):
        def __getitem__(self, index):
            if index == 4:
                raise OSError("truncated file")
            return torch.zeros(3), 0

    with pytest.raises(OSError, match="truncated file") as caught:
        list(Batches(Broken(), batch_size=2).epoch(0))

    assert "while reading sample 4 of the data (epoch 0)" in caught.value.__notes__
