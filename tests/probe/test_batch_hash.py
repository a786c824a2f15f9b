"""Equal batches have equal hashes, others have not."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.probe import kernel as kernels
from gradwatch.probe.batch_hash import hash_batch

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    inputs: torch.Tensor
    lengths: list[int]


@pytest.mark.skipif(kernels.choose() is None, reason="the extension is not built")
@settings(max_examples=100, deadline=None)
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


@pytest.mark.skipif(kernels.choose() is None, reason="no extension is built")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])))
)
def test_the_hash_of_plain_tensors_is_that_of_those_who_look_closely(shapes):
    parts = [torch.arange(3 * n).reshape(n, 3).to(dtype) for n, dtype in shapes]

    for batch in (parts, tuple(parts), *parts):
        assert kernels.choose().batch_hash(batch) == hash_batch(batch, kernel="torch")


@pytest.mark.skipif(kernels.choose() is None, reason="no extension is built")
def test_batches_that_are_not_plain_are_left_to_those_who_look_closely():
    plain = torch.ones(4)

    for batch in ({"x": plain}, [[plain]], [plain.numpy()], torch.ones(4, 4).t(), plain.to_sparse(), "x"):
        assert kernels.choose().batch_hash(batch) is None
