"""Complete a row of step statistics from the part that the host knows and the values of the device."""

# L = parameter tensors, P = parameter tensors of one optimizer, S = statistics, A = activation modules, B = bins,
# K = parameters with histograms

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch import catalogue
from gradwatch.history.store import Floats, Histograms
from gradwatch.monitor.host_stats import NORM_TOLERANCE
from gradwatch.probe.activations.bitmask import UnitMask, packed
from gradwatch.probe.activations.silent_units import SilentUnits
from gradwatch.probe.batches.batch_hash import joined
from gradwatch.probe.device.transfer_queue import Values
from gradwatch.probe.gradients.histograms import bin_edges

# rows of `catalogue.PARAM`; `csrc/fast_path.h` has the same order
GRAD = slice(0, 6)
LINEAR = slice(0, 4)  # the gradient statistics that grow with the gradient: norm, maximum, mean, deviation
UPDATE = slice(6, 8)
L2 = catalogue.PARAM_NAMES.index("grad.l2")
NONFINITE = catalogue.PARAM_NAMES.index("grad.nonfinite")

Columns = NDArray[np.intp] | slice


class OptimizerColumns(NamedTuple):
    """The columns of a row that one optimizer fills: all its parameters, and its parameters with histograms.

    `owned_P` marks the parameters that an optimizer holds, which count in the total norm. None counts all.
    """

    params: Columns
    histograms_K: NDArray[np.intp]
    owned_P: NDArray[np.bool_] | None


class OptimizerResult(NamedTuple):
    """The part of a row that one optimizer contributes.

    Args:
        norm: Total norm of the gradients at their first reading; None if they were not read.
        clipped_norm: Total norm just before the update, if the gradients were first read before clipping.
        is_skipped: Whether a GradScaler skipped the update on the device.
        counts_2KB: Histograms of gradients and weights, if they were due.
    """

    norm: float | None
    clipped_norm: float | None
    is_skipped: bool
    counts_2KB: NDArray[np.int64] | None


class StepRow(NamedTuple):
    """A completed row.

    Args:
        param_SL: Statistics of the parameters.
        act_SA: Statistics of the activations, if they were due.
        histograms: Histograms, if they were due.
        optimizers: One result per optimizer.
        run: Statistics of the run.
        owned_L: Which parameters count in the total norm, since an optimizer holds them; None if all do.
    """

    param_SL: NDArray[np.float32]
    act_SA: Floats | None
    histograms: Histograms | None
    optimizers: Sequence[OptimizerResult]
    run: dict[str, float]
    owned_L: NDArray[np.bool_] | None

    def norms(self, given_norm: float | None) -> tuple[float, float]:
        """Return the total norm before and after clipping; nan if no gradient was read.

        Args:
            given_norm: The norm that clipping returned. It scales gradients back that were read after clipping.
        """
        read = [result.norm for result in self.optimizers if result.norm is not None]
        if not read:
            return math.nan, math.nan
        norm = read[0] if len(self.optimizers) == 1 else total_norm(self.param_SL, self.owned_L)
        # an optimizer without a second reading counts with its first
        clipped = [r.norm if r.clipped_norm is None else r.clipped_norm for r in self.optimizers]
        if any(result.clipped_norm is not None for result in self.optimizers):
            return norm, math.hypot(*[value for value in clipped if value is not None])
        # clipping takes all parameters that it is given, also those that no optimizer holds
        whole_norm = norm if self.owned_L is None else total_norm(self.param_SL)
        # the tolerance: a norm of unclipped gradients differs by its order of summation
        if given_norm is not None and math.isfinite(given_norm) and 0 < whole_norm * (1 + NORM_TOLERANCE) < given_norm:
            factor = given_norm / whole_norm
            self.param_SL[LINEAR] *= np.float32(factor)
            return given_norm if self.owned_L is None else norm * factor, norm
        return norm, norm


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuilder:
    """Completes a row from values of the device. The next row may begin before that.

    Args:
        step: Optimizer step.
        num_layers: Parameters of the model.
        optimizers: Columns of each optimizer.
        dead: Mask of the dead units of each activation module, or None if only the device knows them.
        num_modules: Number of activation modules.
        silence: Tracks since when units have been silent.
    """

    step: int
    num_layers: int
    optimizers: Sequence[OptimizerColumns]
    dead: Sequence[UnitMask | None] | None
    num_modules: int
    silence: SilentUnits

    def build(self, values: Values) -> StepRow:
        """Return the completed row.

        Args:
            values: Values by name. Optimizer `i` has `i.grad` and `i.clipped` of shape (S, P); `i.update` of shape
                (2, P); and `i.counts` of shape (2, K, B). It also has `i.clipped_norm`, `i.found_inf`, `i.loss_scale`
                and learning rates.
                `act` and `dead.j` belong to the activations.
        """
        param_SL = np.full((len(catalogue.PARAM), self.num_layers), math.nan, np.float32)
        results = []
        run: dict[str, float] = {}
        for i, columns in enumerate(self.optimizers):
            own = {name.partition(".")[2]: v for name, v in values.items() if name.startswith(f"{i}.")}
            results.append(_fill(param_SL, own, columns))
            run |= {n: float(v.reshape(-1)[0]) for n, v in own.items() if n == "loss_scale" or n.startswith("lr.")}
        # only a value of the device overrides what the host knows; one optimizer that moves makes a step
        if any("found_inf" in name for name in values):
            run["skipped"] = float(all(result.is_skipped for result in results))
        owned_L = self._owned()
        return StepRow(param_SL, self._activations(values), self._histograms(results), results, run, owned_L)

    def _owned(self) -> NDArray[np.bool_] | None:
        # only the last optimizer has parameters that no optimizer holds
        last = self.optimizers[-1] if self.optimizers else None
        if last is None or last.owned_P is None:
            return None
        owned_L = np.ones(self.num_layers, np.bool_)
        owned_L[last.params] = last.owned_P
        return owned_L

    def _activations(self, values: Values) -> Floats | None:
        if "act" not in values:
            return None
        dead = self.dead
        if dead is None:
            flags = [values.get(f"dead.{a}") for a in range(self.num_modules)]
            dead = [None if flag_C is None else packed(flag_C) for flag_C in flags]
        return np.concatenate([values["act"], self.silence.add(self.step, dead)])

    def _histograms(self, results: Sequence[OptimizerResult]) -> Histograms | None:
        counted = [
            (columns.histograms_K, result.counts_2KB)
            for columns, result in zip(self.optimizers, results, strict=True)
            if result.counts_2KB is not None
        ]
        if not counted:
            return None
        places_K = np.concatenate([columns_K for columns_K, _ in counted])
        grad_KB, weight_KB = np.concatenate([counts_2KB for _, counts_2KB in counted], axis=1)
        return Histograms(step=self.step, edges_B=bin_edges(), places_K=places_K, grad_KB=grad_KB, weight_KB=weight_KB)


