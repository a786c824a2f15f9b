"""Record the steps without sampled statistics natively, into blocks of rows: the fast path."""

# N = rows of a block, R = statistics of the run, S = statistics of a layer, L = parameter tensors

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch import catalogue
from gradwatch.history.store import WINDOW, Rows
from gradwatch.monitor.budget import Budget
from gradwatch.monitor.host_stats import NORM_TOLERANCE
from gradwatch.monitor.row import GRAD
from gradwatch.records import Finding

if TYPE_CHECKING:
    from gradwatch import _native

MAX_BLOCK_BYTES = 512 << 10
"""Size of a block, unless a single row is larger."""
MAX_BLOCK_ROWS = WINDOW
"""Maximum number of rows in a block. A new block, with the Python work around it, costs as much as about 5 steps."""
OWN_STATISTICS = (
    "loss",
    "batch_hash",
    "grad_norm.before_clip",
    "grad_norm.after_clip",
    "loss_scale",
    "skipped",
    "step_ms",
    "samples_per_s",
    "peak_memory_bytes",
    "watch_ms",
    "lr.0",
)
"""Run statistics that the fast path computes, in the order of `csrc/fast_path.h`. Further learning rates follow the
first."""
VALIDATION = "val_loss"
"""Run statistic that only the full path records. A step that passes it leaves the fast path."""

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


class BegunStep(NamedTuple):
    """A step that the fast path began by reading its gradients, and that the full path continues.

    Args:
        gradients_SL: Statistics of the gradients, of shape (6, L).
        rates: The learning rates; None if the gradients were read before clipping, and no update has followed.
        factors_L: Factors of the clipping so far, without an update.
        versions: Sum of the version counters that the clipping left, without an update.
        clipped_norm: Total norm after clipping, if an update has followed; None if nothing was clipped.
    """

    gradients_SL: NDArray[np.float32]
    rates: list[float] | None
    factors_L: Tensor
    versions: int
    clipped_norm: float | None


@final
class _Block:
    """Rows that native code fills, and that other threads read while the block fills."""

    def __init__(self, num_rows: int, width: int, num_layers: int) -> None:
        self.step_N = np.empty(num_rows, np.int64)
        # nan: native code writes only the statistics that a step has
        self.run_NR = np.full((num_rows, width), math.nan)
        self.param_NSL = np.full((num_rows, len(catalogue.PARAM), num_layers), math.nan, np.float32)
        self.wall_N = np.empty(num_rows)
        self.num_read = self.num_charged = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the arrays of the block as tensors that share their memory."""
        arrays = (self.step_N, self.run_NR, self.param_NSL, self.wall_N)
        a, b, c, d = (torch.from_numpy(array) for array in arrays)
        return a, b, c, d


@final
class FastPath:
    """Records the steps of one optimizer natively, in its hooks and in `Monitor.step`.

    It records from `enter` until a step is unsupported or Python work is due; see `csrc/fast_path.h`. After `leave`,
    the full path continues with the step in progress. It gets the counts and clocks of the earlier steps.

    Args:
        extension: The native extension.
        params: The parameters, in the order of the columns; all on the CPU.
        owned_L: Whether an optimizer holds each parameter; None if the total norm is of all gradients.
        groups: Number of groups of the optimizer.
        before: The hook of the full path before an update. It leaves the fast path.
        after: The hook of the full path after an update. It leaves the fast path.

    Attributes:
        native: The native object.
        is_active: Whether only the native object knows the steps since `enter`. This is the only record of the mode.
    """

    def __init__(
        self,
        extension: ModuleType,
        params: Sequence[Tensor],
        *,
        owned_L: NDArray[np.bool_] | None,
        groups: int,
        before: Hook,
        after: Hook,
    ) -> None:
        names = catalogue.run_names(groups)
        columns = tuple(names.index(name) for name in OWN_STATISTICS)
        self.is_active = False
        self._factors_L = torch.ones(len(params), dtype=torch.float64, device="cpu")
        self.native: _native.FastPath = extension.FastPath(
            tuple(params),
            None if owned_L is None else owned_L.tobytes(),
            self._factors_L,
            columns,
            # a statistic without a column here takes its step to the full path
            {name: i for i, name in enumerate(names) if name != VALIDATION},
            len(names),
            groups,
            before,
            after,
            time.perf_counter,
        )
        self.native.clip_tolerance = NORM_TOLERANCE
        self._watch_ms, self._rates = names.index("watch_ms"), slice(columns[-1], columns[-1] + groups)
        # float32 parameter statistics and float64 run statistics
        row_bytes = 4 * len(catalogue.PARAM) * len(params) + 8 * len(names)
        num_rows = min(max(MAX_BLOCK_BYTES // row_bytes, 1), MAX_BLOCK_ROWS)
        self._make_block = functools.partial(_Block, num_rows, len(names), len(params))
        self._block = self._make_block()
        self._lock = threading.Lock()
        self.native.use_block(*self._block.tensors())

    def enter(
        self,
        step: int,
        *,
        until: int,
        findings: list[Finding],
        skip_step: Callable[[int], bool] | None,
        deadline: float,
    ) -> None:
        """Record steps natively.

        Args:
            step: The step in progress.
            until: First step that the full path records again.
            findings: List of all findings. Native code leaves the fast path when it grows.
            skip_step: Returns whether a step needs no inspection; None if no step of the run needs one.
            deadline: Clock at which the fast path ends.
        """
        native = self.native
        if native.filled == len(self._block.step_N):  # native code refuses to start with a full block
            with self._lock:  # `gather` runs on the worker thread and must not mix two blocks
                self._block = self._make_block()
                native.use_block(*self._block.tensors())
        native.start(step, until, findings, skip_step, deadline, torch.get_num_threads())
        self.is_active = True

    def leave(self) -> BegunStep | None:
        """Stop native recording. Return the step in progress if its gradients were read."""
        self.is_active = False
        is_updated = self.native.stop()
        if is_updated is None:
            return None
        native, block, row = self.native, self._block, self.native.filled
        # copied: the next steps on the fast path write to this row of the block
        return BegunStep(
            block.param_NSL[row, GRAD].copy(),
            [float(rate) for rate in block.run_NR[row, self._rates]] if is_updated else None,
            self._factors_L.clone(),
            native.versions,
            native.clipped_norm if native.is_observed else None,
        )

    def charge(self, budget: Budget) -> None:
        """Charge the budget for the rows since the last call."""
        block = self._block
        new = slice(block.num_charged, self.native.filled)
        block.num_charged = new.stop
        watch_s = float(np.sum(block.run_NR[new, self._watch_ms])) / 1e3
        budget.charge(*block.wall_N[new].data, watch_s=watch_s, optional_s=0.0)

    def gather(self) -> Rows | None:
        """Return the rows since the last call, or None if there are none. Any thread may call it."""
        with self._lock:
            block = self._block
            new = slice(block.num_read, self.native.filled)
            block.num_read = new.stop
        if new.start == new.stop:  # the worker asks at every batch, also on the full path
            return None
        # views, without a copy: native code never writes to a filled row again
        return Rows(block.step_N[new], block.run_NR[new], block.param_NSL[new])
