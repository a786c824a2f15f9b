"""The plain step: one at which nothing is sampled and nothing is odd is recorded natively, into blocks of rows."""

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
from gradwatch.monitor.host_stats import ROUNDING
from gradwatch.records import Finding

if TYPE_CHECKING:
    from gradwatch import _native

BLOCK_BYTES = 512 << 10
"""Size of a block at most, unless a row is larger: it asks little memory where rows are large."""
MOST_ROWS = WINDOW
"""Rows of a block at most: a new one, and what Python does then, take as long as watching some five steps."""
PLACES = (
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
"""Statistics of the run that a plain step has, in the order of `_plain.h`; further learning rates follow the first."""
VALIDATED = "val_loss"
"""Statistic of the run at which a step is looked at closely, whoever tells it."""
UPDATING, READ = 2, 3  # how far a step has come, see `disarm` in `_plain.h`

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


class Begun(NamedTuple):
    """A step that the long way goes on with, after its update began plainly.

    Args:
        read_SL: Statistics of the gradients, of shape (6, L); None where a watched optimizer is still to write them.
        rates: The learning rates.
    """

    read_SL: NDArray[np.float32] | None
    rates: list[float]


@final
class _Block:
    """Rows that are filled natively, and handed out as they get full."""

    def __init__(self, num_rows: int, width: int, num_layers: int) -> None:
        self.step_N = np.empty(num_rows, np.int64)
        self.run_NR = np.full((num_rows, width), math.nan)
        self.param_NSL = np.full((num_rows, len(catalogue.PARAM), num_layers), math.nan, np.float32)
        self.wall_N = np.empty(num_rows)
        self.num_taken = self.num_charged = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return its memory, as the native code takes it."""
        arrays = (self.step_N, self.run_NR, self.param_NSL, self.wall_N)
        a, b, c, d = (torch.from_numpy(array) for array in arrays)
        return a, b, c, d


@final
class PlainSteps:
    """Records the plain steps of one optimizer: its hooks, and what the loop calls after it, are native.

    It is off until it is armed, and goes off where a step is not plain, or where Python has its turn: then all is as
    if the steps had gone the long way, and the one under way has come as far as `leave` says.

    Args:
        extension: The native extension.
        params: The parameters, in the order of the columns; all on the CPU.
        groups: How many groups the optimizer has.
        own_SL: Where the optimizer writes statistics of gradients, if it is a watched one.
        before: The hook of the long way before an update. It leaves the plain way.
        after: The same after an update.

    Attributes:
        native: What does it: clocks in seconds, and what `_plain.h` says of them.
    """

    def __init__(
        self,
        extension: ModuleType,
        params: Sequence[Tensor],
        *,
        groups: int,
        own_SL: Tensor | None,
        before: Hook,
        after: Hook,
    ) -> None:
        names = catalogue.run_names(groups)
        places = tuple(names.index(name) for name in PLACES)
        self.native: _native.Plain = extension.Plain(
            tuple(params),
            own_SL,
            places,
            {name: i for i, name in enumerate(names) if name != VALIDATED},
            len(names),
            groups,
            before,
            after,
            time.perf_counter,
        )
        self.native.rounding = ROUNDING
        self._watch_ms, self._rates = names.index("watch_ms"), slice(places[-1], places[-1] + groups)
        row_bytes = 4 * len(catalogue.PARAM) * len(params) + 8 * len(names)
        num_rows = min(max(BLOCK_BYTES // row_bytes, 1), MOST_ROWS)
        self._make_block = functools.partial(_Block, num_rows, len(names), len(params))
        self._block = self._make_block()
        self._lock = threading.Lock()
        self.native.use(*self._block.tensors())

    def arm(
        self,
        step: int,
        *,
        until: int,
        found: list[Finding],
        glance: Callable[[int], bool] | None,
        deadline: float,
    ) -> None:
        """Record plain steps from one on.

        Args:
            step: The step that is under way.
            until: Step that goes the long way again.
            found: All findings; where one comes to them, Python has its turn.
            glance: Says whether there is nothing to look at after a step; None where there never is.
            deadline: Clock from which on Python has its turn.
        """
        native = self.native
        if native.filled == len(self._block.step_N):
            with self._lock:
                self._block = self._make_block()
                native.use(*self._block.tensors())
        native.arm(step, until, found, glance, deadline, torch.get_num_threads())

    def leave(self) -> Begun | None:
        """Go off; return what the long way goes on with where the update under way has begun."""
        phase = self.native.disarm()
        if phase < UPDATING:
            return None
        block, place = self._block, self.native.filled
        read_SL = block.param_NSL[place, :6] if phase == READ else None
        return Begun(read_SL, [float(rate) for rate in block.run_NR[place, self._rates]])

    def charge(self, budget: Budget) -> None:
        """Tell the budget of the rows that it was not told of."""
        block = self._block
        new = slice(block.num_charged, self.native.filled)
        block.num_charged = new.stop
        watch_s = float(np.sum(block.run_NR[new, self._watch_ms])) / 1e3
        budget.charge(*block.wall_N[new].data, watch_s=watch_s, optional_s=0.0)

    def gather(self) -> Rows | None:
        """Return the rows that came since the last call, on whatever thread; None where there are none."""
        with self._lock:
            block = self._block
            new = slice(block.num_taken, self.native.filled)
            block.num_taken = new.stop
        if new.start == new.stop:
            return None
        return Rows(block.step_N[new], block.run_NR[new], block.param_NSL[new])
