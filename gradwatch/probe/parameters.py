"""Describe a model: its parameters in order, and for each its module and optimizer group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from gradwatch.errors import GradwatchError
from gradwatch.records import LayerInfo

# Names that wrappers put into the path of a module: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

Models = nn.Module | Mapping[str, nn.Module]


def describe(
    models: Models, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
) -> tuple[list[nn.Parameter], tuple[LayerInfo, ...]]:
    """List every parameter tensor once, in the order of the model, and say what it is.

    Args:
        models: A model, or several by name; the names prefix those of their parameters.
        optimizers: One or several; their groups are counted on from one to the next.

    Returns:
        The parameters, and what they are in the same order. A tied parameter stands where it comes first.
    """
    group_of = _groups((optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers)
    params: dict[nn.Parameter, LayerInfo] = {}
    for module_name, module in named_modules(models):
        for own_name, param in module.named_parameters(recurse=False):
            if param in params:
                continue
            name = f"{module_name}.{own_name}" if module_name else own_name
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise GradwatchError(
                    f"model: parameter '{name}' has no shape yet, expected an initialised one; "
                    "run one batch through the model before watching it"
                )
            params[param] = LayerInfo(
                name=name,
                module=module_name,
                module_type=type(module).__name__,
                shape=tuple(param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                trainable=param.requires_grad,
                group=group_of.get(param),
            )
    return list(params), tuple(params.values())


def named_modules(models: Models) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, in the order of the model, under the name that it has without wrappers."""
    seen: set[nn.Module] = set()
    for prefix, model in models.items() if isinstance(models, Mapping) else [("", models)]:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        for path, module in model.named_modules(memo=seen):
            parts = [prefix, *path.split(".")]
            yield ".".join(part for part in parts if part and part not in _WRAPPERS), module


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> dict[torch.Tensor, int]:
    """Return the group of each parameter, counted over all optimizers; the first that holds it where several do."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return {param: i for i, params in reversed([*enumerate(groups)]) for param in params}
