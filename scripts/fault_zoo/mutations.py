"""Define mutations: systematic faults that can be planted into most training scripts.

Most are operators of DeepCrime (Humbatova, Jahangirova & Tonella 2021, https://doi.org/10.1145/3460319.3464825), or
kinds of the taxonomy behind it (Humbatova et al. 2020, https://doi.org/10.1145/3377811.3380395). Their sizes were
chosen before gradwatch was run on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Plant = Callable[[nn.Module, Optimizer, random.Random], None]

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
HIDDEN = (nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU)

OVERSHOOT = (
    "dead-relu",
    "exploding-gradient",
    "gradient-spike",
    "learning-rate-too-high",
    "loss-plateau",
    "non-finite",
    "oscillating-gradient",
    "saturated-activation",
)
"""Kinds that follow from updates that are too large."""

STANDSTILL = ("learning-rate-too-low", "loss-plateau")
SCALE = ("dead-relu", "exploding-gradient", "learning-rate-too-high", "poor-initialization", "saturated-activation")
"""Kinds that follow from weights or inputs that are too large."""


class NotApplicableError(Exception):
    """A model or an optimizer has nothing that a mutation could change."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault to plant.

    Attributes:
        plant: Changes a model and its optimizer, or a function of torch, before the first step.
        kinds: Kinds of findings that are right.
    """

    plant: Plant
    kinds: tuple[str, ...]


def _need(is_applicable: bool) -> None:
    if not is_applicable:
        raise NotApplicableError


def _layers(model: nn.Module) -> list[Any]:
    """Return the linear layers and convolutions of a model, at least three."""
    layers = [module for module in model.modules() if isinstance(module, LINEAR)]
    _need(len(layers) > 2)
    return layers


def _set_of_groups(key: str, change: Callable[[Any], Any]) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        groups = [group for group in optimizer.param_groups if key in group]
        _need(bool(groups))
        for group in groups:
            group[key] = change(group[key])

    return plant


def _rate(factor: float) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        for group in optimizer.param_groups:
            for key in {"lr", "initial_lr"} & group.keys():
                group[key] *= factor

    return plant


def _rate_after_each_step(factor: float) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        optimizer.register_step_post_hook(lambda *_: _rate(factor)(model, optimizer, rng))

    return plant


def _all_weights(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        matrices = [param for param in model.parameters() if param.ndim > 1 and param.requires_grad]
        _need(len(matrices) > 1)
        with torch.no_grad():
            for param in matrices:
                param.copy_(change(param))

    return plant


def _one_layer(factor: float) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        layer = rng.choice(_layers(model)[1:-1])
        with torch.no_grad():
            for param in layer.parameters():
                param.mul_(factor)

    return plant


def _one_rate(factor: float) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        mine = {id(param) for param in rng.choice(_layers(model)[:-1]).parameters()}
        (group, *others) = optimizer.param_groups
        own = [param for param in group["params"] if id(param) in mine]
        _need(bool(own) and not others)
        group["params"] = [param for param in group["params"] if id(param) not in mine]
        optimizer.add_param_group({**group, "params": own, "lr": factor * group["lr"]})

    return plant


def _dead_bias(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    found, before = [], None
    for module in model.modules():
        if isinstance(module, LINEAR):
            before = module
        elif isinstance(module, nn.ReLU) and before is not None and before.bias is not None:
            found.append(before)
    _need(bool(found))
    layer = rng.choice(found)
    with torch.no_grad():
        nn.init.constant_(
            cast("Tensor", layer.bias), -5 - 20 * float(layer.weight.abs().mean()) * layer.weight[0].numel() ** 0.5
        )


def _replace_hidden(new: Callable[[], nn.Module]) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        places = [
            (parent, name)
            for parent in model.modules()
            for name, child in parent.named_children()
            if type(child) in HIDDEN
        ]
        _need(len(places) > 1)
        for parent, name in places:
            setattr(parent, name, new())

    return plant


def _forget(*names: str) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        for name in names:
            for owner in (optimizer, model):
                if hasattr(owner, name):
                    setattr(owner, name, lambda *_, **__: None)

    return plant


def _leave_out(share: float) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        held = [param for group in optimizer.param_groups for param in group["params"]]
        _need(len(held) > 3)
        left_out = {id(param) for param in held[: int(share * len(held))]}
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) not in left_out]

    return plant


def _detach(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    rng.choice(_layers(model)[:-1]).register_forward_hook(lambda module, inputs, output: output.detach())


def _inputs(change: Callable[[Tensor], Tensor], *, at: int | None = None) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        steps = [0]

        def count(*_: Any) -> None:
            steps[0] += 1

        def changed(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            place = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()), None)
            if place is None or (at is not None and steps[0] != at):
                return args
            return (*args[:place], change(args[place]), *args[place + 1 :])

        optimizer.register_step_post_hook(count)
        model.register_forward_pre_hook(changed)

    return plant


def _first_nan(values: Tensor) -> Tensor:
    values = values.clone()
    values[(0,) * values.ndim] = torch.nan
    return values


def _cross_entropy(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        true = F.cross_entropy

        def cross_entropy(scores: Tensor, labels: Tensor, *args: Any, **options: Any) -> Tensor:
            return true(*change(scores, labels), *args, **options)

        F.cross_entropy = cross_entropy  # type: ignore[assignment]

    return plant


def _shuffled(labels: Tensor) -> Tensor:
    return labels[torch.randperm(len(labels))]


def _backward(factor: float, *, only: str | None = None) -> Plant:
    def plant(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        _need(only in (None, type(optimizer).__name__))
        true: Callable[..., None] = Tensor.backward

        def backward(self: Tensor, *args: Any, **options: Any) -> None:
            true(factor * self, *args, **options)

        Tensor.backward = backward  # type: ignore[method-assign]

    return plant


def _momentum(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.999, group["betas"][1])
        else:
            _need("momentum" in group)
            group["momentum"] = 0.999


def _clip(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    _need(type(optimizer).__name__ == "SGD")

    def clip(*_: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        nn.utils.clip_grad_norm_(params, 1e-4)

    optimizer.register_step_pre_hook(clip)


def _always_in_evaluation(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    _need(any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()))
    model.eval()
    model.train = lambda mode=True: model  # type: ignore[method-assign]


def _hard_dropout(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    drops = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    _need(bool(drops))
    for module in drops:
        module.p = 0.95


def _keep_graphs(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    true: Callable[..., None] = Tensor.backward
    kept: list[Tensor] = []

    def backward(self: Tensor, *args: Any, **options: Any) -> None:
        kept.append(self + 0)
        true(self, *args, **{**options, "retain_graph": True})

    Tensor.backward = backward  # type: ignore[method-assign]


MUTATIONS: dict[str, Mutation] = {
    "learning rate x 100": Mutation(_rate(100), OVERSHOOT),
    "learning rate x 1e-4": Mutation(_rate(1e-4), STANDSTILL),
    "learning rate + 8 % at each step": Mutation(_rate_after_each_step(1.08), OVERSHOOT),
    "learning rate - 10 % at each step": Mutation(_rate_after_each_step(0.9), STANDSTILL),
    "rate of one layer x 1000": Mutation(_one_rate(1000), (*OVERSHOOT, "layer-imbalance")),
    "momentum 0.999": Mutation(_momentum, OVERSHOOT),
    "eps 1": Mutation(_set_of_groups("eps", lambda _: 1.0), STANDSTILL),
    "weight decay 0.5": Mutation(
        _set_of_groups("weight_decay", lambda _: 0.5),
        (*STANDSTILL, "dead-layer", "dead-relu", "not-optimized", "rising-sparsity", "vanishing-gradient"),
    ),
    "gradients clipped to 1e-4 (SGD)": Mutation(_clip, STANDSTILL),
    "loss x 1000 (SGD)": Mutation(_backward(1000, only="SGD"), OVERSHOOT),
    "loss x 1e-5 (SGD)": Mutation(_backward(1e-5, only="SGD"), STANDSTILL),
    "loss of the opposite sign": Mutation(_backward(-1), OVERSHOOT),
    "weights x 10": Mutation(_all_weights(lambda weight: 10 * weight), SCALE),
    "weights x 0.05": Mutation(
        _all_weights(lambda weight: 0.05 * weight), ("loss-plateau", "poor-initialization", "vanishing-gradient")
    ),
    "weights of 0": Mutation(
        _all_weights(torch.zeros_like),
        ("dead-layer", "dead-relu", "loss-plateau", "no-gradient", "poor-initialization", "vanishing-gradient"),
    ),
    "equal weights": Mutation(_all_weights(lambda weight: torch.full_like(weight, float(weight.std()))), SCALE),
    "one layer x 30": Mutation(_one_layer(30), (*SCALE, "layer-imbalance")),
    "one layer of 0": Mutation(
        _one_layer(0), ("dead-layer", "dead-relu", "no-gradient", "poor-initialization", "vanishing-gradient")
    ),
    "biases that silence a ReLU": Mutation(_dead_bias, ("dead-layer", "dead-relu", "no-gradient")),
    "sigmoid for each hidden activation": Mutation(
        _replace_hidden(nn.Sigmoid), ("loss-plateau", "saturated-activation", "vanishing-gradient")
    ),
    "no zero_grad": Mutation(_forget("zero_grad"), ("missing-zero-grad",)),
    "no optimizer.step": Mutation(_forget("step"), ("not-optimized",)),
    "half of the parameters left out": Mutation(_leave_out(0.5), ("not-optimized",)),
    "detach behind a layer": Mutation(_detach, ("dead-layer", "no-gradient")),
    "inputs x 255": Mutation(_inputs(lambda values: 255 * values), (*SCALE, *OVERSHOOT, "vanishing-gradient")),
    "NaN in the inputs of step 30": Mutation(_inputs(_first_nan, at=30), ("non-finite",)),
    "inputs x 10,000 in step 40": Mutation(_inputs(lambda values: 1e4 * values, at=40), OVERSHOOT),
    "shuffled labels": Mutation(_cross_entropy(lambda scores, labels: (scores, _shuffled(labels))), ("loss-plateau",)),
    "softmax before the cross entropy": Mutation(
        _cross_entropy(lambda scores, labels: (scores.softmax(1), labels)), ("probabilities-into-loss",)
    ),
    "ReLU before the cross entropy": Mutation(
        _cross_entropy(lambda scores, labels: (scores.relu(), labels)), ("probabilities-into-loss", "dead-relu")
    ),
    "evaluation mode": Mutation(_always_in_evaluation, ("train-eval-mismatch",)),
    "dropout of 0.95": Mutation(_hard_dropout, ("loss-plateau", "train-eval-mismatch")),
    "graphs kept": Mutation(_keep_graphs, ("graph-leak", "memory-growth")),
}
