"""Differentiate along a direction of the weights: `gradwatch.hvp` and `gradwatch.jvp`."""

# P = parameter tensors

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.hessian.hessian import flat, hessian_of, named_vector, split
from gradwatch.probe.hessian.product_check import check_product, steps_along, values_at
from gradwatch.probe.untouched import untouched

WRONG = (
    "jvp: autograd's derivative of the outputs is wrong: it has norm {:.3g} by autograd and {:.3g} by differences, and "
    "the two are {:.3g} apart. The backward of a custom autograd Function is wrong, or leaves the graph; "
    "gradwatch.check names it"
)


def hvp(model: nn.Module, loss: Callable[[], Tensor], vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply the Hessian of a loss with a vector.

    The product is the gradient of the gradient's product with the vector (Pearlmutter 1994). It is compared with a
    difference of gradients, because autograd treats a backward outside its graph as a constant. Gradients, weights,
    buffers and the state of all generators stay unchanged.

    Args:
        model: Model with the trainable parameters of the Hessian.
        loss: Computes the loss of one fixed batch from the model, with its graph, as for `gradwatch.curvature`.
        vector: Tensor for each parameter, by its name; zeros for those that are left out.

    Returns:
        The product, by the name of the parameter.

    Raises:
        GradwatchError: A name or shape does not fit, the loss depends on no trainable parameter or is not finite, or
            an operation has no second derivative or a wrong one.
    """
    named = named_vector(model, vector, caller="hvp")
    zeros = {n: torch.zeros_like(v) for n, v in named.items()}
    names = {id(p): n for n, p in model.named_parameters()}
    with hessian_of(model, loss, caller="hvp") as hessian:
        wide = torch.float64 if any(p.dtype == torch.float64 for p in hessian.params) else torch.float32
        like = torch.empty(0, dtype=wide, device=hessian.params[0].device)
        direction = flat([named[names[id(p)]] for p in hessian.params], like=like)
        if not to_float(torch.linalg.vector_norm(direction)):
            return zeros
        product = hessian.times(direction)
    hessian.check(direction, product)
    parts_P = split(product, hessian.params)
    return zeros | {names[id(p)]: part for p, part in zip(hessian.params, parts_P, strict=True)}


def jvp(model: nn.Module, outputs: Callable[[], Tensor], vector: Mapping[str, Tensor]) -> Tensor:
    """Differentiate outputs of a model along a vector of its weights: the product of the Jacobian and the vector.

    It is computed by two backward passes, so that no operation needs a forward mode, and compared with differences of
    the outputs. Gradients, weights, buffers and the state of all generators stay unchanged.

    Args:
        model: Model with the trainable parameters.
        outputs: Computes a tensor of any shape from the model, with its graph, for one fixed batch.
        vector: Tensor for each parameter, by its name; zeros for those that are left out.

    Returns:
        The derivative, of the shape of the outputs.

    Raises:
        GradwatchError: A name or shape does not fit, the outputs depend on no trainable parameter, or an operation
            has a backward that cannot be differentiated or is wrong.
    """
    named = named_vector(model, vector, caller="jvp")
    params_P = [p for p in model.parameters() if p.requires_grad]
    direction_P = [*named.values()]
    with untouched(model, params_P), torch.enable_grad():
        values = outputs()
        if not params_P or not values.requires_grad:
            raise GradwatchError("jvp: the outputs depend on no trainable parameter of the model, expected a graph")
        dual = torch.zeros_like(values, requires_grad=True)
        pulled_P = torch.autograd.grad(values, params_P, dual, create_graph=True, allow_unused=True)
        bent = [(g, v) for g, v in zip(pulled_P, direction_P, strict=True) if g is not None and g.requires_grad]
        try:
            (product,) = (
                torch.autograd.grad([g for g, _ in bent], dual, [v for _, v in bent], materialize_grads=True)
                if bent
                else (torch.zeros_like(values),)
            )
        except RuntimeError as error:
            raise GradwatchError(f"jvp: the backward of an operation cannot be differentiated: {error}") from error
    if not any(to_float(d.abs().sum()) for d in direction_P):
        return product
    epsilon = max(torch.finfo(p.dtype).eps for p in params_P)
    check_product(
        lambda step: values_at(model, lambda: [outputs()], params_P, direction_P, step),
        [values.detach()],
        [product],
        steps=steps_along(params_P, direction_P, epsilon),
        epsilon=epsilon,
        wrong=WRONG,
    )
    return product
