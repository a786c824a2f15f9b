"""Transforms by name: built as asked, on the right samples, in the right order, batchwise where that is the same."""

import random
import sys

import pytest
import torch
from torchvision.transforms import v2

from gradwatch.data import Splits, _transforms
from gradwatch.data._memory import InMemory
from gradwatch.data._transforms import PerBatch, PerSample, apply, compose
from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec


def images(size=6, channels=3, side=8):
    generator = torch.Generator().manual_seed(1)
    return InMemory(torch.rand(size, channels, side, side, generator=generator), torch.arange(size) % 2)


def splits(channels=3, side=8):
    train, val = images(channels=channels, side=side), images(channels=channels, side=side)
    return Splits(train, val, DataSpec(input_shape=(channels, side, side), outputs=2, kind="classes"))


def doubled(factor=2):
    return lambda x: x * factor


def python_noise():
    return lambda x: x + random.random()


def not_callable():
    return 3


def test_names_are_built_with_their_keyword_arguments():
    chain = compose(["RandomHorizontalFlip", {"RandomCrop": {"size": 4, "padding": 2}}, {"ColorJitter": None}])

    flip, crop, jitter = chain.steps
    assert type(flip) is v2.RandomHorizontalFlip
    assert (crop.size, crop.padding) == ((4, 4), [2, 2, 2, 2]) or list(crop.size) == [4, 4]
    assert type(jitter) is v2.ColorJitter


def test_what_yaml_cannot_write_is_given_by_name():
    chain = compose(
        [
            {"ToDtype": {"dtype": "float16", "scale": True}},
            {"Resize": {"size": [4, 4], "interpolation": "nearest"}},
            {"AutoAugment": {"policy": "cifar10"}},
            {"RandomApply": {"transforms": [{"GaussianBlur": {"kernel_size": 3}}], "p": 0.5}},
        ]
    )

    to_dtype, resize, auto, some = chain.steps
    assert to_dtype.dtype is torch.float16
    assert resize.interpolation is v2.InterpolationMode.NEAREST
    assert auto.policy is v2.AutoAugmentPolicy.CIFAR10
    assert type(some.transforms[0]) is v2.GaussianBlur


def test_a_factory_of_the_users_own_gets_the_other_keys():
    chain = compose([{"target": f"{__name__}:doubled", "factor": 3}])

    assert chain(torch.ones(1)).item() == 3


def test_a_factory_is_found_below_the_folder_that_the_command_runs_in(tmp_path, monkeypatch):
    (tmp_path / "my_transforms_here.py").write_text("def negated():\n    return lambda x: -x\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    assert compose([{"target": "my_transforms_here:negated"}])(torch.ones(1)).item() == -1


def test_the_result_is_a_plain_tensor():
    assert type(compose(["ToImage"])(torch.rand(3, 4, 4))) is torch.Tensor


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["RandomHorizontalFlop"],
            r"data\.transform\[0\]: got 'RandomHorizontalFlop', .*did you mean 'RandomHorizontalFlip'",
        ),
        (
            ["Identity", {"RandomCrop": {"sice": 3}}],
            r"data\.transform\[1\]: RandomCrop: .*unexpected keyword argument 'sice'",
        ),
        ([{"RandomCrop": None}], r"RandomCrop: .*missing 1 required positional argument: 'size'"),
        ([{"Pad": {"padding": 1}, "Resize": {"size": 2}}], r"data\.transform\[0\]: got .*, expected one name"),
        (["MixUp"], r"MixUp mixes the samples of a batch, expected a transform of one image"),
        ([{"target": "no_such_module:f"}], r"data\.transform\[0\]\.target: 'no_such_module:f' does not import"),
        ([{"target": f"{__name__}:nothing"}], r"has no 'nothing'"),
        ([{"target": f"{__name__}:not_callable"}], r"returned a int, expected a callable of one input"),
        ([{"AutoAugment": {"policy": "mnist"}}], r"AutoAugment\.policy: got 'mnist', expected one of imagenet, "),
        ([{"ToDtype": {"dtype": "float23"}}], r"data\.transform\[0\]\.ToDtype\.dtype: got 'float23', .*did you mean"),
        ([{"Resize": {"size": 4, "interpolation": "smooth"}}], r"Resize\.interpolation: got 'smooth', expected one of"),
        (
            [{"RandomApply": {"transforms": ["Blur"]}}],
            r"data\.transform\[0\]\.RandomApply\.transforms\[0\]: got 'Blur'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(names, message):
    with pytest.raises(GradwatchError, match=message):
        compose(names)


BATCHWISE = [
    {"CenterCrop": {"size": 5}},
    {"ConvertImageDtype": {"dtype": "float64"}},
    {"Grayscale": {"num_output_channels": 3}},
    "Identity",
    {"Normalize": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}},
    {"Pad": {"padding": 2}},
    {"Resize": {"size": [5, 7]}},
    {"Resize": {"size": 11}},
    "RGB",
    {"ToDtype": {"dtype": "float32", "scale": True}},
    "ToImage",
    "ToPureTensor",
]


