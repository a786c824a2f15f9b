"""Read the number format of autocast from the first training forward of each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.inert_hook import inert_hook, takes_hooks
from gradwatch.probe.parameters import named_modules

PRECISION = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Names of the formats that autocast may choose."""


@final
class AutocastReader:
    """Reads the number format of autocast from the first training forward of each module.

    Args:
        report: Called with the first format, at most once.
    """

    def __init__(self, report: Callable[[str], None] | None) -> None:
        self._report = report
        self._handles: dict[nn.Module, RemovableHandle] = {}

    def attach(self, models: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Hook every module that has parameters, and return the hooks."""
        for _, module in named_modules(models):
            # the hook needs a parameter for the device type of autocast
            if takes_hooks(module) and next(module.parameters(recurse=False), None) is not None:
                self._handles[module] = module.register_forward_pre_hook(inert_hook(self._before_forward))
        return list(self._handles.values())

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return  # evaluation may use another format
        kind = next(module.parameters(recurse=False)).device.type
        if not torch.amp.is_autocast_available(kind):  # on the meta device
            return
        if (handle := self._handles.pop(module, None)) is None:
            return
        handle.remove()  # one forward shows the format; later ones run without the hook
        if self._report is None or not torch.is_autocast_enabled(kind):
            return
        if seen := PRECISION.get(torch.get_autocast_dtype(kind)):
            self._report(seen)
            self._report = None
