"""Batches of the same samples are told, in another order or with noise; other batches of the same data are not."""

import functools
import weakref

import numpy as np
import pytest
import torch

from gradwatch.probe.batches.origin import MADE_AGAIN, UnreadBatch
from gradwatch.probe.batches.repeated_samples import INSPECTED_STEPS, MAX_SAMPLES, SURE_STEP, RepeatedSamples


def events_of(batch_at, steps=40):
    """Return what is said of the samples of a run."""
    torch.manual_seed(0)
    samples = RepeatedSamples()
    events = [event for step in range(steps) for event in samples.inspect(batch_at(step), step=step)]
    return [event for event in events if event.kind == "batch-alike"]


def looked(batch_at, steps=40):
    """Return when it is said, and of how many samples."""
    return [(event.step, event.values["samples"]) for event in events_of(batch_at, steps)]


X = torch.randn(500, 1, 6, 6, generator=torch.Generator().manual_seed(1))
SAME = X[:32]
WORDS = torch.randint(0, 200, (32, 24), generator=torch.Generator().manual_seed(1))


def replayed(step, *, features=36):
    """Return a batch of a replay buffer that begins with one batch and gains a sample of a walk at each step."""
    walk = torch.randn(500, features, generator=torch.Generator().manual_seed(2)).cumsum(0)
    return walk[torch.randperm(33 + step)[:32]]


def masked(words):
    """Return words of which a seventh is masked."""
    return torch.where(torch.rand(words.shape) < 1 / 7, 200, words)


