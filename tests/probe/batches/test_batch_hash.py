"""Equal batches have equal hashes, others have not."""

import warnings
from collections import namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.probe.batches.batch_hash import hash_batch, tensors
from gradwatch.probe.device import backend as kernels

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    inputs: torch.Tensor
    lengths: list[int]


@dataclass(slots=True)
class Sample:
    inputs: torch.Tensor
    label: int = field(init=False)


@dataclass(slots=True)
class WeightedSample(Sample):
    weight: float = 1.0


@pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(0, 70) | st.just(5000),
    dtype=st.sampled_from([torch.uint8, torch.bool, torch.int16, torch.int64, torch.float32, torch.bfloat16]),
)
def test_both_kernels_give_the_same_hash(seed, length, dtype):
    batch = torch.randint(0, 200, (length,), generator=torch.Generator().manual_seed(seed)).to(dtype)

    assert hash_batch(batch, kernel="native") == hash_batch(batch, kernel="torch"), "one hash, however computed"


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_a_hash_fits_a_float64_exactly(kernel):
    hashes = [hash_batch(torch.full((4,), float(i)), kernel=kernel) for i in range(100)]

    assert all(0 <= h < 2**48 for h in hashes), "48 bits"
    assert len(set(hashes)) == 100, "unequal batches have unequal hashes"


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_any_change_changes_the_hash(kernel):
    batch = torch.zeros(32, 784)
    seen = {hash_batch(batch, kernel=kernel)}
    changes = 0
    for row in range(0, 32, 4):
        for column in (0, 1, 500, 783):
            changed = batch.clone()
            changed[row, column] = 1.0
            seen.add(hash_batch(changed, kernel=kernel))
            changes += 1

    assert len(seen) == 1 + changes, "the place of a value counts"


def test_order_and_length_count():
    a, b = torch.arange(6.0), torch.arange(6.0, 12.0)

    batches = [[a, b], [b, a], [a], [a, a], [torch.cat([a, b])], [a, torch.cat([b, torch.zeros(1)])]]

    assert len({hash_batch(batch) for batch in batches}) == len(batches), "six batches, six hashes"


def test_memory_layout_does_not_count():
    images = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))

    assert hash_batch(images) == hash_batch(images.to(memory_format=torch.channels_last)), "the same values"
    assert hash_batch(images[:, 1:]) == hash_batch(images[:, 1:].clone()), "a view is what it shows"
    assert hash_batch(torch.arange(9, dtype=torch.uint8)[1:]) == hash_batch(torch.arange(1, 9, dtype=torch.uint8))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x, x],
        lambda x: (x, "text", 3, None),
        lambda x: {"x": x, "mask": x > 0},
        lambda x: Pair(x, 2 * x),
        lambda x: Batch(x, [1, 2]),
        lambda x: {"nested": [{"deep": (x,)}]},
        lambda x: np.asarray(x),
        lambda x: Sample(x),
        lambda x: [WeightedSample(x)],
    ],
)
def test_nested_batches_are_looked_into(wrap):
    x = torch.linspace(-1, 1, 50)

    assert hash_batch(wrap(x)) == hash_batch(wrap(x.clone())), "equal data"
    assert hash_batch(wrap(x)) != hash_batch(wrap(x + 1e-6)), "other data"


def test_objects_that_refer_to_themselves_have_a_hash():
    batch = Batch(torch.ones(3), [3])
    batch.parent = batch

    assert hash_batch(batch) == hash_batch(batch), "no end to follow, and none needed"


def test_the_state_of_a_trainer_is_read_in_a_moment():
    # each of many callbacks refers to the state, which holds the model, a module and all callbacks
    state = {"x": torch.ones(3), "model": torch.nn.Linear(3, 3), "library": torch}
    state["callbacks"] = [Batch(torch.ones(3), [3]) for _ in range(30)]
    for callback in state["callbacks"]:
        callback.state = state

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a deprecated name of a module warns if it is read
        assert sum(1 for _ in tensors((state["x"], state))) < 1000
        before = hash_batch((state["x"], state))
    state["x"] += 1

    assert hash_batch((state["x"], state)) != before


