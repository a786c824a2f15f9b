"""Make one output of a model a function of continuous inputs: of numbers, or of the embeddings of tokens."""

# B = samples of a batch, T = tokens, D = width of an embedding, F = features

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from gradwatch.errors import GradwatchError, raised
from gradwatch.state.rng import preserved_random_state

BATCH = 128
"""Samples of a forward pass that only needs scores."""
Kind = Literal["values", "image", "tokens"]
Target = int | tuple[int, ...] | None


@final
class Score:
    """One output of a model for each sample of a batch.

    Args:
        model: The model; `evaluating` has set its mode.
        inputs: The sample, with a batch dimension of 1. Integers are tokens, which the model's embedding reads.
        target: Index of the output, or None for a model with one output.

    Attributes:
        kind: Kind of the inputs, which decides what one feature is: a number, a pixel or a token.
        point: The sample as continuous inputs, shape (1, ...).
        embedding: The embedding of the tokens, or None.
    """

    def __init__(self, model: nn.Module, inputs: Tensor, target: Target) -> None:
        self.model = model
        self._target: tuple[int, ...] = () if target is None else target if isinstance(target, tuple) else (target,)
        self.embedding: nn.Module | None = None
        self._tokens: Tensor | None = None
        try:
            if inputs.is_floating_point():
                self.kind: Kind = "image" if inputs.ndim == 4 else "values"
                self.point = inputs.detach().clone()
            else:
                self.kind = "tokens"
                self.embedding, self.point = _embedded(model, inputs)
                self._tokens = inputs
            if not bool(torch.isfinite(self.point).all()):
                raise GradwatchError("inputs: the sample has NaN or Inf, expected finite numbers")
            score = self(self.point)  # an invalid target is reported first
        except (RuntimeError, TypeError) as error:
            raise GradwatchError(
                f"model: does not take inputs of shape {tuple(inputs.shape)} and type {inputs.dtype}: {raised(error)}"
            ) from error
        if not bool(torch.isfinite(score).all()):
            raise GradwatchError("model: the score of the sample is NaN or Inf, so there is nothing to attribute")

    def __call__(self, points: Tensor) -> Tensor:
        """Return the score of each point, shape (B,)."""
        if self.embedding is None:
            return self._of_output(self.model(points), len(points))
        assert self._tokens is not None, "an embedding reads tokens"
        handle = self.embedding.register_forward_hook(lambda module, args, output: points)
        try:
            return self._of_output(self.model(self._tokens.expand(len(points), -1)), len(points))
        finally:
            handle.remove()

    @torch.no_grad()
    def values(self, points: Tensor) -> Tensor:
        """Return the score of each point without an autograd graph, shape (B,), float64."""
        return torch.cat([self(part) for part in points.split(BATCH)]).double()

    def totals(self, values: Tensor) -> Tensor:
        """Sum a map over the channels of a pixel or the width of a token.

        Args:
            values: Map of the shape of `point`.

        Returns:
            Tensor of shape (F,), float64.
        """
        values = values[0].detach().double()
        if self.kind == "image":
            values = values.sum(0)
        return values.sum(-1) if self.kind == "tokens" else values.flatten()

    def without(self, masks_BF: Tensor, baseline: Tensor) -> Tensor:
        """Return the sample with features replaced by the baseline.

        Args:
            masks_BF: True for each feature to replace, shape (B, F).
            baseline: Shape of `point`.
        """
        shape = self.point.shape[1:]
        if self.kind == "image":
            masks = masks_BF.view(-1, 1, *shape[1:])
        else:
            masks = masks_BF.unsqueeze(-1) if self.kind == "tokens" else masks_BF.view(-1, *shape)
        return torch.where(masks, baseline, self.point)

    def _of_output(self, output: Any, samples: int) -> Tensor:
        if not isinstance(output, Tensor):
            raise GradwatchError(
                f"attribute: the model returned a {type(output).__name__}, expected a tensor of scores; "
                "give a module that returns the logits alone"
            )
        if not self._target:
            if output.numel() != samples:
                raise GradwatchError(
                    f"target: got None, but the model has outputs of shape {tuple(output.shape[1:])}; expected the "
                    "index of one, such as target=3"
                )
            return output.reshape(samples)
        try:
            scores: Tensor = output.movedim(0, -1)[self._target]
        except IndexError:
            scores = output
        if scores.shape != (samples,):
            raise GradwatchError(
                f"target: got {self._target}, but the model has outputs of shape {tuple(output.shape[1:])}; expected "
                f"the index of one of them"
            )
        return scores


@contextlib.contextmanager
def evaluating(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Put a model into evaluation mode with a fixed seed; restore modes and random generators on exit."""
    modes = [(module, module.training) for module in model.modules()]
    with preserved_random_state(), torch.enable_grad():
        torch.manual_seed(seed)
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _embedded(model: nn.Module, tokens: Tensor) -> tuple[nn.Module, Tensor]:
    """Return the embedding that reads the tokens, and the vectors that it returns, shape (1, T, D)."""
    if tokens.ndim != 2:
        raise GradwatchError(
            f"inputs: got integers of shape {tuple(tokens.shape)}, expected tokens of shape (1, T), or floats"
        )
    found: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if args and isinstance(args[0], Tensor) and torch.equal(args[0], tokens):
            found.append((module, output.detach().clone()))

    handles = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise GradwatchError(
            "inputs: got integers, but no nn.Embedding of the model reads them; expected tokens for an embedding, or "
            "floating point inputs: inputs.float()"
        )
    return found[0]
