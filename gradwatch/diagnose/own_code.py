"""Write remedies as lines of Python with the names of the user's model, for a training loop without a config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradwatch.diagnose.case import Case
from gradwatch.diagnose.conditions import SATURATING

MAX_LINES = 4
"""Maximum number of modules that get a line each; more modules get a loop."""

LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Module types of torch.nn with a weight matrix that an initialization or a normalization is for."""

NORMS = {
    "Linear": ("BatchNorm1d", "out_features"),
    "Conv1d": ("BatchNorm1d", "out_channels"),
    "Conv2d": ("BatchNorm2d", "out_channels"),
    "Conv3d": ("BatchNorm3d", "out_channels"),
}
"""Usual normalization after each type of layer, and the attribute with its number of features."""


def activation_code(case: Case, kinds: Sequence[str], new: str) -> str:
    """Return lines that replace activations with another type.

    Args:
        case: The case; activations outside its layers are replaced as well.
        kinds: Class names of the activations to replace.
        new: Class name of the new activation.
    """
    modules = {layer.module for layer in case.info.layers}
    found = [a for a in case.info.activations if a.module_type in kinds]
    # a functional activation is named after the layer before it, such as `fc1.sigmoid`
    functional = [a for a in found if a.name.removesuffix(f".{a.module_type.lower()}") in modules or not a.name]
    submodules = [a for a in found if a not in functional]
    function = {"ReLU": "relu", "LeakyReLU": "leaky_relu"}.get(new, new)
    comments = [
        f"# in forward, after {case.variable(a.name.rpartition('.')[0])}: torch.nn.functional.{function} instead of "
        f"{a.module_type.lower()}"
        for a in functional[:MAX_LINES]
    ]
    if len(submodules) <= MAX_LINES:
        return "\n".join([f"{case.variable(a.name)} = torch.nn.{new}()" for a in submodules] + comments)
    loop = [
        f"for name, module in list({case.variable()}.named_modules()):",
        f"    if isinstance(module, {_types(a.module_type for a in submodules)}):",
        f"        {case.variable()}.set_submodule(name, torch.nn.{new}())",
    ]
    return "\n".join(loop + comments)


def init_code(case: Case, call: str) -> str:
    """Return lines that initialize the weight matrices by a call such as `kaiming_normal_({})`."""
    weights = [la for la in case.matrices if la.trainable and la.module_type in LAYERS] or case.matrices
    init = f"torch.nn.init.{call}"
    if len(weights) <= MAX_LINES:
        return "\n".join(init.format(case.variable(la.name)) for la in weights)
    return (
        f"for module in {case.variable()}.modules():\n"
        f"    if isinstance(module, {_types(la.module_type for la in weights)}):\n"
        f"        {init.format('module.weight')}"
    )


def insertion_code(case: Case, *, new: str = "") -> str:
    """Return lines that put a module after each layer but the last: `new`, or else the usual normalization."""
    hidden = [la for la in case.matrices if la.module_type in LAYERS][:-1]
    if not hidden:
        return ""
    # BatchNorm1d would take the dimension of the tokens for the features
    has_tokens = any(t in la.module_type for la in case.info.layers for t in ("Embedding", "Attention", "LSTM", "GRU"))
    if len(hidden) <= MAX_LINES:
        lines = []
        for layer in hidden:
            norm = f"{'LayerNorm' if has_tokens else NORMS[layer.module_type][0]}({layer.shape[0]})"
            module = case.variable(layer.module)
            lines.append(f"{module} = torch.nn.Sequential({module}, torch.nn.{new or norm})")
        return "\n".join(lines)
    kind = hidden[0].module_type
    norm, size = NORMS[kind]
    norm = "LayerNorm" if has_tokens else norm
    return (
        f"layers = [(name, m) for name, m in {case.variable()}.named_modules() if isinstance(m, torch.nn.{kind})]\n"
        f"for name, layer in layers[:-1]:\n"
        f"    {case.variable()}.set_submodule(name, torch.nn.Sequential(layer, "
        f"torch.nn.{new or f'{norm}(layer.{size})'}))"
    )


def rate_code(rate: float) -> str:
    """Return lines that set the learning rate of an optimizer."""
    return f'for group in optimizer.param_groups:\n    group["lr"] = {rate:g}'


def clip_code(case: Case, norm: float) -> str:
    """Return the line that clips the gradient norm."""
    return (
        f"torch.nn.utils.clip_grad_norm_({case.variable()}.parameters(), max_norm={norm:g})  # before optimizer.step()"
    )


def parameters_code(case: Case) -> str:
    """Return lines that pass the layers of a case to the optimizer."""
    params = {la.name for la in case.info.layers}
    lines = []
    for name in case.layers[:MAX_LINES]:
        held = f"[{case.variable(name)}]" if name in params else f"{case.variable(name)}.parameters()"
        lines.append(f'optimizer.add_param_group({{"params": {held}}})')
    return "\n".join(lines)


def embedding_code(case: Case) -> str:
    """Return lines that initialize the embeddings of a case with a small standard deviation."""
    tables = [la for la in case.info.layers if "Embedding" in la.module_type and len(la.shape) == 2]
    named = [la for la in tables if la.name in case.layers or la.module in case.layers] or tables
    return "\n".join(f"torch.nn.init.normal_({case.variable(la.name)}, std=0.05)" for la in named[:MAX_LINES])


def output_code(case: Case) -> str:
    """Return the line that removes the last activation, or an empty text if it is not a module of its own."""
    kinds = ("Softmax", "LogSoftmax", "Softmax2d", *SATURATING)
    named = {*case.layers, *filter(None, map(_next_name, case.layers))}
    found = (a for a in reversed(case.info.activations) if a.module_type in kinds or a.name in named)
    last = next(found, None)
    modules = {layer.module for layer in case.info.layers}
    if last is None or not last.name or last.name.removesuffix(f".{last.module_type.lower()}") in modules:
        return ""
    return f"{case.variable(last.name)} = torch.nn.Identity()"


def _next_name(name: str) -> str:
    """Return the name of the module that follows in a torch.nn.Sequential, or an empty name."""
    parent, _, last = name.rpartition(".")
    return f"{parent}.{int(last) + 1}".lstrip(".") if last.isdigit() else ""


def _types(kinds: Iterable[str]) -> str:
    """Return the second argument of an `isinstance` for class names, which may repeat."""
    named = [f"torch.nn.{kind}" for kind in sorted(set(kinds))]
    return named[0] if len(named) == 1 else f"({', '.join(named)})"