def _fill(param_SL: NDArray[np.float32], values: Values, columns: OptimizerColumns) -> OptimizerResult:
    """Write the values of one optimizer into the row."""
    is_skipped = bool(values["found_inf"].any()) if "found_inf" in values else False
    norm = None
    if "grad" in values:
        param_SL[GRAD, columns.params] = values["grad"]
        norm = total_norm(values["grad"], columns.owned_P)
    if "update" in values:
        param_SL[UPDATE, columns.params] = values["update"]
        if is_skipped:  # a skipped update moved nothing, so it has no ratio
            param_SL[UPDATE.stop - 1, columns.params] = math.nan
    clipped_norm = float(values["clipped_norm"][0]) if "clipped_norm" in values else None
    if "clipped" in values:
        clipped_norm = total_norm(values["clipped"], columns.owned_P)
    return OptimizerResult(norm, clipped_norm, is_skipped, values.get("counts"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow:
    """The part of a row that the host knows before the device has computed the rest.

    Args:
        builder: Completes the statistics of parameters and activations.
        run: The monitor's own statistics of the run.
        given: Statistics of the run that override `run`.
        calls: Number of losses in the average.
        accumulate: Micro-batches per step.
        has_norms: Whether the monitor computes the gradient norms.
        given_norm: The norm that clipping returned, if the host knows it.
        checksums: Checksums for the hash of the batch, with a tensor for each checksum on the device. None if there is
            no batch, or if its hash is known.
        loss: The loss as the loop passed it.
    """

    builder: RowBuilder
    run: Mapping[str, float]
    given: Mapping[str, float]
    calls: int
    accumulate: int
    has_norms: bool
    given_norm: float | None
    checksums: Sequence[int | Tensor] | None
    loss: Any

    @property
    def is_validated(self) -> bool:
        """Return whether the step has a validation loss."""
        return "val_loss" in self.run or "val_loss" in self.given

    def complete(self, values: Values) -> StepRow:
        """Return the row with all statistics of the run.

        Args:
            values: As in `RowBuilder.build`. Also `loss`, the sum of losses on the device; `given_norm`; `micro`, the
                norm of the first micro-batch; and `batch`, the missing checksums.
        """
        row = self.builder.build(values)
        run = {**self.run, **row.run}
        if "loss" in values:
            run["loss"] += float(values["loss"]) / self.calls
        if "micro" in values:  # the loop divides each micro-batch's loss by their number
            run["grad_norm.micro"] = self.accumulate / run["loss_scale"] * float(values["micro"])
        if "policy" in values:
            run |= dict(zip(catalogue.POLICY_NAMES, map(float, values["policy"]), strict=True))
        if self.has_norms:
            given_norm = float(values["given_norm"].mean()) if "given_norm" in values else self.given_norm
            run["grad_norm.before_clip"], run["grad_norm.after_clip"] = row.norms(given_norm)
        run |= self.given  # last: given statistics override computed ones
        if self.checksums is not None:
            remote = iter(values.get("batch", np.zeros(0, np.int64)))
            parts = [int(next(remote)) if isinstance(part, Tensor) else part for part in self.checksums]
            run["batch_hash"] = float(joined(parts))
        return row._replace(run=run)


def total_norm(row_SL: Floats, owned_L: NDArray[np.bool_] | None = None) -> float:
    """Return the L2 norm of all gradients; NaN or Inf if one contains NaN or Inf.

    Args:
        row_SL: The gradient statistics of every layer, nan for a layer without gradient. At least the first 6 rows.
        owned_L: Which layers to include; None includes all.
    """
    row_SL = row_SL if owned_L is None else row_SL[:, owned_L]
    norm = _norm(row_SL[L2])
    # nan means a missing gradient or a gradient of NaN: only a missing one has no count of non-finite elements
    return norm if norm == norm else _norm(row_SL[L2, ~np.isnan(row_SL[NONFINITE])])


def _norm(values: Floats) -> float:
    """Return the L2 norm of float32 values, bit-identical to `total_norm` of `csrc/fast_path.h`."""
    squares = np.square(values, dtype=np.float64)  # exact: the square of a float32 fits in a float64
    return math.sqrt(math.fsum(squares.data))  # rounded twice: by the sum and by the root


def has_gradients(row_SP: Floats) -> bool:
    """Return whether any gradient is neither None nor all zeros."""
    return bool(((row_SP[L2] != 0) & ~np.isnan(row_SP[NONFINITE])).any())