@pytest.mark.parametrize(
    "batch_at",
    [
        pytest.param(lambda _: SAME, id="as they are"),
        pytest.param(lambda _: SAME[torch.randperm(32)], id="in another order"),
        pytest.param(lambda _: SAME + 0.05 * torch.randn_like(SAME), id="with noise"),
        pytest.param(lambda _: {"image": SAME[torch.randperm(32)], "label": torch.arange(32)}, id="in a dict"),
        pytest.param(lambda _: torch.arange(96).view(32, 3)[torch.randperm(32)], id="as token ids"),
        pytest.param(lambda _: masked(WORDS), id="as sentences that are masked anew"),
        pytest.param(lambda _: (torch.arange(32) // 2)[torch.randperm(32)], id="as words, some of them twice"),
        pytest.param(lambda _: [SAME + 0.05 * torch.randn_like(SAME) for _ in range(2)], id="two views, with noise"),
        pytest.param(lambda _: SAME[torch.randint(0, 4, (32,))], id="drawn from four of them"),
        pytest.param(lambda _: SAME.flip(-1) if torch.rand(()) < 0.5 else SAME.roll(2, -2), id="flipped and rolled"),
    ],
)
def test_the_same_samples_are_reported_at_the_last_look(batch_at):
    assert looked(batch_at) == [(INSPECTED_STEPS[-1], 32.0)]


def test_graphs_that_are_joined_into_one_count_as_samples_and_not_their_nodes():
    batch = {"nodes": SAME, "graph": torch.arange(8).repeat_interleave(4), "offsets": torch.arange(0, 36, 4)}

    assert looked(lambda _: batch) == [(INSPECTED_STEPS[-1], 8.0)]
    assert looked(lambda _: {"nodes": SAME, "labels": torch.arange(32)}) == [(INSPECTED_STEPS[-1], 32.0)]


@pytest.mark.parametrize("samples", [2, 32])
def test_equal_samples_that_are_made_anew_are_reported_sooner(samples):
    assert looked(lambda _: SAME[:samples].clone()) == [(SURE_STEP, float(samples))]


@pytest.mark.parametrize(
    ("batch_at", "is_equal"),
    [
        (lambda step: torch.zeros(32, 8), 1),
        (lambda step: (torch.full((32, 8), 0.5), torch.arange(32) % 4), 1),
        (lambda step: torch.ones(32, 9, dtype=torch.long), 1),
        (lambda step: torch.eye(32, 8), 0),
        (lambda step: (torch.ones(32, 8), torch.arange(60).reshape(2, 30)), 0),
    ],
    ids=["zeros", "with labels", "one token", "samples that differ", "nodes and edges"],
)
def test_samples_that_are_all_the_same_are_marked(batch_at, is_equal):
    (event,) = events_of(batch_at)
    assert event.values["equal"] == is_equal


def kinds_of(batch_at, steps=3):
    """Return what is said of a batch that comes again: the loop calls a function for it at each step."""
    samples = RepeatedSamples()
    events = [event for step in range(steps) for event in samples.inspect(batch_at(), step=step)]
    return [f"{event.kind}, made again" if MADE_AGAIN in event.text else event.kind for event in events]


def test_one_tensor_that_is_handed_over_again_is_reported():
    waves, whole = torch.complex(X, X), X.clone()
    for batch in (X, whole, waves, X[:300]):
        assert kinds_of(lambda batch=batch: batch) == ["tensor-held"]


def test_a_slice_that_does_not_advance_is_a_part_of_its_tensor():
    data = X.clone()

    assert kinds_of(lambda: data[:32]) == ["batch-part"]
    assert kinds_of(lambda: data[:300]) == ["tensor-held"], "most of the data"


def test_samples_of_a_larger_tensor_are_a_part_of_it():
    data, ids = X.clone(), torch.arange(4000) * 7919 % 4001
    offsets = torch.tensor([5, 80, 1000, 3800])

    assert kinds_of(lambda: data[torch.arange(0, 74, 2)]) == ["batch-part"]
    assert kinds_of(lambda: torch.stack([ids[i : i + 32] for i in offsets])) == ["batch-part"], "windows of a text"
    assert kinds_of(lambda: data[:37] + 1) == ["batch-part, made again"], "other numbers"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_a_larger_array_are_a_part_of_it(dtype):
    table = np.random.default_rng(0).random((200, 5)).astype(dtype)

    assert kinds_of(lambda: torch.tensor(table[:37], dtype=torch.float32)) == ["batch-part"]
    assert kinds_of(lambda: torch.tensor(table[:150], dtype=torch.float32)) == ["batch-part, made again"], "most of it"


@pytest.mark.parametrize("keep", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
def test_a_table_that_is_converted_at_each_step_is_all_the_data(keep):
    table = keep(range(40))

    assert kinds_of(lambda: torch.tensor([[float(row), 1.0] for row in table])) == []


def test_a_table_that_an_object_keeps_is_all_the_data():
    class Trainer:
        def __init__(self):
            self.table = [[float(row), 1.0] for row in range(40)]

        def kinds(self):
            return kinds_of(lambda: torch.tensor(self.table))

    assert Trainer().kinds() == []


def test_what_is_made_again_of_nothing_is_told_but_not_the_points_of_a_grid():
    assert kinds_of(lambda: torch.rand(40, 6, generator=torch.Generator().manual_seed(0))) == ["batch-part, made again"]
    assert kinds_of(lambda: torch.linspace(0, 1, 120).view(40, 3)) == []


def test_of_a_batch_that_cannot_be_read_a_loader_and_the_tensor_are_known():
    def kinds(batch_at):
        unread = UnreadBatch()
        return [event.kind for step in range(3) for event in unread.inspect(batch_at(), step=step)]

    numbers = torch.rand(40)
    loader = torch.utils.data.DataLoader(torch.arange(48), batch_size=12)
    assert kinds(lambda: numbers) == ["tensor-held"]
    assert kinds(lambda: numbers + 1) == []
    assert kinds(lambda: next(iter(loader))) == ["batch-part"]
    assert kinds(lambda: None) == []


class Counting(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(48))


def test_the_workers_of_a_loader_are_known_if_a_batch_comes_again():
    loader = torch.utils.data.DataLoader(Counting(), batch_size=12, num_workers=2)
    assert kinds_of(lambda: torch.arange(24).view(12, 2)) == ["batch-workers", "batch-part, made again"]
    assert kinds_of(lambda: torch.arange(22).view(11, 2)) == ["batch-part, made again"]
    del loader


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_that_is_all_the_data_of_a_loader_is_told(shuffle):
    def kinds(loader):
        samples = RepeatedSamples()
        return [event.kind for step in range(3) for (x,) in loader for event in samples.inspect(x, step=step)]

    data = torch.utils.data.TensorDataset(SAME)
    assert kinds(torch.utils.data.DataLoader(data, batch_size=64, shuffle=shuffle)) == []


def test_a_loader_of_several_batches_has_more_data_than_one():
    rows = X.clone()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=40)
    first = next(iter(loader))[0]

    assert kinds_of(lambda: next(iter(loader))[0]) == ["batch-part"]
    assert kinds_of(lambda: first) == ["batch-part", "tensor-held"], "drawn before the loop"
    stream = torch.utils.data.DataLoader(Stream(rows[:37]), batch_size=None)
    assert kinds_of(lambda: next(iter(stream))[0]) == ["batch-part"], "a stream has no length, but its tensor is there"


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield (self.rows.clone(),)


def test_nothing_of_a_batch_is_kept_alive():
    samples, batch = RepeatedSamples(), SAME.clone()
    assert list(samples.inspect(batch, step=0)) == []
    gone = weakref.ref(batch)
    del batch
    assert gone() is None


@pytest.mark.parametrize(
    "batch_at",
    [
        pytest.param(lambda _: X[torch.randint(0, 500, (32,))], id="drawn"),
        pytest.param(lambda step: X[32 * (step % 10) :][:32], id="an epoch of ten in order"),
        pytest.param(lambda step: X[32 * (step % 2) :][:32], id="two in turn, which hashes tell"),
        pytest.param(lambda _: (torch.arange(64.0)[:, None] + torch.rand(64, 1)) / 64, id="points on a shaken grid"),
        pytest.param(lambda _: torch.randint(0, 2, (64, 2)).float(), id="few distinct samples"),
        pytest.param(lambda _: (SAME[:, 0].clone(), X[torch.randint(0, 500, (16,))]), id="data on one graph"),
        pytest.param(lambda _: torch.eye(8)[torch.randint(0, 8, (32,))], id="states of a game"),
        pytest.param(lambda step: SAME if step < 20 else X[32:64], id="data that come late"),
        pytest.param(lambda _: X[: MAX_SAMPLES + 1], id="what may be all the data"),
        pytest.param(lambda _: torch.ones(32), id="plain numbers"),
        pytest.param(lambda _: (torch.linspace(0, 1, 64)[:, None], torch.rand(64, 1)), id="values on one grid"),
        pytest.param(lambda _: torch.stack([torch.randperm(8) for _ in range(64)]).float(), id="orders of numbers"),
        pytest.param(replayed, id="a replay buffer that fills"),
        pytest.param(functools.partial(replayed, features=3), id="a replay buffer of few features"),
        pytest.param(lambda _: None, id="none"),
        pytest.param(lambda _: torch.randperm(1500)[:64], id="numbers of samples"),
        pytest.param(lambda step: masked((WORDS + step) % 200), id="other sentences, masked"),
        pytest.param(lambda _: torch.stack([torch.randperm(8)])[0], id="one sentence in another order"),
        pytest.param(lambda _: masked(torch.randint(0, 3, (32, 24))), id="sentences in three letters, masked"),
    ],
)
def test_other_samples_of_the_same_kind_are_not(batch_at):
    assert looked(batch_at) == []


def test_a_run_that_goes_on_is_not_compared_with_a_batch_that_nobody_saw():
    samples = RepeatedSamples()
    assert [*samples.inspect(SAME, step=20), *samples.inspect(SAME, step=30)] == []