@pytest.mark.parametrize("name", BATCHWISE, ids=str)
def test_fixed_transforms_of_a_batch_equal_those_of_its_samples(name):
    dataset = apply(splits(), transform=[name]).train
    indices = torch.tensor([4, 0, 2])

    inputs, targets = dataset.batch(indices)

    assert isinstance(dataset, PerBatch)
    assert not dataset.is_random
    assert torch.equal(inputs, torch.stack([dataset[i][0] for i in indices]))
    assert targets.tolist() == [0, 0, 0]
    assert type(inputs) is torch.Tensor


def test_every_batchwise_transform_is_held_against_its_samples():
    tested = {name if isinstance(name, str) else next(iter(name)) for name in BATCHWISE}

    assert tested == {cls.__name__ for cls in _transforms.BATCHWISE}


def test_augmentation_touches_training_samples_only_and_comes_first():
    made = apply(
        splits(),
        transform=[{"target": f"{__name__}:doubled", "factor": 0}],
        augment=[{"target": f"{__name__}:doubled", "factor": 5}, {"target": f"{__name__}:python_noise"}],
    )

    assert isinstance(made.train, PerSample)
    assert made.train.is_random
    assert not made.train[0][0].any(), "the transform has the last word"
    assert [len(made.train.chain.steps), len(made.val.chain.steps)] == [3, 1]


def test_nothing_asked_for_changes_nothing():
    given = splits()

    assert apply(given) == given


def test_the_spec_is_that_of_the_transformed_samples():
    made = apply(splits(channels=1), transform=[{"Resize": {"size": 16}}, {"Grayscale": {"num_output_channels": 3}}])

    assert made.spec.input_shape == made.train[0][0].shape == made.val[0][0].shape == (3, 16, 16)
    assert (made.spec.outputs, made.spec.kind) == (2, "classes")


def test_augmentation_that_changes_the_size_needs_a_transform_that_fixes_it():
    with pytest.raises(GradwatchError, match=r"data\.augment: makes inputs of shape \(3, 4, 4\).*add a Resize"):
        apply(splits(), transform=["Identity"], augment=[{"RandomCrop": {"size": 4}}])
    with pytest.raises(GradwatchError, match=r"data\.augment: makes inputs of shape \(3, 4, 4\).*\(3, 8, 8\)"):
        apply(splits(), augment=[{"RandomCrop": {"size": 4}}])

    assert apply(splits(), transform=[{"CenterCrop": {"size": 4}}], augment=[{"RandomCrop": {"size": 4}}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"transform": [{"Normalize": {"mean": [0.5] * 2, "std": [1.0] * 2}}]},
            r"data\.transform: failed on the first",
        ),
        ({"augment": [{"RandomCrop": {"size": 99}}]}, r"data\.augment: failed on the first sample"),
        ({"transform": ["ToPILImage"]}, r"are a PIL image, expected a tensor"),
        ({"transform": [{"FiveCrop": {"size": 4}}]}, r"data\.transform: made tuple, expected a floating-point tensor"),
        ({"transform": [{"ToDtype": {"dtype": "uint8", "scale": True}}]}, r"made torch\.uint8, expected .*ToDtype"),
    ],
)
def test_a_transform_that_does_not_fit_the_data_is_found_before_training(options, message):
    with pytest.raises(GradwatchError, match=message):
        apply(splits(), **options)
