"""What a history says about its run besides the findings: what the model is made of, what its rate and norms did."""

# T = steps

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History
from gradwatch.records import Finding

SATURATING = ("Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh")
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")

CENTRED = ("Tanh", "ReLU", "LeakyReLU", "GELU", "SiLU", "ELU")
"""Module types whose output varies about as much as their input. A sigmoid's does a quarter as much by nature."""

FAINT = 0.01
"""Standard deviation of such an output below which the signal is lost; near 1 is what initialisations aim at."""

DEEP = 8
"""Modules with a weight matrix from which on a network counts as deep: products over fewer factors stay moderate."""

RECENT = 100
"""Steps before a finding within which a jump of the learning rate may have caused it."""

START = 20
"""Steps that count as the start: few detectors wait longer for what was there from the first step on."""

JUMP = 3.0
"""Factor by which the rate must exceed all before it to have jumped: warm-ups rise in smaller steps."""


SETTLED = 8
"""Steps at a rate before a rise of it counts as a jump: the first steps of a warm-up multiply it as well."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What remedies are made of; nan where unknown.

    Args:
        rate: Newest learning rate of the first group.
        steady_rate: The largest rate before it jumped; the largest there was where it did not.
        jumped_at: Step at which it jumped, or None.
        usual_norm: Median of the finite gradient norms of the first 64 steps.
        update_ratio: Median update/weight ratio of the newest sample.
    """

    rate: float
    steady_rate: float
    jumped_at: int | None
    usual_norm: float
    update_ratio: float


def numbers(history: History, *, until: int) -> Numbers:
    """Return the numbers of a history with at least one step.

    Args:
        history: Whose numbers.
        until: Step up to which the learning rate is looked at: a later jump has caused nothing yet.
    """
    steps_T = history.steps("lr.0")
    rate_T = history["lr.0"][steps_T <= until]
    jump = _jump(rate_T)
    norm_T = history["grad_norm.before_clip"]
    usual_T = norm_T[np.isfinite(norm_T)][:64]
    ratio_TL = history.param.window("update.ratio")
    ratio_T = ratio_TL[np.isfinite(ratio_TL).any(axis=1)]
    newest = ratio_T[-1][np.isfinite(ratio_T[-1])] if len(ratio_T) else ratio_T
    return Numbers(
        rate=float(rate_T[-1]),
        steady_rate=float(np.fmax.reduce(rate_T[: len(rate_T) if jump is None else jump])),
        jumped_at=None if jump is None else int(steps_T[jump]),
        usual_norm=float(np.median(usual_T)) if len(usual_T) else math.nan,
        update_ratio=float(np.median(newest)) if len(newest) else math.nan,
    )


def signs(history: History, leading: Finding) -> frozenset[str]:
    """Return the circumstances that hold for a finding: the names that causes look at.

    `saturating`, `softmax`, `relu`, `recurrent`: module types that the model has. `deep`, `unnormalised`: its depth,
    and that no module normalises. `unclipped`: no gradient was ever clipped. `fp16`, `scaled`, `unscaled`: precision,
    and whether a GradScaler scales the loss. `jumped`, `decayed`: the learning rate rose threefold beyond all before in
    the 100 steps before the finding, or has fallen to a hundredth. `first`, `at-start`, `late`: found at step 0, within
    the first 20 steps, or after 40. `calm`: the norms of the 16 steps before were within ten times the usual. `faint`:
    the outputs of a tanh or ReLU hardly vary. `whole`, `zero`, `waves`, `held`: the finding concerns the whole run, the
    gradient is zero and not None, it comes in waves, an optimizer holds the layer.
    """
    info = history.info
    types = {a.module_type for a in info.activations}
    modules = {layer.module_type for layer in info.layers}
    rate_T = history["lr.0"]
    jump = numbers(history, until=leading.step).jumped_at
    evidence = {q.name: q.value for q in leading.evidence}
    clipped_T = history["grad_norm.after_clip"] < 0.999 * history["grad_norm.before_clip"]
    holds = {
        "saturating": bool(types & set(SATURATING)),
        "softmax": "Softmax" in types,
        "relu": "ReLU" in types,
        "recurrent": bool(modules & set(RECURRENT)),
        "deep": len({layer.module for layer in info.layers if len(layer.shape) >= 2}) >= DEEP,
        "unnormalised": not any("Norm" in m for m in modules),
        "unclipped": not clipped_T.any(),
        "fp16": info.precision == "fp16",
        "scaled": info.loss_scaling,
        "unscaled": not info.loss_scaling,
        "jumped": jump is not None and leading.step - jump <= RECENT,
        "decayed": bool(rate_T[-1] < np.fmax.reduce(rate_T) / 100),
        "first": leading.step == 0,
        "at-start": leading.step <= START,
        "late": leading.step > 2 * START,
        "calm": _is_calm(history, leading.step),
        "faint": _is_faint(history),
        "whole": leading.layer is None,
        "zero": evidence.get("gradient is None") == 0,
        "waves": evidence.get("correlation from step to step", 0.0) > 0,
        "held": any(layer.group is not None for layer in _tensors(history, leading.layer)),
    }
    return frozenset(name for name, is_so in holds.items() if is_so)


def _is_faint(history: History) -> bool:
    """Say whether the signal is lost on its way forward: outputs around zero that hardly differ between samples."""
    if not history.info.activations or not len(history.act.steps(1)):
        return False
    std_A = history.act.newest("act.std")
    kept = [a.module_type in CENTRED for a in history.info.activations]
    return bool((std_A[kept] < FAINT).any())


def _tensors(history: History, name: str | None) -> list[Any]:
    return [la for la in history.info.layers if name is None or la.name == name or la.name.startswith(f"{name}.")]


def _jump(rate_T: NDArray[np.floating[Any]]) -> int | None:
    """Return where the rate last rose threefold beyond all that it had been, or None."""
    before_T = np.maximum.accumulate(rate_T)[:-1]
    jumps = np.flatnonzero((rate_T[1:] >= JUMP * before_T) & (before_T > 0)) + 1
    return int(jumps[-1]) if len(jumps) and jumps[-1] >= SETTLED else None


def _is_calm(history: History, step: int) -> bool:
    """Say whether the norms just before a step were nothing special."""
    steps_T, norm_T = history.steps("grad_norm.before_clip"), history["grad_norm.before_clip"]
    before_T = norm_T[(steps_T >= step - 16) & (steps_T < step) & np.isfinite(norm_T)]
    usual_T = norm_T[np.isfinite(norm_T) & (steps_T < step)][:64]
    return len(before_T) > 0 and bool(np.max(before_T) < 10 * np.median(usual_T))
