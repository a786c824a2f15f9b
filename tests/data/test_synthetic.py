"""Made-up data: the same everywhere, learnable, with the asked-for noise."""

import pytest
import torch

from gradwatch.data import check, synthetic
from gradwatch.errors import GradwatchError


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_the_same_arguments_give_the_same_samples(kind):
    first, second = synthetic.build(kind=kind, seed=5), synthetic.build(kind=kind, seed=5)
    other = synthetic.build(kind=kind, seed=6)

    check(first, "synthetic")
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert torch.equal(first.val.targets, second.val.targets)
    assert not torch.equal(first.train.inputs, other.train.inputs)


def test_global_generators_are_left_alone():
    before = torch.get_rng_state()
    synthetic.build()

    assert torch.equal(torch.get_rng_state(), before)


def test_classes_lie_around_their_centres():
    splits = synthetic.build(samples=4000, outputs=3, dims=8, noise=0.5, val_fraction=0.0)
    x, y = splits.train.inputs, splits.train.targets

    assert y.bincount().max() - y.bincount().min() <= 1, "classes in equal numbers"
    for label in range(3):
        cloud = x[y == label]
        assert cloud.mean(0).norm().item() == pytest.approx(3.0, abs=0.1)
        assert (cloud - cloud.mean(0)).std().item() == pytest.approx(0.5, rel=0.05)


def test_values_are_a_function_of_the_inputs_plus_the_noise():
    exact = synthetic.build(kind="values", outputs=2, noise=0.0, samples=3000, val_fraction=0.0).train
    noisy = synthetic.build(kind="values", outputs=2, noise=0.3, samples=3000, val_fraction=0.0).train

    assert torch.equal(exact.inputs, noisy.inputs)
    assert (noisy.targets - exact.targets).std().item() == pytest.approx(0.3, rel=0.05)
    assert 0.5 < exact.targets.std().item() < 1.5


@pytest.mark.parametrize("key", ["samples", "dims", "outputs"])
def test_impossible_sizes_are_refused_by_name(key):
    with pytest.raises(GradwatchError, match=rf"data\.{key}: got 0, expected at least 1"):
        synthetic.build(**{key: 0})
