"""The parameters that one optimizer moves: their columns of the row, their probes, and how far their step has come."""

# L = parameter tensors of the model, P = those of one optimizer, K = those of them whose turn it is, S = statistics,
# B = bins

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch import catalogue
from gradwatch.history.store import Floats
from gradwatch.monitor.budget import Turn
from gradwatch.monitor.fast_path import Begun, Hook, PlainSteps
from gradwatch.optim.instrumented import Watched
from gradwatch.probe.device.backend import select_backend
from gradwatch.probe.device.sync import is_capturing, on_device, to_float, to_host
from gradwatch.probe.device.transfer_queue import Values
from gradwatch.probe.gradients import histograms
from gradwatch.probe.gradients.histograms import HistogramProbe
from gradwatch.probe.gradients.statistics import GradientProbe
from gradwatch.probe.updates.from_copy import CopyUpdateProbe
from gradwatch.probe.updates.from_moments import MomentUpdateProbe

GRAD = slice(0, 6)
LINEAR = slice(0, 4)  # those of them that grow with the gradient: norm, largest magnitude, mean, deviation
UPDATE = slice(6, 8)
RISE = 1.05  # per step, of the least that a step has taken: it may have become slower for good
L2 = catalogue.PARAM_NAMES.index("grad.l2")
NONFINITE = catalogue.PARAM_NAMES.index("grad.nonfinite")


class Counted(NamedTuple):
    """Histograms of some parameters: their columns, and counts of gradients and weights of shape (2, K, B)."""

    columns_K: NDArray[np.intp]
    counts_2KB: NDArray[np.int64]


class Arrived(NamedTuple):
    """What one optimizer's late values tell of its step: total norms, before and after clipping, and whether it was."""

    norm: float
    clipped_norm: float | None
    is_skipped: bool
    counted: Counted | None


