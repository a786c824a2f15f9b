"""A row of statistics as it comes off the device: whole, with the norms of its gradients before and after clipping."""

# L = parameter tensors, S = statistics, A = activation modules, K = parameters with histograms, B = bins

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import Floats, Histograms
from gradwatch.monitor.host_stats import ROUNDING
from gradwatch.monitor.optimizer_tracker import LINEAR, Arrived, Counted, Part, total_norm
from gradwatch.probe.activations.bitmask import packed
from gradwatch.probe.activations.silent_units import SilentUnits
from gradwatch.probe.device.transfer_queue import Values
from gradwatch.probe.gradients.histograms import bin_edges


class Left(NamedTuple):
    """A row as it comes off the device: statistics, norms and histograms of each optimizer, what it says of the run."""

    row_SL: NDArray[np.float32]
    act_SA: Floats | None
    counted: Sequence[Counted]
    parts: list[Arrived]
    run: dict[str, float]

    def norms(self, told: float | None) -> tuple[float, float]:
        """Return the total norm before and after clipping; see `reconciled`."""
        return reconciled(self.row_SL, self.norm, [part[:2] for part in self.parts], told)

    @property
    def norm(self) -> float:
        """Total norm of the gradients as they were read."""
        return total_norm(self.row_SL)

    def histograms(self, step: int) -> Histograms | None:
        """Return the histograms, where they were due."""
        return as_histograms(step, [*self.counted, *(part.counted for part in self.parts if part.counted)])


def reconciled(
    row_SL: NDArray[np.float32], norm: float, parts: Sequence[tuple[float, float | None]], told: float | None
) -> tuple[float, float]:
    """Return the total norm before and after clipping, and scale a row back that was read after it.

    Args:
        row_SL: The statistics.
        norm: Their total norm.
        parts: Norm of the gradients of each optimizer, as they were read and, where they were read twice, as clipped.
        told: The norm that clipping returned, where the gradients were read after it.
    """
    if [clipped for _, clipped in parts if clipped is not None]:
        return norm, math.hypot(*[read if clipped is None else clipped for read, clipped in parts])
    if told is not None and math.isfinite(told) and 0 < norm * (1 + ROUNDING) < told:
        row_SL[LINEAR] *= told / norm
        return told, norm
    return norm, norm


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Makes a row that is under way, from what was outgoing; the next one may begin in between.

    Args:
        step: Optimizer step.
        row_SL: What is known of the row.
        counted: Histograms that are known.
        parts: Of the collector.
        norms: Norm of the gradients of each part as they were read, and as clipped.
        turns: Columns of the parameters of each part whose histograms are due.
        num_modules: How many activation modules are watched.
        silence: Since when units have been silent.
    """

    step: int
    row_SL: NDArray[np.float32]
    counted: Sequence[Counted]
    parts: Sequence[Part]
    norms: Sequence[tuple[float, float | None]]
    turns: Sequence[NDArray[np.intp]]
    num_modules: int
    silence: SilentUnits

    def __call__(self, values: Values) -> Left:
        """Return the row, whole."""
        arrived = []
        run: dict[str, float] = {}
        for i, (part, (norm, clipped), columns_K) in enumerate(zip(self.parts, self.norms, self.turns, strict=True)):
            mine = {name.partition(".")[2]: v for name, v in values.items() if name.startswith(f"{i}.")}
            told = part.place(mine, self.row_SL, columns_K)
            clipped = clipped if told.clipped_norm is None else told.clipped_norm
            norm = told.norm if "grad" in mine else norm
            arrived.append(told._replace(norm=norm, clipped_norm=clipped))
            run |= {n: float(v.reshape(-1)[0]) for n, v in mine.items() if n == "loss_scale" or n.startswith("lr.")}
        if any("found_inf" in name for name in values):
            run["skipped"] = float(all(part.is_skipped for part in arrived))
        act_SA = None
        if "act" in values:
            flags = [values.get(f"dead.{a}") for a in range(self.num_modules)]
            dead = [None if flag_C is None else packed(flag_C) for flag_C in flags]
            act_SA = np.concatenate([values["act"], self.silence.add(self.step, dead)])
        return Left(self.row_SL, act_SA, self.counted, arrived, run)


def as_histograms(step: int, counted: Sequence[Counted]) -> Histograms | None:
    """Return what was counted of each part as histograms, None where there are none."""
    if not counted:
        return None
    places_K = np.concatenate([part.columns_K for part in counted])
    grad_KB, weight_KB = np.concatenate([part.counts_2KB for part in counted], axis=1)
    return Histograms(step=step, edges_B=bin_edges(), places_K=places_K, grad_KB=grad_KB, weight_KB=weight_KB)
