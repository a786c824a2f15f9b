"""Datasets of torchvision on small files in their real formats: pixels, labels, parts, and what is missing."""

import numpy as np
import pytest
import torch
from PIL import Image
from real_formats import write_cifar, write_folder, write_mnist
from torchvision import datasets
from torchvision.transforms import v2

from gradwatch.data import _torchvision, check
from gradwatch.data._memory import InMemory
from gradwatch.data._torchvision import Images
from gradwatch.errors import GradwatchError


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST", "KMNIST"])
def test_idx_files_are_read_into_memory(tmp_path, name):
    images, _ = write_mnist(tmp_path, name=name)

    splits = _torchvision.build(name=name, root=str(tmp_path))

    check(splits, name)
    assert (splits.spec.input_shape, splits.spec.outputs, splits.spec.kind) == ((1, 28, 28), 10, "classes")
    assert (len(splits.train), len(splits.val)) == (12, 5), "the test files are for validation"
    assert splits.train[3][0].numpy() == pytest.approx(images[3][None] / 255, abs=1e-7)
    assert splits.train.targets.tolist() == [*range(10), 0, 1]


def test_packed_idx_files_are_unpacked_where_download_may(tmp_path, monkeypatch):
    _, resources = write_mnist(tmp_path, packed=True)
    monkeypatch.setattr(datasets.MNIST, "resources", resources)  # the checksums of these files

    assert len(_torchvision.build(name="mnist", root=str(tmp_path), download=True).train) == 12


def test_images_from_memory_equal_decoded_and_transformed_ones(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    write_cifar(tmp_path, monkeypatch)
    slow = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

    for cls in (datasets.MNIST, datasets.CIFAR10):
        reference = cls(str(tmp_path), transform=slow)
        fast = _torchvision.build(name=cls.__name__, root=str(tmp_path)).train
        inputs, targets = fast.batch(torch.arange(len(fast)))

        assert isinstance(fast, InMemory)
        assert torch.equal(inputs, torch.stack([image for image, _ in reference])), cls.__name__
        assert targets.tolist() == [label for _, label in reference]


@pytest.mark.parametrize(
    ("cls", "label_key", "sizes"),
    [(datasets.CIFAR10, "labels", (20, 4)), (datasets.CIFAR100, "fine_labels", (4, 4))],
)
def test_cifar_batches_are_read_into_memory(tmp_path, monkeypatch, cls, label_key, sizes):
    batches = write_cifar(tmp_path, monkeypatch, cls=cls, label_key=label_key)

    splits = _torchvision.build(name=cls.__name__, root=str(tmp_path))

    check(splits, cls.__name__)
    assert (len(splits.train), len(splits.val)) == sizes
    assert splits.spec.input_shape == (3, 32, 32)
    assert splits.spec.outputs == (100 if cls is datasets.CIFAR100 else 10)
    assert splits.train[1][0].numpy() == pytest.approx(batches[0][1].reshape(3, 32, 32) / 255, abs=1e-7)


def test_a_fraction_of_the_training_part_can_be_held_out_instead(tmp_path):
    write_mnist(tmp_path)

    splits = _torchvision.build(name="MNIST", root=str(tmp_path), val_fraction=0.5, split_seed=1)
    again = _torchvision.build(name="MNIST", root=str(tmp_path), val_fraction=0.5, split_seed=1)

    assert len(splits.train) + len(splits.val) == 12
    assert set(splits.train.targets.tolist()) == set(range(10)), "each class keeps a training sample"
    assert torch.equal(splits.val.inputs, again.val.inputs)


@pytest.mark.parametrize("val_name", ["val", "test"])
def test_an_image_folder_with_parts_uses_them(tmp_path, val_name):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / val_name, each=2)

    splits = _torchvision.build(name="ImageFolder", root=str(tmp_path))

    check(splits, "ImageFolder")
    assert isinstance(splits.train, Images)
    assert (len(splits.train), len(splits.val)) == (8, 4)
    assert (splits.spec.input_shape, splits.spec.outputs) == ((3, 6, 9), 2)
    with Image.open(tmp_path / "train" / "dog" / "1.png") as image:
        expected = np.asarray(image).transpose(2, 0, 1) / 255
    assert splits.train[5][0].numpy() == pytest.approx(expected, abs=1e-7)
    assert splits.train[5][1] == 1


