"""What a data factory may return, what is found out about it, and what is refused before a training starts."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gradwatch.data import Splits, check, from_target
from gradwatch.data._memory import InMemory
from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec

CLASSES = DataSpec(input_shape=(3,), outputs=2, kind="classes")


class Listed(Dataset):
    def __init__(self, samples, **attributes):
        self.samples = samples
        vars(self).update(attributes)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def test_splits_are_taken_as_they_are():
    splits = Splits(Listed([(torch.zeros(3), 1)]), None, CLASSES)

    assert from_target(splits) is splits


def test_a_tensor_dataset_becomes_the_quick_one_and_its_labels_are_counted():
    dataset = TensorDataset(torch.rand(10, 3), torch.arange(10) % 4)

    splits = from_target((dataset, None))

    assert isinstance(splits.train, InMemory)
    assert splits.spec == DataSpec(input_shape=(3,), outputs=4, kind="classes")
    assert splits.val is None


@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        (Listed([(torch.rand(2, 5), torch.rand(7))]), DataSpec(input_shape=(2, 5), outputs=7, kind="values")),
        (Listed([(np.zeros(4), 0.5)]), DataSpec(input_shape=(4,), outputs=1, kind="values")),
        (Listed([(torch.rand(4), 1)], classes=["a", "b", "c"]), DataSpec(input_shape=(4,), outputs=3, kind="classes")),
        (Stream([(torch.rand(4), 0.5)]), DataSpec(input_shape=(4,), outputs=1, kind="values")),
        (Listed([(torch.rand(4), 1)], num_classes=9), DataSpec(input_shape=(4,), outputs=9, kind="classes")),
        (Listed([(torch.rand(4), 1)] * 4, targets=[1, 5, 1, 5]), DataSpec(input_shape=(4,), outputs=6, kind="classes")),
        (
            Listed([(torch.zeros(8).long(), torch.zeros(8).long())], vocab_size=99),
            DataSpec(input_shape=(8,), outputs=99, kind="tokens"),
        ),
        (
            TensorDataset(torch.tensor([[5, 1], [2, 3]]), torch.tensor([[1, 2], [3, 0]])),
            DataSpec(input_shape=(2,), outputs=6, kind="tokens"),
        ),
    ],
)
def test_what_a_model_must_know_is_found_out_from_the_first_sample(dataset, spec):
    assert from_target(dataset).spec == spec


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, r"data\.target: got int, expected a map-style dataset .*, or a stream: a subclass of .*IterableDataset"),
        (Stream([(torch.rand(3), 1)]), "cannot tell how many classes Stream has; give it an attribute `classes`"),
        (3, r"data\.target: got int, expected a map-style dataset"),
        (Listed([]), r"data\.target: the training part is empty"),
        (Listed([(torch.rand(3), 1)]), r"cannot tell how many classes Listed has; .*return gradwatch\.data\.Splits"),
        (Listed([({"ids": 1}, 1)]), r"cannot tell what a dict in a sample means; return gradwatch\.data\.Splits"),
        (Listed([(torch.rand(3), torch.zeros(2, 2).long())]), r"cannot tell what targets of shape \(2, 2\)"),
        (Listed([torch.rand(3)]), r"a sample is a Tensor, expected a pair \(inputs, targets\)"),
        (Listed([(1, 2, 3)]), r"a sample is a tuple of 3, expected a pair"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_the_way_out(result, message):
    with pytest.raises(GradwatchError, match=message):
        from_target(result)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Listed([]), "data: mine, {} part: is empty, expected at least one sample"),
        (3, r"data: mine, {} part: got int, expected a map-style dataset"),
        (Stream([]), "data: mine, {} part: is empty, expected a stream that yields at least one sample"),
        (Listed([torch.rand(3)]), r"data: mine, {} part: a sample is a Tensor, expected a pair"),
        (Listed([(torch.rand(4), 0)]), r"data: mine, {} part: .* have shape \(4,\), expected \(3,\)"),
        (
            InMemory(torch.rand(3, 3), torch.tensor([1, 2, 1])),
            "data: mine, {} part: the labels run from 1 to 2, expected 0 to 1",
        ),
    ],
)
@pytest.mark.parametrize("name", ["training", "validation"])
def test_check_names_the_part_that_cannot_be_used(part, message, name):
    good = Listed([(torch.rand(3), 0)])
    splits = Splits(part, good, CLASSES) if name == "training" else Splits(good, part, CLASSES)

    with pytest.raises(GradwatchError, match=message.format(name)):
        check(splits, "mine")


def test_pictures_that_are_no_tensors_are_refused_with_the_transforms_that_make_them_some():
    image = pytest.importorskip("PIL.Image").new("L", (3, 3))

    with pytest.raises(GradwatchError, match=r"are a PIL image, expected a tensor; .*ToImage\(\)"):
        check(Splits(Listed([(image, 0)]), None, CLASSES), "mine")


def test_looking_at_a_sample_leaves_the_random_generators_alone():
    class Noisy(Listed):
        def __getitem__(self, index):
            random.random()
            np.random.rand()
            return torch.rand(3), 0

    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    check(Splits(Noisy([0]), None, CLASSES), "mine")

    assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == before
