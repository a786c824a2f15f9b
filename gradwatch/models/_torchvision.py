"""Build any classification model of torchvision by its name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision import models

from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.records import DataSpec

WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def build(spec: DataSpec, *, name: str, **options: Any) -> nn.Module:
    """Return a torchvision model with as many outputs as the data asks for.

    Args:
        spec: Description of the data: images with the channels of the model's first convolution.
        name: Such as `resnet18`.
        options: Keyword arguments of the model; `num_classes` is the data's by default, `weights` are handed on.
    """
    known = models.list_models(module=models)  # without the models of its subpackages, such as detection
    if name not in known:
        raise GradwatchError(
            f"model.name: got '{name}', expected a classification model of torchvision{did_you_mean(name, known)}"
        )
    if len(spec.input_shape) != 3 or spec.kind == "tokens":
        raise GradwatchError(
            f"model: {name} takes images of shape (channels, height, width), but a sample has shape "
            f"{spec.input_shape}; use {'gpt' if spec.kind == 'tokens' else 'mlp'}, or give the data that shape"
        )
    wanted: dict[str, Any] = {"num_classes": spec.outputs}
    if name in WITH_AUXILIARY_HEADS:
        wanted["aux_logits"] = False  # with auxiliary heads, they return a tuple in training
        if options.get("weights") is None:
            wanted["init_weights"] = True  # without this argument, torchvision warns
    try:
        model: nn.Module = models.get_model(name, **wanted | options)
    except (TypeError, ValueError, KeyError, OSError) as error:
        weights = options.get("weights")
        hint = f"; weights: {weights} must be known for it, and may need num_classes: 1000" if weights else ""
        raise GradwatchError(f"model.{name}: {error}{hint}") from error
    _check_channels(model, spec.input_shape[0], name=name)
    return model


def _check_channels(model: nn.Module, channels: int, *, name: str) -> None:
    # the first convolution reads the image
    taken = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), channels)
    if taken == channels:
        return
    remedy = f"add {{Grayscale: {{num_output_channels: {taken}}}}} to data.transform" if channels == 1 else ""
    remedy = "add RGB to data.transform" if channels in (2, 4) else remedy
    raise GradwatchError(
        f"model: {name} takes images of {taken} channels, but a sample has {channels}; "
        + (remedy or "choose another model (mlp and cnn take any)")
    )
