"""Define variations: other ways to write the same training, none of which is a fault.

A fault should be found in each of them, and a healthy script should stay without an alarm.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint_sequential

from scripts.fault_zoo.mutations import NotApplicableError
from scripts.fault_zoo.protocol import Finding, Monitor

SKIPPED_STEPS = 3
"""Number of first steps that overflow with a gradient scaler."""


@dataclass(slots=True)
class Told:
    """What a varied loop tells its monitor.

    Attributes:
        options: Options of the call that attaches it.
        every: Updates of the script per call.
        is_number: Whether the loss is passed as a number.
        has_batch: Whether the batch is passed.
    """

    options: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    is_number: bool = False
    has_batch: bool = True


Vary = Callable[[nn.Module, Optimizer, Told], None]
"""Changes a loop whose model and optimizer are ready."""


def _backward(change: Callable[[Tensor], Tensor]) -> None:
    """Let each loss be changed before its backward pass, once per process."""
    if hasattr(Tensor.backward, "__wrapped__"):
        return
    true: Callable[..., None] = Tensor.backward

    @functools.wraps(true)
    def backward(self: Tensor, *args: Any, **options: Any) -> None:
        true(change(self), *args, **options)

    Tensor.backward = backward  # type: ignore[method-assign]


def _need(is_applicable: bool) -> None:
    if not is_applicable:
        raise NotApplicableError


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _Scaled:
    """A gradient scaler that the whole loop shares. Its first steps overflow, as those of float16 do."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        self.passes = 0
        self.optimizers: list[Optimizer] = []

    def scale(self, loss: Tensor) -> Tensor:
        self.passes += 1
        scaled = self.scaler.scale(loss)
        return scaled * 1e38 * 1e38 if self.passes <= SKIPPED_STEPS else scaled

    def clip(self, true: Callable[..., Tensor], params: Any, *args: Any, **options: Any) -> Tensor:
        params = [params] if isinstance(params, Tensor) else list(params)
        mine = {id(param) for param in params}
        for optimizer in self.optimizers:
            if any(id(param) in mine for param in _held(optimizer)):
                try:
                    self.scaler.unscale_(optimizer)
                except (RuntimeError, AssertionError):
                    continue
        return true(params, *args, **options)


_SCALED: list[_Scaled] = []


def _gradient_scaler(model: Any, optimizer: Any, told: Told) -> None:
    _need("scaler" not in told.options and type(optimizer).__name__ != "LBFGS")
    if not _SCALED:
        _SCALED.append(_Scaled())
        _backward(_SCALED[0].scale)
        true = nn.utils.clip_grad_norm_
        nn.utils.clip_grad_norm_ = functools.partial(_SCALED[0].clip, true)
    scaled = _SCALED[0]
    scaled.optimizers.append(optimizer)
    true_step = optimizer.step

    def step(closure: Any = None) -> None:
        optimizer.step = true_step
        scaled.scaler.step(optimizer)
        scaled.scaler.update()
        optimizer.step = step

    optimizer.step = step
    told.options["scaler"] = scaled.scaler


def _accumulation(model: Any, optimizer: Any, told: Told) -> None:
    _need("accumulate" not in told.options and "scaler" not in told.options and type(optimizer).__name__ != "LBFGS")
    _backward(lambda loss: loss / 2)
    calls = [0]
    true_step, true_zero, true_model_zero = optimizer.step, optimizer.zero_grad, model.zero_grad

    def step(*args: Any, **rest: Any) -> Any:
        calls[0] += 1
        return true_step(*args, **rest) if calls[0] % 2 == 0 else None

    def zero_grad(*args: Any, **rest: Any) -> None:
        if calls[0] % 2 == 0:
            true_zero(*args, **rest)

    def model_zero_grad(*args: Any, **rest: Any) -> None:
        if calls[0] % 2 == 0:
            true_model_zero(*args, **rest)

    optimizer.step, optimizer.zero_grad, model.zero_grad = step, zero_grad, model_zero_grad
    told.options["accumulate"] = told.every = 2


def _bfloat16(model: Any, optimizer: Any, told: Told) -> None:
    true = model.forward

    def forward(*args: Any, **rest: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = true(*args, **rest)
        return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else output

    model.forward = forward


def _groups(model: Any, optimizer: Any, told: Told) -> None:
    _need(type(optimizer).__name__ != "LBFGS" and not hasattr(optimizer.step, "_wrapped_by_lr_sched"))
    for group in list(optimizer.param_groups):
        small = [param for param in group["params"] if param.ndim < 2]
        if small and len(small) < len(group["params"]):
            group["params"] = [param for param in group["params"] if param.ndim > 1]
            optimizer.add_param_group({**group, "params": small})


def _fused(model: Any, optimizer: Any, told: Told) -> None:
    _need(all("fused" in group and not group.get("differentiable") for group in optimizer.param_groups))
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False


def _one_by_one(model: Any, optimizer: Any, told: Told) -> None:
    _need(all("foreach" in group for group in optimizer.param_groups))
    for group in optimizer.param_groups:
        group["foreach"] = False


def _compiled(model: Any, optimizer: Any, told: Told) -> None:
    model.compile(backend="aot_eager")


def _checkpointing(model: Any, optimizer: Any, told: Told) -> None:
    longest = [
        module
        for module in model.modules()
        if type(module) is nn.Sequential
        and len(module) > 3
        and not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    ]
    _need(bool(longest))
    for module in longest:

        def forward(value: Tensor, module: nn.Sequential = module) -> Any:
            if torch.is_grad_enabled():
                return checkpoint_sequential(list(module), 2, value, use_reentrant=False)
            for child in module:
                value = child(value)
            return value

        module.forward = forward  # type: ignore[method-assign]


def _average(model: Any, optimizer: Any, told: Told) -> None:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))


