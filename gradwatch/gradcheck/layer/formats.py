"""Judge whether a layer follows its dtype and device: in float64, in bfloat16, and without memory on meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwatch.errors import raised
from gradwatch.gradcheck.layer.recorder import RecordedOp, raised_at
from gradwatch.gradcheck.layer.result import LayerProperty
from gradwatch.gradcheck.layer.trial import LayerTrial

FORMATS = (torch.float64, torch.bfloat16)
MIXED_DEVICES = ("index", "index_put", "copy", "to_copy", "pack_padded_sequence")
"""Operations that take tensors of two devices on purpose."""


def follows_dtype(trial: LayerTrial) -> LayerProperty:
    """Judge whether the outputs have the dtype of the layer after `.to(dtype)`."""
    if any(p.is_complex() for p in trial.module.parameters()):
        return LayerProperty(outcome="cannot tell", text="the layer has complex parameters")
    casts = ""
    for dtype in FORMATS:
        name = str(dtype).removeprefix("torch.")
        module = trial.fresh(training=False).to(dtype)
        found = _attempt(trial, module, trial.batch(trial.size, dtype=dtype), name)
        if isinstance(found, LayerProperty):
            return found
        outputs, operations = found
        wrong = [t for t in outputs if t.is_floating_point() and t.dtype != dtype]
        if not wrong:
            continue
        other = str(wrong[0].dtype).removeprefix("torch.")
        promoting = next((o for o in operations if _promotes(o, dtype)), None)
        if promoting is not None:
            text = f"in {name} the output is {other}: {promoting.described} meets a tensor of another format"
            return LayerProperty(outcome="fails", text=_blamed(text, module), **promoting.at)
        casts = f"; in {name} it returns {other} by a cast of its own"
    return LayerProperty(outcome="holds", text=f"float64 and bfloat16 follow{casts}")


def follows_device(trial: LayerTrial) -> LayerProperty:
    """Judge whether every tensor is on the device of the layer, by a pass on meta."""
    module = trial.fresh(training=False).to("meta")
    batch = tree_map_only(Tensor, lambda t: t.to("meta"), trial.batch(trial.size))
    found = _attempt(trial, module, batch, "meta")
    if isinstance(found, LayerProperty):
        return found
    outputs, operations = found
    mixing = next((o for o in operations if _mixes_devices(o)), None)
    if mixing is not None:
        text = _blamed(f"{mixing.described} meets a tensor that did not move with the layer", module)
        return LayerProperty(outcome="fails", text=text, **mixing.at)
    if any(t.device.type != "meta" for t in outputs):
        text = _blamed("an output is not on the device of the layer", module)
        return LayerProperty(outcome="fails", text=text)
    return LayerProperty(outcome="holds", text="every tensor moves with the layer")


def _attempt(
    trial: LayerTrial, module: nn.Module, batch: tuple[Any, ...], name: str
) -> LayerProperty | tuple[list[Tensor], list[RecordedOp]]:
    """Run the layer in a format or on a device; return the verdict if it raises."""
    try:
        done = trial.run(module, batch)
    except NotImplementedError as error:  # torch has no kernel for the format, which is not a fault of the layer
        return LayerProperty(outcome="cannot tell", text=f"{name}: {_short(error)}")
    except Exception as error:  # the user's code may raise anything
        words = str(error)
        is_explained = any(w in words for w in ("same device", "same dtype", "dtype", "expected device", "scalar type"))
        plain = next(_plain_tensors(module), None)
        if "not implemented for" in words or not (is_explained or plain):
            return LayerProperty(outcome="cannot tell", text=f"{name}: {_short(error)}")
        text = f"{name}: {_short(error)}"
        return LayerProperty(outcome="fails", text=_blamed(text, module), place=raised_at(error))
    return done.outputs, done.operations


def _short(error: BaseException) -> str:
    return raised(error).splitlines()[0]


def _promotes(operation: RecordedOp, dtype: torch.dtype) -> bool:
    """Return whether an operation takes the format of the layer and another one; a scalar does not promote."""
    formats = {d for d, _, dim in operation.formats if d.is_floating_point and dim > 0}
    return dtype in formats and len(formats) > 1 and "copy" not in operation.name


def _mixes_devices(operation: RecordedOp) -> bool:
    devices = {device for _, device, dim in operation.formats if dim > 0}
    return len(devices) > 1 and not any(operation.name.startswith(name) for name in MIXED_DEVICES)


def _blamed(text: str, module: nn.Module) -> str:
    """Add the tensors that `.to()` leaves behind, if there are any."""
    plain = list(_plain_tensors(module))
    if not plain:
        return text
    name, kind = plain[0]
    return f"{text}; `.to()` leaves `{name}` behind, {kind}"


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the tensors and layers that a module holds without registering them, with a remedy for each."""
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if name.startswith("_") and name in _OWN:
                continue
            held = tree_leaves(value)
            if any(isinstance(t, nn.Module) for t in held):
                yield f"{path}.{name}".lstrip("."), "layers in a plain container: use ModuleList or ModuleDict"
            elif any(isinstance(t, Tensor) for t in held):
                yield f"{path}.{name}".lstrip("."), "a plain tensor: use register_buffer"


_OWN = frozenset(nn.Module().__dict__)
