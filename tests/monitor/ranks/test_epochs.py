"""A sampler that gives two epochs the same order is noticed, and every other use of a sampler is left alone."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from gradwatch.attempts import Attempts
from gradwatch.monitor.ranks.epochs import PASS_LISTENERS, EpochWatch

DATA = TensorDataset(torch.arange(40))
STEPS = 5  # 20 samples of a rank, in batches of 4


class OwnSampler(Sampler):
    """A sampler with a method of its own for the epoch, as libraries have."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch))[::2].tolist())

    def __len__(self):
        return 20


@pytest.fixture
def watched():
    model, events = nn.Linear(1, 1), []
    watch = EpochWatch(model, events.append, Attempts())
    watch.attach(0)
    yield model, watch, events
    watch.remove()


def train(watch, batches):
    for _ in batches:
        watch.step += 1


def sampler(**options):
    return DistributedSampler(DATA, num_replicas=2, rank=0, **options)


@pytest.mark.parametrize("make", [sampler, lambda: OwnSampler()], ids=["torch", "own"])
def test_the_second_epoch_of_equal_order_is_noticed_at_its_first_step(watched, make):
    _, watch, events = watched
    loader = DataLoader(DATA, batch_size=4, sampler=make())

    for _ in range(3):
        train(watch, loader)

    assert [(event.kind, event.step, event.values) for event in events] == [
        ("rank-order-repeated", STEPS, {"epoch": 0, "steps": STEPS})
    ]


def test_a_sampler_that_is_iterated_without_a_loader_is_noticed_as_well(watched):
    _, watch, events = watched
    batches = BatchSampler(sampler(), 4, drop_last=False)

    for _ in range(2):
        train(watch, batches)
    watch.remove()

    assert [event.step for event in events] == [STEPS]


def test_a_sampler_that_is_made_for_each_epoch_is_noticed_as_well(watched):
    _, watch, events = watched

    for _ in range(2):
        train(watch, DataLoader(DATA, batch_size=4, sampler=sampler()))
    watch.remove()

    assert [event.step for event in events] == [STEPS]


def set_epochs(model, watch):
    used = sampler()
    for epoch in range(3):
        used.set_epoch(epoch)
        train(watch, DataLoader(DATA, batch_size=4, sampler=used))


def without_shuffling(model, watch):
    for _ in range(3):
        train(watch, DataLoader(DATA, batch_size=4, sampler=sampler(shuffle=False)))


def evaluation_on_the_training_data(model, watch):
    used = sampler()
    loader = DataLoader(DATA, batch_size=4, sampler=used)
    for epoch in range(3):
        used.set_epoch(epoch)
        train(watch, loader)
        for _ in loader:
            pass


def evaluation_within_an_epoch(model, watch):
    loader = DataLoader(DATA, batch_size=4, sampler=sampler())
    batches = iter(loader)
    train(watch, [next(batches), next(batches)])
    model.eval()
    for _ in loader:
        pass
    model.train()
    train(watch, [next(batches), next(batches)])


def short_first_pass(model, watch):
    used = sampler()
    loader = DataLoader(DATA, batch_size=4, sampler=used)
    next(iter(loader))
    train(watch, list(loader)[:2])  # as in a search for a learning rate
    for epoch in range(2):
        used.set_epoch(epoch)
        train(watch, loader)


def own_seed_for_each_phase(model, watch):
    for seed in range(3):
        train(watch, DataLoader(DATA, batch_size=4, sampler=sampler(seed=seed)))


def own_data_for_each_phase(model, watch):
    for _ in range(3):
        data = TensorDataset(torch.rand(40))
        train(watch, DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=0)))


@pytest.mark.parametrize(
    "loop",
    [
        set_epochs,
        without_shuffling,
        evaluation_on_the_training_data,
        evaluation_within_an_epoch,
        short_first_pass,
        own_seed_for_each_phase,
        own_data_for_each_phase,
    ],
    ids=lambda loop: loop.__name__,
)
def test_other_passes_over_a_sampler_are_no_repetition(watched, loop):
    model, watch, events = watched

    loop(model, watch)
    watch.remove()

    assert events == []


def test_the_classes_of_torch_are_as_before_after_the_last_watch():
    for listeners in PASS_LISTENERS:  # the watch of another test may live on
        for watch in [*listeners]:
            listeners.remove(watch)
    before = DataLoader.__iter__, DistributedSampler.__iter__
    watches = [EpochWatch(nn.Linear(1, 1), print, Attempts()) for _ in range(2)]
    for watch in watches:
        watch.attach(0)
    assert DataLoader.__iter__ is not before[0]

    for watch in watches:
        watch.remove()

    assert (DataLoader.__iter__, DistributedSampler.__iter__) == before