@final
class Part:
    """What one optimizer moves.

    Args:
        optimizer: The optimizer.
        params: Its parameters.
        columns: Where they stand in the row.
        first_group: Index of its first group among those of all optimizers.
        num_layers: Parameters of the model, which the row has columns for.

    Attributes:
        is_read: Gradients have been read for the row.
        norm: Their total norm.
        clipped_norm: The same just before the update, where they may have changed since `observe`.
        is_observed: `observe` has read the gradients, and neither an update nor a backward pass came since.
        is_updated: The optimizer has moved its parameters since the last row.
        awaits_closure: The step under way computes its gradients itself.
        is_traced: How far it moves the weights will be read from what it leaves behind, right after it.
        stepped_from: Clock at which the step under way began.
        late: What was read on the device and left there, by name: `grad` and `clipped` of shape (S, P), `update` of
            shape (2, P), `counts` of shape (2, K, B), `found_inf`, `loss_scale`, and rates by their names.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        columns: NDArray[np.intp] | slice,
        first_group: int,
        num_layers: int,
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self._columns = columns
        self._is_direct = isinstance(columns, slice) and bool(params) and params[0].device.type == "cpu"
        # groups that are added later have no place in the history
        self._rates = [f"lr.{i}" for i in range(first_group, first_group + len(optimizer.param_groups))]
        self._gradients = GradientProbe(params)
        self._updates = CopyUpdateProbe(params)
        self._traces = MomentUpdateProbe(params, optimizer)
        self._histograms = HistogramProbe(params)
        self._shares: dict[int, list[slice]] = {}
        self._counted_KB: Tensor | None = None
        self._watched = optimizer if isinstance(optimizer, Watched) and optimizer.can_watch(params) else None
        self._column_indices = tuple(range(num_layers) if isinstance(columns, slice) else map(int, columns))
        self._captured: dict[str, Tensor] = {}
        if self._watched is not None:
            shape = (len(catalogue.PARAM), num_layers)
            self._own_SL = torch.full(shape, math.nan, dtype=torch.float32, device=params[0].device)
            self._own_grad_SL, self._clipped_SL = self._own_SL[GRAD], torch.full_like(self._own_SL[GRAD], math.nan)
            self._watched.watch(dict(zip(params, self._column_indices, strict=True)))
        self.stepped_from, self._usual_s = 0.0, math.inf

    @property
    def is_awaiting(self) -> bool:
        """Whether the step under way is to write the statistics of the gradients that it reads."""
        return self._awaited is not None

    @property
    def has_turn(self) -> bool:
        """Whether histograms of any of its parameters are due."""
        return self._turn.start < self._turn.stop

    @property
    def turn_columns_K(self) -> NDArray[np.intp]:
        """Columns of the parameters whose histograms are due."""
        return np.array(self._column_indices[self._turn], np.intp)

    @property
    def num_groups(self) -> int:
        """How many groups the optimizer had when the part was made."""
        return len(self._rates)

    @property
    def has_later_groups(self) -> bool:
        """Whether the optimizer has more groups than when the part was made."""
        return len(self.optimizer.param_groups) > len(self._rates)

    def begin(self, row_SL: NDArray[np.float32], turn: Turn | None) -> None:
        """Make ready for the next row.

        Args:
            row_SL: That of the model, which all that is read is written to.
            turn: Whose histograms are due.
        """
        self._row_SL = row_SL
        self._turn = slice(0, 0) if turn is None else self._share(turn)
        self._out_SL = torch.from_numpy(row_SL)[GRAD] if self._is_direct else None
        self.is_read = False
        self.norm = math.nan
        self.clipped_norm: float | None = None
        self.is_observed = False
        self.awaits_closure = False
        self._has_kept_weights = self.is_traced = False
        self._awaited: Tensor | None = None
        if self._watched is not None and not self._captured:
            self._watched.gradients_SL = self._watched.changes_2L = None
            self._clear_own()
        # what a CUDA graph computes comes anew with every replay
        self.late: dict[str, Tensor] = {**self._captured} if self._captured else {}
        self.is_updated = bool(self._captured)

    def _share(self, turn: Turn) -> slice:
        """Return whose turn it is."""
        if turn.of not in self._shares:
            self._shares[turn.of] = histograms.shares(self.params, turn.of)
        return self._shares[turn.of][turn.place]

    def detach(self) -> None:
        """Have the optimizer write nothing more into the row."""
        if self._watched is not None:
            self._watched.watch(None)
            self._watched = None

    def watch_backward(self) -> list[RemovableHandle]:
        """Note from now on when a backward pass changes a gradient, and return the hooks that do so."""
        trainable = [p for p in self.params if p.requires_grad and p.is_leaf]
        return [p.register_post_accumulate_grad_hook(self._accumulated) for p in trainable]

    def plain_steps(self, *, before: Hook, after: Hook, hooked: bool) -> PlainSteps | None:
        """Return what records plain steps of the optimizer; None where none of them can be plain.

        Args:
            before: The hook of the long way before an update.
            after: The same after it.
            hooked: Whether these are hooks: only then can a watched optimizer be the one that reads.
        """
        extension, scaled = select_backend(), ("grad_scale", "found_inf")
        if extension is None or not self._is_direct or any(hasattr(type(self.optimizer), name) for name in scaled):
            return None
        own_SL = None if self._watched is None or not hooked else self._own_grad_SL
        groups = len(self._rates)
        return PlainSteps(extension, self.params, groups=groups, own_SL=own_SL, before=before, after=after)

    def await_plain_steps(self) -> None:
        """Have a watched optimizer write the statistics of all gradients from now on."""
        if self._watched is not None:
            self._watched.gradients_SL = self._own_grad_SL

    def leave_plain_steps(self, begun: Begun | None, fastest_s: float) -> None:
        """Go on by the long way, with an update that has begun, or with none.

        Args:
            begun: How far it has come.
            fastest_s: The least that an update took lately.
        """
        self._usual_s = min(fastest_s, RISE * self._usual_s)
        if self._watched is not None:
            self._watched.gradients_SL = self._awaited = None
        if begun is None:
            self._clear_own()  # of the step before
            return
        if begun.read_SL is None:
            self.await_gradients()
        else:
            self._row_SL[GRAD] = begun.read_SL
            self.is_read, self.norm = True, total_norm(self._row_SL)

    def read_gradients(self, *, inverse_scale: float = 1.0, is_counting: bool = False) -> float:
        """Write the statistics of the gradients into the row and return their total norm.

        Args:
            inverse_scale: Factor that undoes a loss scale.
            is_counting: Whether `read_histograms` follows: then values are counted in the same read.
        """
        row_SP = self._row_SL
        self._counted_KB = histograms.empty(self.params[self._turn]) if is_counting else None
        read_SP = self._gradients.read(
            inverse_scale=inverse_scale, out_SL=self._out_SL, counts_KB=self._counted_KB, first=self._turn.start
        )
        if self._out_SL is None:
            row_SP = to_host(read_SP)
            self._row_SL[GRAD, self._columns] = row_SP
        self.is_read = True
        self.norm = total_norm(row_SP)
        return self.norm

    def await_gradients(self, *, clipped: bool = False) -> bool:
        """Have the step under way write the statistics of the gradients that it reads; say whether it can.

        Args:
            clipped: Whether they are wanted for their total norm alone, and the row is to stay as it is.
        """
        if self._watched is None:
            return False
        self._awaited = self._watched.gradients_SL = self._clipped_SL if clipped else self._own_grad_SL
        return True

    def take_gradients(self) -> bool:
        """Take over what the step has written; say whether it was to."""
        if self._watched is None or self._awaited is None:
            return False
        read_SP = to_host(self._awaited)[:, self._columns]
        if self._awaited is self._clipped_SL:
            self.clipped_norm = total_norm(read_SP)
        else:
            self._row_SL[GRAD, self._columns] = read_SP
            self.is_read, self.norm = True, total_norm(read_SP)
        self._awaited = self._watched.gradients_SL = None
        return True

    def forget_gradients(self) -> None:
        """Take back what was read: it was not the gradient of the loss."""
        self._row_SL[GRAD, self._columns] = math.nan
        self.is_read = False
        self.norm = math.nan

    def has_gradients(self) -> bool:
        """Say whether anything was read but None and zeros."""
        row_SP = self._row_SL[:, self._columns]
        return bool(((row_SP[L2] != 0) & ~np.isnan(row_SP[NONFINITE])).any())

    def read_clipped(self) -> None:
        """Note the total norm of the gradients as they are now, and leave the row as it is."""
        if self.await_gradients(clipped=True):
            return
        self.clipped_norm = total_norm(to_host(self._gradients.read()))

    def norm_without_probe(self) -> float:
        """Return the total norm of the gradients as they are now, by torch alone."""
        return to_float(nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None]))

    def keep_weights(self) -> None:
        """Keep the weights as they are before an update, unless its step measures them or leaves enough behind."""
        is_captured = is_capturing(self.params)  # what is sampled is no part of a graph
        if self._watched is not None:
            self._watched.changes_2L = self._own_SL[UPDATE]
            self._has_kept_weights = True
            return
        if is_captured:
            return
        self.is_traced = not self.awaits_closure and self._traces.before()
        if not self.is_traced:
            self._updates.before()
        self._has_kept_weights = True

    def extra(self, seconds: float) -> float:
        """Return how much longer than usual a step of a watched optimizer took that measured its updates, too.

        Args:
            seconds: Time of the step; those that measured none tell what is usual.
        """
        if self._watched is None or self.awaits_closure:
            return 0.0
        if self._watched.changes_2L is not None:
            return max(0.0, seconds - self._usual_s)
        self._usual_s = min(seconds, RISE * self._usual_s)
        return 0.0

    def read_updates(self) -> None:
        """Write into the row how far the update moved the weights."""
        if self._has_kept_weights and self.is_updated:
            row_2P = self._read_changes()
            if row_2P is not None:
                self._row_SL[UPDATE, self._columns] = to_host(row_2P)
            self._has_kept_weights = False

    def _read_changes(self) -> Tensor | None:
        if self._watched is not None:
            return self._own_columns(self._own_SL[UPDATE])
        return self._traces.after() if self.is_traced else self._updates.after()

    def _clear_own(self) -> None:
        """Forget what steps have written: on a CPU, they leave the columns of parameters without gradient alone."""
        if self._watched is not None and self._own_SL.is_cpu:
            self._own_SL.fill_(math.nan)

    def _own_columns(self, row_SL: Tensor) -> Tensor:
        return row_SL.index_select(1, on_device(self._column_indices, row_SL.device))

    def send_gradients(self, *, inverse_scale: float | Tensor = 1.0, clipped: bool = False) -> None:
        """Read the gradients, and leave their statistics on the device."""
        self.late["clipped" if clipped else "grad"] = self._gradients.read(inverse_scale=inverse_scale)

    def send_step(self) -> None:
        """Leave on the device what the step that was made has written."""
        if self._watched is not None and self._awaited is not None:
            name = "clipped" if self._awaited is self._clipped_SL else "grad"
            self.late[name] = self._own_columns(self._awaited)
            self._awaited = self._watched.gradients_SL = None
        if is_capturing(self.params):
            self.send_updates()
            self._captured = {**self.late}

    def send_updates(self) -> None:
        """Leave on the device how far the update moved the weights."""
        if self._has_kept_weights and self.is_updated:
            row_2P = self._read_changes()
            if row_2P is not None:
                self.late["update"] = row_2P
            self._has_kept_weights = False

    def send_histograms(self) -> None:
        """Leave the histograms of gradients and weights on the device."""
        self.late["counts"] = self._histograms.read(self._turn)

    def send_rates(self) -> dict[str, float]:
        """Return the learning rates that the host knows, and leave those of the device there."""
        known = {}
        for name, group in zip(self._rates, self.optimizer.param_groups, strict=False):
            rate = group.get("lr", math.nan)
            if isinstance(rate, Tensor) and rate.is_cuda:
                self.late[name] = rate.detach().clone()
            else:
                known[name] = float(rate)
        return known

    def place(self, values: Values, row_SL: NDArray[np.float32], columns_K: NDArray[np.intp]) -> Arrived:
        """Write what was late into the row of its step, and return what else it tells.

        Args:
            values: What has arrived.
            row_SL: The row.
            columns_K: The step's `turn_columns_K`.
        """
        is_skipped = bool(values.get("found_inf", np.zeros(1)).any())
        norm = math.nan
        if "grad" in values:
            row_SL[GRAD, self._columns] = values["grad"]
            norm = total_norm(values["grad"])
        if "update" in values and not is_skipped:
            row_SL[UPDATE, self._columns] = values["update"]
        clipped = total_norm(values["clipped"]) if "clipped" in values else None
        counted = Counted(columns_K, values["counts"]) if "counts" in values else None
        return Arrived(norm, clipped, is_skipped, counted)

    def read_histograms(self) -> Counted:
        """Return the histograms of gradients and weights that are due."""
        counts_2KB = to_host(self._histograms.read(self._turn, gradients_KB=self._counted_KB))
        self._counted_KB = None
        return Counted(self.turn_columns_K, counts_2KB)

    def put_rates(self, optimizer: dict[str, float]) -> None:
        """Write the learning rates of the groups by their name in the catalogue."""
        # looked up anew: a checkpoint that is loaded puts other groups in their place
        for name, group in zip(self._rates, self.optimizer.param_groups, strict=False):
            rate = group.get("lr", math.nan)
            optimizer[name] = to_float(rate) if isinstance(rate, Tensor) else float(rate)

    def later_params(self) -> list[Tensor]:
        """Return the parameters of groups that were added later."""
        return [p for group in self.optimizer.param_groups[len(self._rates) :] for p in group["params"]]

    def _accumulated(self, _: Tensor) -> None:
        self.is_observed = False


def total_norm(row_SL: Floats) -> float:
    """Return the L2 norm over all gradients; NaN or Inf where one holds NaN or Inf.

    Args:
        row_SL: The gradient statistics of every layer, nan where there is no gradient; at least the first six rows.
    """
    norm = _norm(row_SL[L2])
    return norm if norm == norm else _norm(row_SL[L2, ~np.isnan(row_SL[NONFINITE])])


def _norm(values: Floats) -> float:
    """Return the L2 norm of float32 values, rounded twice: its bits are those of the plain way, see `_plain.h`."""
    squares = np.square(values, dtype=np.float64)  # exact
    return math.sqrt(math.fsum(squares.data))


def parts_of(params: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> list[Part]:
    """Share parameters out among optimizers: each has those that it moves, and the last also those that none does.

    Args:
        params: All parameters, in the order of the row's columns.
        optimizers: The optimizers.
    """
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    anyones = set().union(*held)
    parts: list[Part] = []
    first_group = 0
    for i, optimizer in enumerate(optimizers):
        mine = [k for k, p in enumerate(params) if _belongs(p, held[i], anyones, is_last=i == len(optimizers) - 1)]
        columns = slice(None) if len(mine) == len(params) else np.array(mine, np.intp)
        parts.append(Part(optimizer, [params[k] for k in mine], columns, first_group, len(params)))
        first_group += len(optimizer.param_groups)
    return parts


def _belongs(param: Tensor, held: set[int], anyones: set[int], *, is_last: bool) -> bool:
    if param.is_meta:  # has no values
        return False
    return id(param) in held or (is_last and id(param) not in anyones)
