"""Models of torchvision by name: outputs from the data, and clear words where images do not fit."""

import warnings

import pytest
import torch

from gradwatch.errors import GradwatchError
from gradwatch.models import _torchvision
from gradwatch.records import DataSpec

CIFAR = DataSpec(input_shape=(3, 32, 32), outputs=10, kind="classes")
GREY = DataSpec(input_shape=(1, 32, 32), outputs=10, kind="classes")


def test_a_model_has_as_many_outputs_as_the_data_has_classes():
    model = _torchvision.build(CIFAR, name="resnet18").eval()

    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_options_reach_the_model_and_overrule_the_data():
    model = _torchvision.build(CIFAR, name="squeezenet1_1", num_classes=7, dropout=0.25)

    assert model.num_classes == 7
    assert model.classifier[0].p == 0.25


def test_models_with_auxiliary_heads_return_one_tensor():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = _torchvision.build(CIFAR, name="googlenet")

    assert isinstance(model.train()(torch.zeros(2, 3, 96, 96)), torch.Tensor)


def test_grey_images_are_refused_with_the_transform_that_makes_them_fit():
    with pytest.raises(
        GradwatchError, match=r"3 channels, but a sample has 1; add \{Grayscale: \{num_output_channels: 3"
    ):
        _torchvision.build(GREY, name="resnet18")


def test_images_with_transparency_are_refused_with_the_transform_that_makes_them_fit():
    with pytest.raises(GradwatchError, match=r"a sample has 4; add RGB to data\.transform"):
        _torchvision.build(DataSpec(input_shape=(4, 32, 32), outputs=10, kind="classes"), name="resnet18")


def test_a_misspelt_name_gets_the_near_one():
    with pytest.raises(GradwatchError, match=r"got 'resnet_18', .*did you mean 'resnet18'\?"):
        _torchvision.build(CIFAR, name="resnet_18")


def test_an_unknown_option_is_a_mistake_of_the_model():
    with pytest.raises(GradwatchError, match=r"model\.resnet18: .*unexpected keyword argument 'depth'"):
        _torchvision.build(CIFAR, name="resnet18", depth=3)


def test_weights_that_torchvision_does_not_have_are_refused():
    with pytest.raises(GradwatchError, match=r"model\.resnet18: .*num_classes: 1000"):
        _torchvision.build(CIFAR, name="resnet18", weights="NO_SUCH_WEIGHTS")


@pytest.mark.parametrize(
    ("spec", "way_out"),
    [
        (DataSpec(input_shape=(64,), outputs=2, kind="classes"), "use mlp"),
        (DataSpec(input_shape=(8,), outputs=50, kind="tokens"), "use gpt"),
    ],
)
def test_data_that_are_no_images_are_refused(spec, way_out):
    with pytest.raises(GradwatchError, match=way_out):
        _torchvision.build(spec, name="resnet18")
