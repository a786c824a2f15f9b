"""The step of torch itself, for what the native one does not take, with the statistics read beside it."""

# S = statistics (the first six of catalogue.PARAM), L = columns of the row

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.probe.device.sync import to_float
from gradwatch.probe.gradients.statistics import GradientProbe
from gradwatch.probe.updates.from_copy import CopyUpdateProbe


@final
class TorchStep:
    """Steps an optimizer as the class of torch that it derives from would.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        torchs: Any = next(kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
        step = torchs.step
        # once torch has made an optimizer of that class, its step calls the hooks, which have been called here
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._column_of: Mapping[Tensor, int] = {}
        self._gradients = GradientProbe([])
        self._updates = CopyUpdateProbe([])

    def run(
        self,
        column_of: Mapping[Tensor, int],
        gradients_SL: Tensor | None,
        changes_2L: Tensor | None,
        *,
        scale: Tensor | None,
        is_skipped: bool,
    ) -> None:
        """Step once, and write what the native step would.

        Args:
            column_of: Column of each parameter.
            gradients_SL: Where the statistics of the gradients go, or None.
            changes_2L: Where those of weights and updates go, or None.
            scale: Of the gradients, which are divided by it unless the step is skipped; or None.
            is_skipped: Whether nothing is to move.
        """
        if column_of is not self._column_of:
            self._column_of = column_of
            self._gradients, self._updates = GradientProbe([*column_of]), CopyUpdateProbe([*column_of])
        grads = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scale is not None and not is_skipped:
            for grad in grads:
                grad.div_(scale.to(grad.device, non_blocking=True))
        if gradients_SL is not None and column_of:
            left = 1.0 if scale is None or not is_skipped else 1.0 / to_float(scale)
            self._write(self._gradients.read(inverse_scale=left), gradients_SL)
        if is_skipped:
            return
        if changes_2L is not None and column_of:
            self._updates.before()
        self._step_unscaled()
        if changes_2L is not None and column_of:
            self._write(self._updates.after(), changes_2L)

    def _write(self, read_SP: Tensor, out_SL: Tensor) -> None:
        index = torch.tensor([*self._column_of.values()], device="cpu").to(out_SL.device)
        out_SL.index_copy_(1, index, read_SP.to(out_SL.device))

    def _step_unscaled(self) -> None:
        """Step without the attributes of a GradScaler, which torch's unfused steps refuse."""
        names = [name for name in ("grad_scale", "found_inf") if hasattr(self._optimizer, name)]
        kept = {name: getattr(self._optimizer, name) for name in names}
        for name in names:
            delattr(self._optimizer, name)
        try:
            self._step(self._optimizer)
        finally:
            for name, value in kept.items():
                setattr(self._optimizer, name, value)
