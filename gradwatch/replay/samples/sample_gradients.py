"""Compute the gradient of each sample of a batch: `gradwatch.sample_gradients`."""

# B = samples of the batch, b = samples of a chunk, P = parameter tensors

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from gradwatch.errors import GradwatchError, raised
from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.probe.stepped_model import SteppedModel
from gradwatch.probe.untouched import untouched
from gradwatch.replay.locate.bad_samples import count, take

MAX_CHUNK = 2**24
"""Maximum number of gradient elements that are computed at once."""
MAX_DIFFERENCE = 1e-3
"""Tolerated relative difference of `vmap` from a sample alone; random masks and mixed samples differ by more."""
MAX_SHOWN = 8

Step = Callable[..., Tensor]
Method = Literal["vmap", "loop"]
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGradients:
    """The gradient of each sample of a batch. Its text is a table of the samples with the largest shares.

    Args:
        by_name: Gradient of each parameter, shape (B, *shape of the parameter).
        norms_B: L2 norm of each sample's gradient over all parameters, float64.
        shares_B: Part of each sample in the sum of the gradients: its projection on the sum, divided by the norm of
            the sum. The shares add up to 1; a sample whose gradient points against the sum has a negative one.
        method: `vmap`, or `loop` for models that torch.func cannot map.
    """

    by_name: dict[str, Tensor]
    norms_B: Tensor
    shares_B: Tensor
    method: Method

    @property
    def ranking(self) -> tuple[int, ...]:
        """Return the positions of the samples, the largest share first."""
        return tuple(int(i) for i in to_host(self.shares_B.argsort(descending=True)))

    def __str__(self) -> str:
        lines = ["sample       norm      share"]
        for i in self.ranking[:MAX_SHOWN]:
            lines.append(f"{i:>6}  {to_float(self.norms_B[i]):>9.4g}  {100 * to_float(self.shares_B[i]):>7.1f} %")
        rest = len(self.norms_B) - MAX_SHOWN
        return "\n".join([*lines, *([f"{rest} more"] if rest > 0 else [])])


def sample_gradients(step: Step, *batch: Any, model: nn.Module) -> SampleGradients:
    """Compute the gradient of each sample of a batch, as if the batch were this sample alone.

    `torch.func.vmap` maps the step over the samples. If it fails, or gives a different gradient than a sample alone,
    the step runs once for each sample. Gradients, buffers and random generators stay unchanged.

    Args:
        step: Function of the batch that returns the loss, without a backward pass. It is called with batches of 1.
        batch: Parts of the batch; the first dimension of each tensor counts the samples.
        model: Model that the step uses.

    Returns:
        The gradients with the norm and the share of each sample.

    Raises:
        GradwatchError: The batch cannot be split into samples, the model has a BatchNorm in training mode, or the step
            fails on one sample.
    """
    names, params_P = _trainable(model)
    norms = [n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if norms:
        raise GradwatchError(
            f"sample_gradients: `{norms[0]}` is a BatchNorm in training mode, which mixes the samples, so none has a "
            "gradient of its own; call model.eval() first"
        )
    chunks = SampleChunks(step, batch, model=model)
    with untouched(model, params_P), torch.enable_grad():
        parts = [*chunks]
    by_name = {n: torch.cat([part[i] for part in parts]) for i, n in enumerate(names)}
    flat_BP = torch.cat([g.flatten(1).double() for g in by_name.values()], 1)
    total = flat_BP.sum(0)
    square = total @ total
    return SampleGradients(
        by_name=by_name,
        norms_B=torch.linalg.vector_norm(flat_BP, dim=1),
        shares_B=(flat_BP @ total) / square if square else torch.zeros(len(flat_BP), dtype=torch.float64),
        method=chunks.method,
    )


@final
class SampleChunks:
    """The gradients of the samples of a batch, chunk by chunk.

    Args:
        step: As for `sample_gradients`.
        batch: Parts of the batch.
        model: Model that the step uses.

    Attributes:
        method: Method that computes the gradients; known after the first chunk.
    """

    def __init__(self, step: Step, batch: Sequence[Any], *, model: nn.Module) -> None:
        size = count(batch)
        if size is None:
            raise GradwatchError("sample_gradients: the tensors of the batch differ in their first dimension")
        self._step, self._batch, self._size = step, batch, size
        self._names, self._params_P = _trainable(model)
        self._stepped = SteppedModel(model, step)
        self.method: Method = "vmap"

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of the next samples: for each parameter, a tensor of shape (b, *shape)."""
        length = max(1, min(self._size, MAX_CHUNK // max(1, sum(p.numel() for p in self._params_P))))
        for begin in range(0, self._size, length):
            rows = range(begin, min(begin + length, self._size))
            mapped = self._mapped(rows) if self.method == "vmap" else None
            if mapped is not None and begin == 0 and not _agree([g[0] for g in mapped], self._alone(0)):
                mapped = None
            if mapped is None:
                self.method = "loop"
                yield [torch.stack(grads) for grads in zip(*(self._alone(i) for i in rows), strict=True)]
            else:
                yield mapped

    def _mapped(self, rows: range) -> list[Tensor] | None:
        names = [f"model.{n}" for n in self._names]

        def loss(params: Mapping[str, Tensor], sample: Any) -> Tensor:
            one = tree_map_only(Tensor, lambda t: t.unsqueeze(0), sample)
            result: Tensor = functional_call(self._stepped, dict(params), one)
            return result.reshape(())

        values = {n: p.detach() for n, p in zip(names, self._params_P, strict=True)}
        try:
            found = vmap(grad(loss), in_dims=(None, 0), randomness="different")(values, take(self._batch, rows))
        except FAILURES:
            return None
        return [found[n].detach() for n in names]

    def _alone(self, row: int) -> list[Tensor]:
        try:
            loss = self._step(*take(self._batch, [row]))
        except FAILURES as error:
            raise GradwatchError(f"sample_gradients: the step fails on one sample: {raised(error)}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise GradwatchError("sample_gradients: the step must return a loss of one number with its graph")
        return [*torch.autograd.grad(loss.reshape(()), self._params_P, materialize_grads=True, allow_unused=True)]


def _trainable(model: nn.Module) -> tuple[list[str], list[Tensor]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise GradwatchError("sample_gradients: the model has no trainable parameter")
    return [n for n, _ in named], [p for _, p in named]


def _agree(mapped_P: Sequence[Tensor], alone_P: Sequence[Tensor]) -> bool:
    a, b = (torch.cat([t.detach().double().flatten() for t in grads]) for grads in (mapped_P, alone_P))
    return to_float(torch.linalg.vector_norm(a - b)) <= MAX_DIFFERENCE * to_float(torch.linalg.vector_norm(b))
