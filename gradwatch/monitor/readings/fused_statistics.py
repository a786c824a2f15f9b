"""The statistics that an instrumented optimizer computes during its step, and the buffers that it writes them to."""

# L = parameter tensors of the model, P = those of the optimizer, S = statistics

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch import catalogue
from gradwatch.monitor.row import GRAD, UPDATE
from gradwatch.optim.instrumented import InstrumentedOptimizer
from gradwatch.probe.device.sync import on_device


@final
class FusedStatistics:
    """Requests statistics from the steps of an instrumented optimizer, and reads them afterwards.

    Args:
        optimizer: The optimizer.
        params: Its parameters.
        columns: Their columns in the row.
        num_layers: Parameters of the model.

    Attributes:
        gradients_SL: Where steps write the gradient statistics.
    """

    def __init__(
        self, optimizer: InstrumentedOptimizer, params: Sequence[Tensor], columns: tuple[int, ...], num_layers: int
    ) -> None:
        self._optimizer = optimizer
        self._columns = columns
        shape = (len(catalogue.PARAM), num_layers)
        self._all_SL = torch.full(shape, math.nan, dtype=torch.float32, device=params[0].device)
        self.gradients_SL = self._all_SL[GRAD]
        self._clipped_SL = torch.full_like(self.gradients_SL, math.nan)
        self._requested_SL: Tensor | None = None
        optimizer.watch(dict(zip(params, columns, strict=True)))

    @property
    def is_requested(self) -> bool:
        """Whether the next step, or the step in progress, writes gradient statistics for `collect`."""
        return self._requested_SL is not None

    @property
    def is_measuring_update(self) -> bool:
        """Whether the next step measures how far it moves the weights."""
        return self._optimizer.changes_2L is not None

    def reset(self) -> None:
        """Request nothing."""
        self._requested_SL = None
        self._optimizer.gradients_SL = self._optimizer.changes_2L = None
        self.clear()

    def clear(self) -> None:
        """Fill the buffers with nan: on a CPU, steps skip the columns of parameters without gradient."""
        if self._all_SL.is_cpu:
            self._all_SL.fill_(math.nan)

    def request(self, *, clipped: bool = False) -> None:
        """Request gradient statistics from the next step, or from the step in progress.

        Args:
            clipped: Whether they only serve for the total norm after clipping.
        """
        self._requested_SL = self._optimizer.gradients_SL = self._clipped_SL if clipped else self.gradients_SL

    def request_always(self) -> None:
        """Request gradient statistics from all steps, for the fast path."""
        self._optimizer.gradients_SL = self.gradients_SL

    def cancel(self) -> None:
        """Request no gradient statistics."""
        self._requested_SL = self._optimizer.gradients_SL = None

    def request_update(self) -> None:
        """Request from the next step how far it moves the weights."""
        self._optimizer.changes_2L = self._all_SL[UPDATE]

    def collect(self) -> dict[str, Tensor]:
        """Return the requested gradient statistics, `grad` or `clipped` of shape (S, P), if there are any."""
        requested_SL = self._requested_SL
        if requested_SL is None:
            return {}
        self.cancel()
        return {"clipped" if requested_SL is self._clipped_SL else "grad": self._select(requested_SL)}

    def update(self) -> Tensor:
        """Return the weight norms and update ratios that were requested, of shape (2, P)."""
        return self._select(self._all_SL[UPDATE])

    def detach(self) -> None:
        """Request nothing any more."""
        self._optimizer.watch(None)

    def _select(self, row_SL: Tensor) -> Tensor:
        return row_SL.index_select(1, on_device(self._columns, row_SL.device))


def fused_statistics(
    optimizer: Optimizer, params: Sequence[Tensor], columns: tuple[int, ...], num_layers: int
) -> FusedStatistics | None:
    """Return the statistics of an instrumented optimizer; None if it is another one, or cannot compute them."""
    if isinstance(optimizer, InstrumentedOptimizer) and optimizer.can_watch(params):
        return FusedStatistics(optimizer, params, columns, num_layers)
    return None