def _last_inputs(model: nn.Module) -> list[Any]:
    last: list[Any] = []

    def keep(module: nn.Module, args: Any, rest: Any) -> None:
        if torch.is_grad_enabled():
            last[:] = [(args, rest)]

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return last


def _every(optimizer: Optimizer, steps: int, act: Callable[[], None]) -> None:
    count = [0]

    def after(*_: Any) -> None:
        count[0] += 1
        if count[0] % steps == 0:
            act()

    optimizer.register_step_post_hook(after)


def _validation(model: Any, optimizer: Any, told: Told) -> None:
    last = _last_inputs(model)

    def validate() -> None:
        if last:
            modes = {module: module.training for module in model.modules()}
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(*last[0][0], **last[0][1])
            for module, mode in modes.items():
                module.training = mode

    _every(optimizer, 10, validate)


def _copies(model: Any, optimizer: Any, told: Told) -> None:
    last = _last_inputs(model)
    best: list[nn.Module] = []

    def keep() -> None:
        best[:] = [copy.deepcopy(model).eval()]
        if last:
            with torch.no_grad():
                best[0](*last[0][0], **last[0][1])

    _every(optimizer, 20, keep)


def _reload(model: Any, optimizer: Any, told: Told) -> None:
    def reload() -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    _every(optimizer, 25, reload)


def _clipping(model: Any, optimizer: Any, told: Told) -> None:
    _need("scaler" not in told.options and type(optimizer).__name__ != "LBFGS")

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for p in _held(optimizer) if p.grad is not None], 1.0)

    optimizer.register_step_pre_hook(clip)


def _warm_up(model: Any, optimizer: Any, told: Told) -> None:
    _need(type(optimizer).__name__ != "LBFGS" and not hasattr(optimizer.step, "_wrapped_by_lr_sched"))
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    optimizer.register_step_post_hook(lambda *_: schedule.step())


def _penalty(model: Any, optimizer: Any, told: Told) -> None:
    params = [param for param in model.parameters() if param.requires_grad and param.is_floating_point()]
    _backward(lambda loss: loss + 1e-6 * sum(param.square().sum() for param in params))


def _zeros(model: Any, optimizer: Any, told: Told) -> None:
    true, true_model = optimizer.zero_grad, model.zero_grad
    optimizer.zero_grad = lambda set_to_none=False: true(set_to_none=False)
    model.zero_grad = lambda set_to_none=False: true_model(set_to_none=False)


def _number(model: Any, optimizer: Any, told: Told) -> None:
    told.is_number, told.has_batch = True, False


def _no_batch(model: Any, optimizer: Any, told: Told) -> None:
    told.has_batch = False


def _another_seed(model: Any, optimizer: Any, told: Told) -> None:
    """Do nothing: the seed is another one before the script begins."""


VARIATIONS: dict[str, Vary] = {
    "gradient scaler": _gradient_scaler,
    "accumulation": _accumulation,
    "bfloat16": _bfloat16,
    "two groups": _groups,
    "fused optimizer": _fused,
    "optimizer one by one": _one_by_one,
    "compiled": _compiled,
    "activation checkpointing": _checkpointing,
    "average of the weights": _average,
    "validation": _validation,
    "copies of the model": _copies,
    "state loaded again": _reload,
    "clipping": _clipping,
    "warm-up of ten steps": _warm_up,
    "penalty in the loss": _penalty,
    "gradients set to zero": _zeros,
    "loss as a number": _number,
    "no batch": _no_batch,
    "another seed": _another_seed,
}


class VariedMonitor:
    """Tell a monitor of the steps as a variation does."""

    def __init__(self, monitor: Monitor, told: Told) -> None:
        self._monitor, self._told, self._calls = monitor, told, 0

    def step(self, loss: Any, **context: Any) -> None:
        """Pass the end of a step on."""
        self._calls += 1
        if self._calls % self._told.every:
            return
        if not self._told.has_batch:
            context.pop("batch", None)
        if self._told.is_number:
            loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        self._monitor.step(loss, **context)

    def findings(self) -> Sequence[Finding]:
        """Return what the monitor has found."""
        return self._monitor.findings()

    def close(self) -> None:
        """Let the monitor write the rest."""
        if close := getattr(self._monitor, "close", None):
            close()
