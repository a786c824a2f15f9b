"""Write remedies as lines of Python with the names of the user's model, for a training loop without a config."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.diagnose.case import Case
from gradwatch.records import LayerInfo

MAX_LINES = 4
"""Maximum number of modules that get a line each; more modules get a loop."""

LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Module types of torch.nn with a weight matrix that an initialization or a normalization is for."""

NORMS = {
    "Linear": ("LayerNorm", "out_features"),
    "Conv1d": ("BatchNorm1d", "out_channels"),
    "Conv2d": ("BatchNorm2d", "out_channels"),
    "Conv3d": ("BatchNorm3d", "out_channels"),
}
"""Usual normalization after each type of layer, and the attribute with its number of features."""


def variable(case: Case, name: str = "") -> str:
    """Return a Python expression for a module or parameter of the watched model, such as `model.blocks[0].fc`."""
    # several models are watched by name, and the first part of a name is then the model
    parts = name.split(".") if name else []
    whole = "model" if "" in case.info.models or not parts else parts.pop(0)
    return whole + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def activation_code(case: Case, kinds: Sequence[str], new: str) -> str:
    """Return lines that replace activations by another one.

    Args:
        case: The case; activations outside its layers are replaced as well.
        kinds: Class names of the activations to replace.
        new: Class name of the new activation.
    """
    modules = {layer.module for layer in case.info.layers}
    found = [a for a in case.info.activations if a.module_type in kinds]
    # a functional activation is named after the layer before it, such as `fc1.sigmoid`
    called = [a for a in found if a.name.removesuffix(f".{a.module_type.lower()}") in modules or not a.name]
    placed = [a for a in found if a not in called]
    function = {"ReLU": "relu", "LeakyReLU": "leaky_relu"}.get(new, new)
    lines = [
        f"# in forward, after {variable(case, a.name.rpartition('.')[0])}: torch.nn.functional.{function} instead of "
        f"{a.module_type.lower()}"
        for a in called[:MAX_LINES]
    ]
    if len(placed) <= MAX_LINES:
        return "\n".join([f"{variable(case, a.name)} = torch.nn.{new}()" for a in placed] + lines)
    types = _types(sorted({a.module_type for a in placed}))
    loop = [
        f"for name, module in list({variable(case)}.named_modules()):",
        f"    if isinstance(module, {types}):",
        f"        {variable(case)}.set_submodule(name, torch.nn.{new}())",
    ]
    return "\n".join(loop + lines)


def init_code(case: Case, call: str) -> str:
    """Return lines that initialize the weight matrices by a call such as `kaiming_normal_({})`."""
    weights = [la for la in case.matrices if la.trainable and la.module_type in LAYERS] or case.matrices
    init = f"torch.nn.init.{call}"
    if len(weights) <= MAX_LINES:
        return "\n".join(init.format(variable(case, la.name)) for la in weights)
    return (
        f"for module in {variable(case)}.modules():\n"
        f"    if isinstance(module, {_types(_kinds(weights))}):\n"
        f"        {init.format('module.weight')}"
    )


def insertion_code(case: Case, *, new: str = "") -> str:
    """Return lines that put a module after each layer but the last: `new`, or else the usual normalization."""
    hidden = [la for la in case.matrices if la.module_type in LAYERS][:-1]
    if len(hidden) <= MAX_LINES:
        lines = []
        for layer in hidden:
            norm = f"{NORMS[layer.module_type][0]}({layer.shape[0]})"
            it = variable(case, layer.module)
            lines.append(f"{it} = torch.nn.Sequential({it}, torch.nn.{new or norm})")
        return "\n".join(lines)
    kind = hidden[0].module_type
    norm, size = NORMS[kind]
    return (
        f"layers = [(name, m) for name, m in {variable(case)}.named_modules() if isinstance(m, torch.nn.{kind})]\n"
        f"for name, layer in layers[:-1]:\n"
        f"    {variable(case)}.set_submodule(name, torch.nn.Sequential(layer, "
        f"torch.nn.{new or f'{norm}(layer.{size})'}))"
    )


def rate_code(rate: float) -> str:
    """Return lines that set the learning rate of an optimizer."""
    return f'for group in optimizer.param_groups:\n    group["lr"] = {rate:g}'


def clip_code(case: Case, norm: float) -> str:
    """Return the line that clips the gradient norm."""
    return (
        f"torch.nn.utils.clip_grad_norm_({variable(case)}.parameters(), max_norm={norm:g})  # before optimizer.step()"
    )


def parameters_code(case: Case) -> str:
    """Return lines that pass the layers of a case to the optimizer."""
    params = {la.name for la in case.info.layers}
    lines = []
    for name in case.layers[:MAX_LINES]:
        held = f"[{variable(case, name)}]" if name in params else f"{variable(case, name)}.parameters()"
        lines.append(f'optimizer.add_param_group({{"params": {held}}})')
    return "\n".join(lines)


def embedding_code(case: Case) -> str:
    """Return lines that initialize the embeddings of a case with a small standard deviation."""
    tables = [la for la in case.info.layers if "Embedding" in la.module_type and len(la.shape) == 2]
    named = [la for la in tables if la.name in case.layers or la.module in case.layers] or tables
    return "\n".join(f"torch.nn.init.normal_({variable(case, la.name)}, std=0.05)" for la in named[:MAX_LINES])


def output_code(case: Case) -> str:
    """Return lines that replace the last activation, which the loss applies itself, by nothing."""
    kinds = ("Softmax", "LogSoftmax", "Sigmoid", "Softmax2d")
    last = next((a for a in reversed(case.info.activations) if a.module_type in kinds), None)
    modules = {layer.module for layer in case.info.layers}
    if last is None or not last.name or last.name.removesuffix(f".{last.module_type.lower()}") in modules:
        return ""
    return f"{variable(case, last.name)} = torch.nn.Identity()"


def _kinds(layers: Sequence[LayerInfo]) -> list[str]:
    return sorted({la.module_type for la in layers})


def _types(kinds: Sequence[str]) -> str:
    named = [f"torch.nn.{kind}" for kind in kinds]
    return named[0] if len(named) == 1 else f"({', '.join(named)})"
