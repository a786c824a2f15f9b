"""Check the properties that a layer should have: `gradwatch.check_layer`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import nn

from gradwatch.errors import GradwatchError, raised
from gradwatch.gradcheck.layer.calls import is_deterministic, keeps_no_state, leaves_input, modes
from gradwatch.gradcheck.layer.formats import follows_device, follows_dtype
from gradwatch.gradcheck.layer.result import LayerCheck, LayerProperty
from gradwatch.gradcheck.layer.samples import independent_samples, unpaired_samples
from gradwatch.gradcheck.layer.trial import LayerTrial
from gradwatch.gradcheck.layer.values import extremes, shapes
from gradwatch.state.rng import preserved_random_state

PROPERTIES = {
    "shapes": shapes,
    "extremes": extremes,
    "input": leaves_input,
    "deterministic": is_deterministic,
    "dtype": follows_dtype,
    "device": follows_device,
    "state": keeps_no_state,
    "samples": independent_samples,
    "broadcast": unpaired_samples,
    "modes": modes,
}
COMPARED = ("state", "samples", "modes")
"""Properties that are judged by comparing calls. If equal calls differ, there is no verdict."""


def check_layer(module: nn.Module, *inputs: Any, batch_axis: int | None = None) -> LayerCheck:
    """Check the properties that a layer should have, by trials on copies of it.

    - `shapes`: batches of 1 and of other sizes give outputs that differ in the axis of the samples alone.
    - `extremes`: zeros, a constant, huge and tiny values give finite outputs and gradients.
    - `input`: the inputs are not changed in place.
    - `deterministic`: runs from one random state are equal bit for bit.
    - `dtype`, `device`: every tensor follows `.to()`; tried in float64, in bfloat16 and on meta.
    - `state`: no call in eval mode depends on the calls before it.
    - `samples`: samples do not affect each other, except through batch normalization.
    - `broadcast`: shapes such as (B, 1) and (B,) do not pair each sample with all others.
    - `modes`: every part follows `model.eval()`, and nothing is dropped there.

    Args:
        module: The layer. It is not changed.
        inputs: Example of its inputs, with at least 2 samples; integers stand for indices. Sizes of the other axes
            that differ from the number of samples make the trials sharper.
        batch_axis: Axis of the samples. If None, it is 0, and 1 for sequence layers of torch with `batch_first=False`.

    Returns:
        One verdict per property, with the submodule and the line at fault, if known.

    Raises:
        GradwatchError: The layer does not take the inputs, or cannot be copied, or the batch has 1 sample.
    """
    begin = time.monotonic()
    if not isinstance(module, nn.Module):
        raise GradwatchError(f"check_layer: module is a {type(module).__name__}, expected a torch.nn.Module")
    with preserved_random_state():
        trial = LayerTrial(module, inputs, batch_axis=batch_axis)
        try:
            trial.run(trial.fresh(training=True), trial.example)
        except Exception as error:  # the user's code may raise anything
            kind = type(module).__name__
            raise GradwatchError(f"check_layer: {kind} does not take these inputs: {raised(error)}") from error
        found = {"deterministic": _judged("deterministic", trial)}
        is_random = found["deterministic"].outcome == "fails"
        for name in PROPERTIES:
            if is_random and name in COMPARED:
                text = "two equal calls differ already: see deterministic"
                found[name] = LayerProperty(name=name, outcome="cannot tell", text=text)
            elif name not in found:
                found[name] = _judged(name, trial)
    rows = tuple(found[name] for name in PROPERTIES)
    return LayerCheck(layer=type(module).__name__, properties=rows, seconds=time.monotonic() - begin)


def _judged(name: str, trial: LayerTrial) -> LayerProperty:
    """Judge one property; if a trial raises, there is no verdict."""
    try:
        return replace(PROPERTIES[name](trial), name=name)
    except GradwatchError:
        raise
    except Exception as error:  # the user's code may raise anything on inputs that it did not expect
        return LayerProperty(name=name, outcome="cannot tell", text=f"it raises {raised(error).splitlines()[0]}")
