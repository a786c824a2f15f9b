"""The base of instrumented optimizers: a step that is one native call and computes statistics of all it reads."""

# S = statistics (the first six of catalogue.PARAM), L = columns of the row

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradwatch.errors import GradwatchError
from gradwatch.optim.torch_step import TorchStep
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device.sync import to_float

NO_STATE, OTHER_PARAMS, OTHER_MODE = -2, -3, -4  # answers of the native step, see its docstring


class FusedStepResult(NamedTuple):
    """The result of a step by the package's own code.

    Args:
        moved: The parameters that it moved.
        obstacle: Why it did nothing; empty if it stepped.
    """

    moved: Sequence[Tensor] = ()
    obstacle: str = ""


class InstrumentedOptimizer(Optimizer, ABC):
    """An optimizer of torch whose step can compute statistics of the gradients and weights that it reads.

    It takes the arguments of torch's class of the same name, and each loads the other's state_dict. On a CPU the step
    is one native call over all parameters, bit-identical to torch's `fused=True`; on a GPU it is one Triton launch per
    group. It supports dense float32 parameters whose gradients have the same layout. For other parameters, torch's own
    step does the work, a RuntimeWarning gives the reason, and the statistics are read separately.

    `watch` assigns columns to parameters. Then the next step writes to these two, if they are set:

    Attributes:
        gradients_SL: The six statistics of the gradients as the step finds them, unscaled: contiguous float32 on
            their device, of shape (6, L); nan where there is no gradient. None for none.
        changes_2L: Norm of the weight before the step, and that of the update divided by it, of shape (2, L). None for
            none; nothing is written where a GradScaler has the step skipped.
    """

    rule: ClassVar[int]

    gradients_SL: Tensor | None = None
    changes_2L: Tensor | None = None
    _step_supports_amp_scaling = True  # a GradScaler leaves unscaling and skipping to the step
    _column_of: Mapping[Tensor, int] | None = None
    _params: tuple[Tensor, ...] = ()
    _columns_P: Tensor | None = None
    _torch_step: TorchStep | None = None
    _warned: frozenset[str] = frozenset()

    def can_watch(self, params: Sequence[Tensor]) -> bool:
        """Return whether steps can compute statistics: all parameters are its own, on CPU or GPU, and none is watched.

        Args:
            params: Any parameters.
        """
        own = {id(p) for group in self.param_groups for p in group["params"]}
        return self._column_of is None and all(id(p) in own and p.device.type in ("cpu", "cuda") for p in params)

    def watch(self, column_of: Mapping[Tensor, int] | None) -> None:
        """Let steps write statistics of these parameters into these columns; None for no statistics."""
        self._column_of = column_of
        self._columns_P = None
        self.gradients_SL = self.changes_2L = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one optimization step.

        Args:
            closure: Computes the loss and its gradients, and returns the loss.
        """
        if not torch._C._autograd._profiler_enabled():
            return self._step_with_hooks(closure)
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
            return self._step_with_hooks(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it: record_function takes 4 us a step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; one of another mode is refused."""
        super().add_param_group(param_group)
        for mode in ("differentiable", "capturable"):
            if self.param_groups[-1].get(mode):
                self.param_groups.pop()
                name = type(self).__name__
                raise GradwatchError(
                    f"{name}: {mode}=True is not supported by the watched step; use torch.optim.{name}, or leave it out"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for param, values in self.state.items():
            if isinstance(values.get("step"), Tensor):
                values["step"] = values["step"].to(place_of_count(param), torch.float32)

    def _step_with_hooks(self, closure: Callable[[], Any] | None) -> Any:
        args: tuple[Any, ...] = (self,)
        kwargs: dict[str, Any] = {} if closure is None else {"closure": closure}
        for before in chain(_global_optimizer_pre_hooks.values(), self._optimizer_step_pre_hooks.values()):
            changed = before(self, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        loss = self._step(*args[1:], **kwargs)
        self._optimizer_step_code()  # where the profiler looks at the optimizer
        for after in chain(self._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            after(self, args, kwargs)
        return loss

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        params = self.param_groups[0]["params"]
        if params and params[0].is_cuda:
            result = self._step_on_gpu(scale, found)
        else:
            result = self._step_native(scale, is_skipped=_is_set(found))
        if result.obstacle:
            self._warn_once(result.obstacle)
            self._step_by_torch(scale, is_skipped=_is_set(found))
        elif result.moved:
            torch.autograd.graph.increment_version(result.moved)  # autograd expects it of in-place changes to a leaf
        return loss

    def _step_native(self, scale: Tensor | None, *, is_skipped: bool) -> FusedStepResult:
        native = kernels.select_backend()
        if native is None:
            return FusedStepResult(obstacle="the C extension is not there")
        gradients_SL, changes_2L = self.gradients_SL, self.changes_2L
        is_writing = self._column_of is not None and not (gradients_SL is None and changes_2L is None)
        if is_writing and self._columns_P is None:
            self._find_columns()
        fresh: set[Tensor] | None = None
        answer = 0
        for _ in range(3):  # state may be missing, and then columns may be outdated
            moved: list[Tensor] | int = native.step(
                self.rule,
                self.param_groups,
                self.state,
                fresh,
                self._params,
                self._columns_P if is_writing else None,
                gradients_SL if is_writing else None,
                changes_2L if is_writing else None,
                scale,
                is_skipped,
                torch.get_num_threads(),
            )
            if not isinstance(moved, int):
                return FusedStepResult(moved)
            answer = moved
            if answer == NO_STATE:
                fresh = self._make_state()
            elif answer == OTHER_PARAMS:
                self._find_columns()
            else:
                break
        for param in fresh or ():
            del self.state[param]
        return FusedStepResult(obstacle=self._obstacle(answer))

    def _step_on_gpu(self, scale: Tensor | None, found_inf: Tensor | None) -> FusedStepResult:
        """Step by Triton: one launch per group, without waiting for the device."""
        if kernels.triton() is None:
            return FusedStepResult(obstacle="Triton is not there")
        from gradwatch.optim import _triton_step

        fresh, moved = self._make_state(), list[Tensor]()
        obstacle = _triton_step.obstacle(self, self.rule, fresh=fresh, may_skip=found_inf is not None)
        if not obstacle:
            where = (self._column_of or {}, self.gradients_SL, self.changes_2L)
            step = _triton_step.TritonStep(self, self.rule)
            try:
                step.run(*where, fresh=fresh, scale=scale, found_inf=found_inf, moved=moved)
            except Exception as error:  # of the compiler, of any kind: torch can make the step
                if moved:
                    raise
                kernels.give_up_triton(error)
                obstacle = "a kernel failed"
        if obstacle:
            for param in fresh:
                del self.state[param]
        return FusedStepResult(moved, obstacle)

    def _find_columns(self) -> None:
        assert self._column_of is not None, "only called where there are columns"
        self._params = tuple(p for group in self.param_groups for p in group["params"])
        columns = [self._column_of.get(p, -1) for p in self._params]
        self._columns_P = torch.tensor(columns, dtype=torch.int32, device="cpu")

    @abstractmethod
    def _make_state(self) -> set[Tensor]:
        """Create the state of parameters that have a gradient for the first time, and return them."""

    def _obstacle(self, answer: int) -> str:
        """Return why the native step did nothing, from its answer."""
        if answer == OTHER_MODE:
            return "a group has capturable or differentiable set"
        params = [p for group in self.param_groups for p in group["params"]]
        if not 0 <= answer < len(params):
            return "the groups changed during the step"
        param, grad = params[answer], params[answer].grad
        kind = f"{str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} on {param.device}"
        if param.dtype == torch.float32 and param.device.type == "cpu" and grad is not None:
            kind += f", strides {_strides(param)}, with a gradient of {grad.dtype}, strides {_strides(grad)}"
        return f"parameter {answer} is {kind}"

    def _warn_once(self, obstacle: str) -> None:
        if obstacle not in self._warned:
            self._warned |= {obstacle}
            name = type(self).__name__
            text = f"{name} steps by torch.optim.{name}, and reads statistics beside it: {obstacle}"
            warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=5)

    def _step_by_torch(self, scale: Tensor | None, *, is_skipped: bool) -> None:
        if self._torch_step is None:
            self._torch_step = TorchStep(self)
        self._torch_step.run(
            self._column_of or {}, self.gradients_SL, self.changes_2L, scale=scale, is_skipped=is_skipped
        )


def place_of_count(param: Tensor) -> torch.device:
    """Return the device that counts the steps of a parameter: a GPU may decide by itself to skip a step."""
    return param.device if param.is_cuda else torch.device("cpu")


def _is_set(flag: Tensor | None) -> bool:
    """Return whether a GradScaler's flag is set, waiting for the device."""
    return flag is not None and to_float(flag) != 0


def _strides(tensor: Tensor) -> str:
    return str(tensor.stride()) if tensor.layout == torch.strided else f"none ({tensor.layout})"
