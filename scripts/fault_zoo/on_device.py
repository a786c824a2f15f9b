"""Run scripts that name no device on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _DrawsOfGenerators(TorchFunctionMode):
    """Draw random numbers with a generator of the CPU there, and move them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        is_drawn_on_cpu = generator is not None and generator.device.type == "cpu"
        if is_drawn_on_cpu and not any(isinstance(arg, Tensor) for arg in args):
            return func(*args, **kwargs | {"device": "cpu"}).to(self._device)
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_device(name: str) -> Iterator[None]:
    """Make tensors and generators on a device unless a script says otherwise, and let NumPy read them.

    Args:
        name: The device, such as `cuda`; with `cpu`, everything stays as it is.
    """
    if name == "cpu":
        yield
        return
    device = torch.device(name)
    from_numpy, numpy, array, make_generator = torch.from_numpy, Tensor.numpy, Tensor.__array__, torch.Generator

    class Generator(torch.Generator):  # a class, since scripts annotate with it
        def __new__(cls, device: Any = device) -> Any:
            return make_generator(device)

    def to_numpy(self: Tensor, *, force: bool = False) -> Any:
        return numpy(self.detach().cpu() if force else self.cpu())

    def to_array(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return array(self.cpu(), *args, **kwargs)  # type: ignore[no-untyped-call]

    def moved(values: np.ndarray[Any, Any]) -> Tensor:
        return from_numpy(values).to(device)

    with (
        mock.patch.object(torch, "from_numpy", moved),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(Tensor, "numpy", to_numpy),
        mock.patch.object(Tensor, "__array__", to_array),
        device,
        _DrawsOfGenerators(device),
    ):
        yield
