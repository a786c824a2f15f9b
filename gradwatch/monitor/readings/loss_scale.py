"""Read the scale of the loop's GradScaler."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradwatch.probe.device.sync import host_value_or_copy, to_float


@final
class LossScaleReader:
    """Reads the loss scale without waiting for the device.

    Args:
        scaler: The GradScaler of the loop, or None.

    Attributes:
        current: The loss scale at the last `read`: a number, or a tensor on the device of the scale. 1 without a
            scaler.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.current: float | Tensor = 1.0

    @property
    def has_scaler(self) -> bool:
        """Return whether the loss is scaled."""
        return self._scaler is not None

    def read(self) -> float | Tensor:
        """Read the present loss scale."""
        if self._scaler is not None:
            scale = self._scaler._get_scale_async()  # private, but `get_scale` waits for the device
            # before the first use there is no tensor, and `get_scale` returns the initial scale
            self.current = self._scaler.get_scale() if scale is None else host_value_or_copy(scale)
        return self.current

    def wait(self) -> float:
        """Return the loss scale at the last `read`, waiting for the device."""
        return to_float(self.current) if isinstance(self.current, Tensor) else self.current

    def is_scaled(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimizer still have the loss scale, since `unscale_` was not called."""
        if self._scaler is None:
            return False
        state = self._scaler._per_optimizer_states.get(id(optimizer))  # private; absent before the first use in a step
        return state is None or state["stage"] is OptState.READY

    def has_fallen(self) -> bool:
        """Return whether the scale is lower than at the last `read`."""
        # a scaler lowers its scale when it skips an update
        return self._scaler is not None and self._scaler.get_scale() < self.wait()
