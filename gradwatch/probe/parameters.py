"""List the parameters of a model in order, each with its module and optimizer group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.inert_hook import takes_hooks
from gradwatch.records import LayerInfo

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names that torch.compile, activation checkpointing and FSDP insert into the path of a module."""

HAVE_A_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that leave their fast path in evaluation if they or their parts have hooks, or in a function mode."""

Models = nn.Module | Mapping[str, nn.Module]


def list_parameters(
    models: Models, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
) -> tuple[list[nn.Parameter], tuple[LayerInfo, ...]]:
    """Return every parameter tensor once, in the order of the model, with its description.

    Args:
        models: A model, or several by name; the names prefix the names of the parameters.
        optimizers: One or several; the groups of the second continue the numbering of the first.

    Raises:
        GradwatchError: A parameter is not initialized, so it has no shape.

    Returns:
        The parameters, and their descriptions in the same order. A tied parameter appears at its first place.
    """
    group_of = _groups((optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers)
    params: dict[nn.Parameter, LayerInfo] = {}
    for module_name, module in named_modules(models):
        for own_name, param in module.named_parameters(recurse=False):
            if param in params:  # a tied parameter keeps its first name
                continue
            name = f"{module_name}.{own_name}" if module_name else own_name
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise GradwatchError(
                    f"model: parameter '{name}' has no shape yet, expected an initialized one; "
                    "run one batch through the model before watching it"
                )
            params[param] = LayerInfo(
                name=name,
                module=module_name,
                module_type=_type_name(module),
                shape=tuple(param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                trainable=param.requires_grad,
                group=group_of.get(param),
            )
    return list(params), tuple(params.values())


def named_modules(models: Models) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, in the order of the model, with its path without wrappers."""
    seen: set[nn.Module] = set()  # shared by all models, which may have modules in common
    for prefix, model in models.items() if isinstance(models, Mapping) else [("", models)]:
        # these name their inner model `module`, which is too common a name to strip from paths
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        for path, module in model.named_modules(memo=seen):
            yield without_wrappers(f"{prefix}.{path}"), module


def module_names(models: Models) -> dict[torch.Tensor | None, str]:
    """Return the path of the module of each parameter; None is in no module."""
    return {param: name for name, module in named_modules(models) for param in module.parameters(recurse=False)}


def _type_name(module: nn.Module) -> str:
    # the class of a scripted module is the same for all
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile wraps a module, or compiles its calls."""
    # `torch.compile(module)` makes a wrapper, `module.compile()` replaces the call
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def hookable_modules(models: Models) -> Iterator[nn.Module]:
    """Yield the modules that take hooks, outside compiled modules and outside modules with a fast path."""
    closed: set[nn.Module] = set()  # a parent comes before its parts, so they are known in time
    for _, module in named_modules(models):
        if is_compiled(module) or module in closed or isinstance(module, HAVE_A_FAST_PATH):
            closed.update(module.modules())
        elif takes_hooks(module):
            yield module


def without_wrappers(path: str) -> str:
    """Return the path of a module or parameter without the names that wrappers of torch insert."""
    return ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)


def common_path(paths: Iterable[str]) -> str | None:
    """Return the path of the innermost module that holds all modules of some paths, or None for the whole model."""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or None


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> dict[torch.Tensor, int]:
    """Return the first group of each parameter, counted over all optimizers."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    # reversed, since the last entry of a dict wins
    return {param: i for i, params in reversed([*enumerate(groups)]) for param in params}
