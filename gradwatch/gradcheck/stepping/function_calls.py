"""Record every call of a custom autograd Function in a step, and replace chosen ones by their declared gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from gradwatch.gradcheck.stepping.engine import is_inner_pass
from gradwatch.gradcheck.stepping.tensors import copied, dense, inner, is_continuous
from gradwatch.state.rng import random_state


@final
@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a custom Function in the step.

    Args:
        function: The Function.
        index: Number of the call in the step, over all Functions.
        given: The arguments themselves.
        args: Copies of the arguments from before the call.
        outputs: Copies of the result.
        needs: Whether each argument takes a gradient.
        ctx: The context, which is also the node of the graph.
        random: State of the random generators before the call.
        grad_outputs: Gradients that its backward got, or None if it did not run.
        grad_inputs: Gradients that its backward returned, aligned with the arguments.
    """

    function: type[Function]
    index: int
    given: tuple[Any, ...]
    args: tuple[Any, ...]
    needs: tuple[bool, ...]
    outputs: Any = None
    ctx: Any = None
    random: Any = None
    grad_outputs: tuple[Any, ...] | None = None
    grad_inputs: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the Function."""
        return self.function.__name__

    @property
    def ran_backward(self) -> bool:
        """Return whether the call took part in the backward pass."""
        return self.grad_outputs is not None and any(isinstance(g, Tensor) for g in self.grad_outputs)

    def gradient(self, i: int) -> Tensor | None:
        """Return the gradient that backward returned for an argument, summed to its shape, or None."""
        grad = self.grad_inputs[i] if i < len(self.grad_inputs) else None
        if not isinstance(grad, Tensor):
            return None
        grad = dense(grad, self.args[i])
        return grad if grad.shape == self.args[i].shape else grad.sum_to_size(self.args[i].shape)


def is_deliberate(function: type[Function]) -> bool:
    """Return whether a Function declares that its backward is not the derivative of its forward."""
    return getattr(function, "deliberate", False) is True


def user_functions(base: type[Function] = Function) -> Iterator[type[Function]]:
    """Yield the custom Functions of the process that are not torch's own."""
    for cls in base.__subclasses__():
        if not cls.__module__.startswith("torch."):
            yield cls
        yield from user_functions(cls)


def takes_ctx(function: type[Function]) -> bool:
    """Return whether `forward` gets the context: the style without `setup_context`."""
    return function.setup_context is Function.setup_context


@final
@dataclass(slots=True)
class CallLog:
    """The calls of a run, in order.

    Args:
        held: Calls of the first run whose outputs are kept constant, by index.
        copies: Whether to copy arguments and results, to check the calls afterwards.
        surrogate: Contribution of the held calls to the loss: declared gradients times the change of their inputs.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    held: dict[int, RecordedCall] = field(default_factory=dict)
    surrogate: float = 0.0
    count: int = 0
    depth: int = 0
    copies: bool = True

    def begin(self) -> None:
        """Start a run."""
        self.calls, self.surrogate, self.count, self.depth = [], 0.0, 0, 0

    def forward(self, function: type[Function], original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the forward of a Function, recorded or held."""
        # nested, or recomputed by a checkpoint, or under vmap and its like
        inside = self.depth or is_inner_pass() or torch._C._are_functorch_transforms_active()
        ctx, given = (args[0], args[1:]) if takes_ctx(function) else (None, args)
        if inside:
            return original(*args)
        self.depth += 1
        try:
            return self._outermost(function, original, args, ctx, given)
        finally:
            self.depth -= 1

    def _outermost(
        self, function: type[Function], original: Callable[..., Any], args: tuple[Any, ...], ctx: Any, given: Any
    ) -> Any:
        index, self.count = self.count, self.count + 1
        held = self.held.get(index)
        call = RecordedCall(
            function=function,
            index=index,
            given=given,
            args=copied(given) if self.copies else given,
            needs=tuple(isinstance(a, Tensor) and a.requires_grad for a in given),
            ctx=ctx,
            random=random_state() if self.copies else None,
        )
        result = original(*args)
        if held is not None and held.function is function:
            self.surrogate += sum(
                inner(grad, now) - inner(grad, before)
                for i, (now, before) in enumerate(zip(given, held.args, strict=True))
                if isinstance(now, Tensor) and (grad := held.gradient(i)) is not None
            )
            return _kept(result, held.outputs, given)
        call.outputs = copied(result) if self.copies else None
        self.calls.append(call)
        return result

    def setup(self, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run `setup_context`, and remember its context."""
        if self.calls and self.calls[-1].ctx is None and not self.depth:
            self.calls[-1].ctx = args[0]
        return original(*args)

    def backward(self, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the backward of a Function, and record its arguments and its result."""
        ctx, *grads = args
        call = next((c for c in self.calls if c.ctx is ctx), None) if self.copies else None
        given = copied(tuple(grads)) if call else ()
        result = original(*args)
        if call:
            call.grad_outputs = given
            call.grad_inputs = copied(tuple(result) if isinstance(result, (tuple, list)) else (result,))
        return result


def _kept(result: Any, outputs: Any, given: Sequence[Any]) -> Any:
    """Return the held outputs; those that are written into an argument stay that argument."""

    def keep(now: Any, before: Any) -> Any:
        if not isinstance(before, Tensor):
            return before
        return now.copy_(before) if any(now is a for a in given) else before.clone()

    if isinstance(outputs, (tuple, list)):
        return type(outputs)(keep(now, before) for now, before in zip(result, outputs, strict=True))
    return keep(result, outputs)


@contextmanager
def followed(log: CallLog) -> Iterator[CallLog]:
    """Send every call of a custom Function through a log while the context is entered."""
    undo: list[tuple[type[Function], str, Any]] = []

    def wrap(cls: type[Function], name: str, through: Callable[..., Any]) -> None:
        own = cls.__dict__.get(name)
        original = getattr(cls, name)
        undo.append((cls, name, own))
        setattr(cls, name, staticmethod(lambda *args: through(original, args)))

    try:
        for cls in dict.fromkeys(user_functions()):
            if getattr(cls, "forward", None) is Function.forward:
                continue  # a base class
            # subclasses that share a method wrap it once more: the depth keeps the inner one silent
            wrap(cls, "forward", lambda f, a, cls=cls: log.forward(cls, f, a))
            if not takes_ctx(cls):
                wrap(cls, "setup_context", log.setup)
            name = "vjp" if getattr(cls, "vjp", None) is not getattr(Function, "vjp", None) else "backward"
            wrap(cls, name, log.backward)
        yield log
    finally:
        for cls, name, own in reversed(undo):
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)


def method(function: type[Function], name: str) -> Any:
    """Return the user's own method of a Function, for its source."""
    found = inspect.getattr_static(function, name, None)
    found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    return inspect.unwrap(found) if found is not None else None


def tensors_of(values: Any) -> Sequence[Tensor]:
    """Return the float tensors of a nested value."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and is_continuous(t)]
