"""Types of the native extension; what each function does stands in its docstring, in `csrc/module.c`."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

REVISION: int

@final
class FastPath:
    step: int
    filled: int
    hooks_s: float
    step_began: float
    row_ended: float
    carried_s: float
    peak_memory: float
    clip_tolerance: float
    versions: int
    is_observed: int
    clipped_norm: float
    def __new__(
        cls,
        params: tuple[Tensor, ...],
        owned: bytes | None,
        factors_L: Tensor,
        columns: tuple[int, ...],
        columns_by_name: dict[str, int],
        width: int,
        groups: int,
        before: Callable[..., object],
        after: Callable[..., object],
        clock: Callable[[], float],
        /,
    ) -> FastPath: ...
    def observe(self) -> float | None: ...
    def before(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None: ...
    def after(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None: ...
    def append(
        self, loss: object, batch: object, val_loss: object, grad_norm: object, statistics: object, /
    ) -> bool | None: ...
    def use_block(self, steps_N: Tensor, run_NR: Tensor, param_NSL: Tensor, wall_N: Tensor, /) -> None: ...
    def start(
        self, step: int, until: int, findings: list[Any], skip_step: object, deadline: float, threads: int, /
    ) -> None: ...
    def before_clip(self, is_continued: bool, /) -> bool | None: ...
    def clip(self, factor: float, columns: Tensor, /) -> None: ...
    def stop(self) -> bool | None: ...

def bind(tensor_type: type, parameter_type: type, /) -> None: ...
def statistics(
    tensors: tuple[Tensor, ...],
    gradients: bool,
    out_SL: Tensor,
    scale: float,
    out_KB: Tensor | None,
    first: int,
    last: int,
    threads: int,
    /,
) -> Sequence[int] | None: ...
def keep(tensors: tuple[Tensor, ...], kept: Tensor, offsets: Tensor, /) -> Sequence[int] | None: ...
def changes(tensors: tuple[Tensor, ...], kept: Tensor, offsets: Tensor, out_2L: Tensor, /) -> Sequence[int] | None: ...
def histograms(
    tensors: tuple[Tensor, ...], gradients: bool, out_LB: Tensor, threads: int, /
) -> Sequence[int] | None: ...
def activations(
    calls: tuple[tuple[Tensor, bool, int, Tensor, Tensor | None, bool, int], ...], totals_A4: Tensor, /
) -> list[int | None]: ...
def traces(
    rule: int,
    groups: list[dict[str, Any]],
    state: dict[Tensor, Any],
    moved: bytes,
    params: tuple[Tensor, ...],
    columns: Tensor,
    changes_2L: Tensor,
    threads: int,
    /,
) -> int: ...
def batch_hash(batch: object, /) -> int | None: ...
def checksum(tensor: Tensor, /) -> int | None: ...
