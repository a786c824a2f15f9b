"""Multiply the Hessian of a loss with vectors, and compare a product with a difference of gradients."""

# P = parameter tensors that the loss depends on

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.hessian.product_check import check_product, norm, steps_along, values_at
from gradwatch.probe.untouched import untouched

NO_SECOND_DERIVATIVE = (
    "{}: an operation of the loss has no second derivative: {}; replace it by one that has, for attention with "
    "`with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):` around the forward pass in `loss`"
)
NOT_FINITE = (
    "{}: the second derivative of the loss is not finite at these weights; an operation such as the square root "
    "or the norm of 0 has none: add a small constant inside it"
)
WRONG = (
    "{}: autograd's second derivative of the loss is wrong: a product with the Hessian has norm {{:.3g}} by autograd "
    "and {{:.3g}} by differences of gradients, and the two are {{:.3g}} apart. The loss probably uses a custom "
    "autograd Function whose backward leaves the graph (detach, NumPy, its own kernel): write that backward with "
    "differentiable torch operations. If there is none, check that `loss` computes the loss from the weights at each "
    "call"
)


@final
class Hessian:
    """The Hessian of a loss at the current weights, as an operator on vectors of shape (N,).

    Args:
        model: Model with the trainable parameters.
        loss: Computes the loss from the model, with its graph.
        caller: Name of the public function, for messages.

    Attributes:
        params: The parameters that the loss depends on.
        value: The loss.
        epsilon: Epsilon of the coarsest dtype, which limits the precision of a product and of a difference.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], caller: str) -> None:
        self._model, self._loss, self._caller = model, loss, caller
        result = loss()
        self._grads_P, self.params = _gradients(result, [p for p in model.parameters() if p.requires_grad], caller)
        self.value = to_float(result.detach())
        self.epsilon = max(torch.finfo(p.dtype).eps for p in self.params)

    @property
    def is_zero(self) -> bool:
        """Whether the loss is linear in every parameter."""
        return not any(g.requires_grad for g in self._grads_P)

    @property
    def slope(self) -> float:
        """Return the norm of the gradient."""
        return norm([g.detach() for g in self._grads_P])

    def times(self, vector: Tensor) -> Tensor:
        """Return the product with a vector; only inside of the context of `hessian_of`."""
        try:
            product_P = _times_hessian(self._grads_P, self.params, split(vector, self.params))
        except RuntimeError as error:
            raise GradwatchError(NO_SECOND_DERIVATIVE.format(self._caller, error)) from error
        product = flat(product_P, like=vector)
        if not math.isfinite(to_float(product.sum())):
            raise GradwatchError(NOT_FINITE.format(self._caller))
        return product

    def check(self, direction: Tensor, product: Tensor) -> None:
        """Compare a product with a difference of gradients; after the context of `hessian_of`.

        Raises:
            GradwatchError: Autograd's product is wrong.
        """
        direction_P = split(direction, self.params)
        check_product(
            lambda step: values_at(self._model, self._gradients_again, self.params, direction_P, step),
            [g.detach() for g in self._grads_P],
            split(product, self.params),
            steps=steps_along(self.params, direction_P, self.epsilon),
            epsilon=self.epsilon,
            wrong=WRONG.format(self._caller),
        )

    def _gradients_again(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self._loss(), self.params, retain_graph=True, materialize_grads=True)

    def random(self, seed: int) -> Tensor:
        """Return a random vector."""
        return _random(self.params, seed)


@contextmanager
def hessian_of(model: nn.Module, loss: Callable[[], Tensor], *, caller: str) -> Iterator[Hessian]:
    """Yield the Hessian of a loss; gradients, buffers and generators are restored afterwards.

    Raises:
        GradwatchError: The loss depends on no trainable parameter or is not finite, or a parameter is complex.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    # with complex parameters, autograd's products belong to no symmetric matrix
    if complex_dtype := next((p.dtype for p in params if p.is_complex()), None):
        raise GradwatchError(
            f"{caller}: a parameter has dtype {complex_dtype}, expected real parameters; "
            "keep the real and the imaginary part as two parameters, or set requires_grad to False"
        )
    with untouched(model, params), torch.enable_grad():
        yield Hessian(model, loss, caller)


def named_vector(model: nn.Module, vector: Mapping[str, Tensor], *, caller: str) -> dict[str, Tensor]:
    """Return a direction with a tensor for each trainable parameter, zeros for those that are not named.

    Raises:
        GradwatchError: A name is unknown, or a shape differs from that of the parameter.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, part in vector.items():
        if name not in named:
            raise GradwatchError(f"{caller}: there is no trainable parameter '{name}'{did_you_mean(name, named)}")
        if part.shape != named[name].shape:
            raise GradwatchError(
                f"{caller}: '{name}' has shape {tuple(part.shape)}, expected {tuple(named[name].shape)}"
            )
    return {n: vector[n].detach().to(p) if n in vector else torch.zeros_like(p) for n, p in named.items()}


def _gradients(value: Tensor, params: Sequence[Tensor], caller: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients, with their graph if they have one, and the parameters that the loss depends on."""
    if not value.requires_grad or not params:
        raise GradwatchError(f"{caller}: the loss depends on no trainable parameter of the model, expected a graph")
    if not math.isfinite(number := to_float(value.detach())):
        raise GradwatchError(f"{caller}: the loss is {number}, expected a finite number; gradwatch.locate says why")
    # with a graph, to differentiate again; unused parameters have no curvature
    found = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
    pairs = [(g, p) for g, p in zip(found, params, strict=True) if g is not None]
    return [g for g, _ in pairs], [p for _, p in pairs]


def _times_hessian(grads_P: Sequence[Tensor], params: Sequence[Tensor], vector_P: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of the Hessian and a vector: the gradient of the gradients' product with the vector."""
    bent = [(g, v) for g, v in zip(grads_P, vector_P, strict=True) if g.requires_grad]  # the others are constant
    if not bent:
        return [torch.zeros_like(p) for p in params]
    grads, vectors = zip(*bent, strict=True)
    return [*torch.autograd.grad(grads, params, grad_outputs=vectors, retain_graph=True, materialize_grads=True)]


def _random(params: Sequence[Tensor], seed: int) -> Tensor:
    """Return a random vector for all parameters, on the device of the first one, at least as precise as float32."""
    generator = torch.Generator().manual_seed(seed)
    # on the CPU in float64, so that the vector is the same for every device and dtype
    drawn_P = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
    return flat(drawn_P, like=torch.empty(0, dtype=dtype, device=params[0].device))


def flat(parts_P: Sequence[Tensor], *, like: Tensor) -> Tensor:
    return torch.cat([part.to(like).flatten() for part in parts_P])


def split(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    parts_P = vector.split([p.numel() for p in params])
    return [part.view(p.shape).to(p) for part, p in zip(parts_P, params, strict=True)]