IMAGES = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(8 * 129).reshape(8, 129)
PLAIN = {
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "channels of images": IMAGES[:, 1:],
    "columns": IMAGES[..., 1:],
    "rows in turn": IMAGES[:, :, ::2],
    "samples in another order": IMAGES.transpose(0, 1),
    "one sample many times": IMAGES.expand(3, 2, 3, 4, 5),
    "tokens without the last": TOKENS[:, :-1],
    "rows longer than what is read at once": torch.randn(3, 1200)[:, 1:],
    "permuted, longer than that": torch.randn(2, 600, 3).double().transpose(1, 2),
    "of two bytes": torch.randn(5, 7).bfloat16()[:, 1:4],
    "of a byte": (IMAGES > 0)[:, :, :, 1:4],
    "empty": torch.zeros(0, 3)[:, :1],
    "a number": torch.tensor(3.0),
    "by name": {"input_ids": TOKENS[:, 1:], "mask": [IMAGES > 0, (1, None, True, 2.5, -0.0, "tex't\n\u00e4\ud800")]},
    "nothing": [[], {}, ()],
}


@pytest.mark.skipif(kernels.select_backend() is None, reason="no extension is built")
@pytest.mark.parametrize("batch", PLAIN.values(), ids=PLAIN)
def test_views_and_nests_need_no_closer_look(batch):
    assert kernels.select_backend().batch_hash(batch) == hash_batch(batch, kernel="torch")


COMPLEX = torch.randn(4, 6, dtype=torch.complex64)
CLOSER = {
    "every other column": IMAGES[..., ::2],
    "one of a row": torch.arange(4.0).reshape(2, 2)[:1, ::2],
    "sparse": torch.eye(4).to_sparse(),
    "an array": [np.ones(4)],
    "a named tuple": Pair(IMAGES, IMAGES),
    "bytes": b"x",
    "long text": "x" * 1000,
    "conjugate": COMPLEX.conj(),
    "conjugate columns": COMPLEX.conj()[:, :1],
    "negated": COMPLEX.conj().imag,
    "negated column": COMPLEX.conj().imag[:, :1],
    "negated number": COMPLEX[:1, :1].conj().imag,
    "larger than what is read under the lock": torch.zeros((1 << 20) + 1),
}


@pytest.mark.skipif(kernels.select_backend() is None, reason="no extension is built")
@pytest.mark.parametrize("batch", CLOSER.values(), ids=CLOSER)
def test_batches_that_are_not_plain_are_left_to_those_who_look_closely(batch):
    assert kernels.select_backend().batch_hash(batch) is None
    assert hash_batch(batch) == hash_batch(batch, kernel="torch")


@pytest.mark.skipif(kernels.select_backend() is None, reason="no extension is built")
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])))
)
def test_the_hash_of_plain_tensors_is_that_of_those_who_look_closely(shapes):
    parts = [torch.arange(3 * n).reshape(n, 3).to(dtype) for n, dtype in shapes]

    for batch in (parts, tuple(parts), *parts):
        assert kernels.select_backend().batch_hash(batch) == hash_batch(batch, kernel="torch")


@pytest.mark.skipif(kernels.select_backend() is None, reason="no extension is built")
@settings(max_examples=200)
@given(data=st.data(), dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64]))
def test_the_hash_of_a_view_is_that_of_what_it_shows(data, dtype):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    view = torch.arange(torch.tensor(shape).prod()).reshape(shape).to(dtype).permute(order)
    for d, length in enumerate(view.shape):
        view = view.narrow(d, first := data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, length - first)))

    known = kernels.select_backend().batch_hash(view)

    assert known in (None, hash_batch(view.clone(memory_format=torch.contiguous_format)))
    assert known is not None or view.stride(-1) != 1, "rows that are one piece take no closer look"
