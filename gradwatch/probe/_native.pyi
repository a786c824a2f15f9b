"""Types of the native extension; what each function does stands in its docstring, in `_native.c`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

def bind(tensor_type: type, parameter_type: type, /) -> None: ...
def statistics(
    tensors: tuple[Tensor, ...], gradients: bool, out_SL: Tensor, scale: float, out_LB: Tensor | None, /
) -> Sequence[int] | None: ...
def keep(tensors: tuple[Tensor, ...], kept: Tensor, offsets: Tensor, /) -> Sequence[int] | None: ...
def changes(tensors: tuple[Tensor, ...], kept: Tensor, offsets: Tensor, out_2L: Tensor, /) -> Sequence[int] | None: ...
def histograms(tensors: tuple[Tensor, ...], gradients: bool, out_LB: Tensor, /) -> Sequence[int] | None: ...
def step(
    rule: int,
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    fresh: set[Tensor] | None,
    params: tuple[Tensor, ...],
    columns: Tensor | None,
    gradients_SL: Tensor | None,
    changes_2L: Tensor | None,
    scale: Tensor | None,
    skip: bool,
    threads: int,
    /,
) -> list[Tensor] | int: ...
def activation(output: Tensor, ranges_4: Tensor, dead_C: Tensor | None, totals_4: Tensor, /) -> int | None: ...
def traces(
    rule: int,
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    moved: set[Tensor],
    params: tuple[Tensor, ...],
    columns: Tensor,
    changes_2L: Tensor,
    threads: int,
    /,
) -> int: ...
def look(loss: object, batch: object, /) -> tuple[float, float, float] | None: ...
def checksum(tensor: Tensor, /) -> int | None: ...