def test_an_image_folder_without_parts_holds_out_a_fraction(tmp_path):
    write_folder(tmp_path, each=10)

    splits = _torchvision.build(name="ImageFolder", root=str(tmp_path))

    assert (len(splits.train), len(splits.val)) == (18, 2), "a tenth"
    assert not set(splits.train.indices_N) & set(splits.val.indices_N)


def test_fake_data_takes_its_own_options():
    splits = _torchvision.build(name="FakeData", size=20, image_size=[3, 8, 8], num_classes=4)

    check(splits, "FakeData")
    assert (len(splits.train), len(splits.val)) == (18, 2)
    assert (splits.spec.input_shape, splits.spec.outputs) == ((3, 8, 8), 4)
    image, _ = splits.train[0]
    assert image.dtype == torch.float32
    assert type(image) is torch.Tensor
    assert 0 <= image.min() <= image.max() <= 1


def test_parts_by_name_never_overlap(monkeypatch):
    """FGVCAircraft's default part is `trainval`, which holds `val`: training must ask for `train`."""
    asked = []

    class Parts(datasets.FakeData):
        def __init__(self, root, split="trainval", download=False):
            if split not in ("train", "val", "trainval", "test"):
                raise ValueError(f"Unknown value '{split}' for argument split. Valid values are ...")
            asked.append(split)
            super().__init__(size=10, image_size=(3, 4, 4))

    monkeypatch.setattr(datasets, "FGVCAircraft", Parts)

    _torchvision.build(name="FGVCAircraft")
    by_default = asked.copy()
    asked.clear()
    fraction = _torchvision.build(name="FGVCAircraft", split="trainval")
    by_split = asked.copy()
    asked.clear()
    _torchvision.build(name="FGVCAircraft", split="trainval", val_split="test")

    assert by_default == ["train", "val"]
    assert by_split == ["trainval"]
    assert len(fraction.val) == 1, "held out of the part that was asked for"
    assert asked == ["trainval", "test"]


@pytest.mark.parametrize(
    ("name", "way_out"), [("MNIST", "download: true fetch them"), ("ImageFolder", "put its files")]
)
def test_missing_files_say_where_they_were_looked_for(tmp_path, name, way_out):
    with pytest.raises(GradwatchError, match=rf"data\.root: {name} was not found in {tmp_path}/none .*; .*{way_out}"):
        _torchvision.build(name=name, root=str(tmp_path / "none"))


def test_a_download_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.MNIST, "mirrors", [f"file://{tmp_path}/nowhere/"])

    with pytest.raises(GradwatchError, match=r"MNIST was not found .*check the internet connection"):
        _torchvision.build(name="MNIST", root=str(tmp_path), download=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "CIFAR11"}, r"got 'CIFAR11', expected a class of torchvision\.datasets; did you mean 'CIFAR10'\?"),
        ({"name": "FakeData", "sice": 3}, r"data\.FakeData: .*unexpected keyword argument 'sice'"),
        ({"name": "FakeData", "size": 0}, "FakeData has no training samples"),
        ({"name": "FakeData", "size": 9, "val_fraction": 2.0}, r"data\.val_fraction: got 2\.0"),
    ],
)
def test_a_mistake_in_the_options_is_named(options, message):
    with pytest.raises(GradwatchError, match=message):
        _torchvision.build(**options)


def test_datasets_for_other_tasks_are_refused(monkeypatch):
    class Boxes(datasets.FakeData):
        def __getitem__(self, index):
            image, _ = super().__getitem__(index)
            return image, {"boxes": []}

    monkeypatch.setattr(datasets, "VOCDetection", Boxes)

    with pytest.raises(GradwatchError, match="a target of VOCDetection is a dict, expected a class number"):
        _torchvision.build(name="VOCDetection", size=5, image_size=[3, 4, 4])
