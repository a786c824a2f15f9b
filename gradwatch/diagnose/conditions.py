"""What a history says about its run besides the findings: what the model is made of, what its rate and norms did."""

# T = steps

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.diagnose.gradient_noise import noise_scale
from gradwatch.history.store import History
from gradwatch.records import Finding

SATURATING = ("Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh")
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")

CENTRED = ("Tanh", "ReLU", "LeakyReLU", "GELU", "SiLU", "ELU")
"""Module types whose output varies about as much as their input. A sigmoid's does a quarter as much by nature."""

FAINT = 0.01
"""Standard deviation of such an output below which the signal is lost; near 1 is what initialisations aim at."""

SHUT = 0.01
"""Mean and standard deviation below which an activation passes nothing on: a sigmoid at -4.6, for every sample."""

DEEP = 8
"""Modules with a weight matrix from which on a network counts as deep: products over fewer factors stay moderate."""

RECENT = 100
"""Steps before a finding within which a jump of the learning rate may have caused it."""

START = 20
"""Steps that count as the start: few detectors wait longer for what was there from the first step on."""

ONE_SIDED = "batch.one_sided"
"""Evidence of batches that hold one class each."""

TOLD = {
    "non-finite": ("tape-singular", "tape-log-of-softmax"),
    "no-gradient": ("tape-constant", "tape-cut"),
    "loss-plateau": ("tape-broadcast",),
}
"""Events that say more of a kind of finding, the more telling kind first."""

MOST_TOLD = 2
"""Events that are told of with one finding."""

JUMP = 3.0
"""Factor by which the rate must exceed all before it to have jumped: warm-ups rise in smaller steps."""


SETTLED = 8
"""Steps at a rate before a rise of it counts as a jump: the first steps of a warm-up multiply it as well."""


RISING = 60
"""Steps over which a rate that triples is still rising, rather than warming up for the first time."""

MODERATE = 0.1
"""Rate that plain SGD takes in its stride wherever gradients are of usual size: PyTorch's examples use up to 0.1."""

ENDLESS = "loss.by_first_size"
"""Evidence that only a loss without a least value has."""

STEEP = 1e3
"""Gradient norm in units of the loss: with weights of order 1 a step of a thousandth would undo all of the loss."""


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

    `saturating`, `relu`, `recurrent`: module types that the model has. `softmax`: the finding concerns one, or a tensor
    of a model that has one. `embedding`: it concerns an embedding. `deep`, `unnormalised`: its depth, and that no
    module normalises. `linear`: several weight matrices, and no module between them that is not linear. `unclipped`: no
    gradient was ever clipped. `fp16`, `scaled`, `unscaled`: precision, and whether a GradScaler scales the loss.
    `jumped`, `decayed`: the learning rate rose threefold beyond all before in the 100 steps before the finding, or has
    fallen to a hundredth. `first`, `at-start`, `late`: found at step 0, within the first 20 steps, or after 40. `calm`:
    the norms of the 16 steps before were within ten times the usual. `faint`: the outputs of a tanh or ReLU hardly
    vary. `whole`, `zero`, `waves`, `held`: the finding concerns the whole run, the gradient is zero and not None, it
    comes in waves or by class, an optimizer holds the layer. `broadcast`, `singular`, `constant`, `over-batch`,
    `heads`, `unregistered`: the tape of the loss says so. `statistics`: what disagrees is the statistics of a
    normalisation, not a mode. `noisy`: the gradient noise scale is more than ten times the batch. `rising`: the
    learning rate tripled over the 60 steps before the finding, little by little. `moderate`: the optimizer is SGD, at a
    rate of 0.1 at most, and the gradient `steep` or the run `at-start`, so that large updates come from large
    gradients. `spiked`: a single spike of the gradient was found by then, after the start. `steep`: the gradient norm
    was a thousand times the loss. `zeroed`: most weight matrices are zero at first. `gain`: what was measured is the
    gain of the backward pass. `last`: the finding concerns the last activation, which is no softmax. `shut`: it
    concerns an activation that is next to zero for every sample. `bad-batch`, `good-batch`: the inputs whose loss was
    not finite hold NaN or Inf, or none. `endless`: the loss falls below zero without end.
    """
    info = history.info
    types = {a.module_type for a in info.activations}
    own = {a.module_type for a in info.activations if a.name == leading.layer}
    is_softmax = any(module_type.startswith("Softmax") for module_type in own or types)
    ill = _tensors(history, leading.layer)
    modules = {layer.module_type for layer in info.layers}
    rate_T = history["lr.0"]
    jump = numbers(history, until=leading.step).jumped_at
    is_steep = _is_steep(history, leading.step)
    kinds = {event.kind for event in history.events if event.step <= leading.step}
    evidence = {q.key: q.value for q in leading.evidence}
    clipped_T = history["grad_norm.after_clip"] < 0.999 * history["grad_norm.before_clip"]
    holds = {
        "saturating": bool(types & set(SATURATING)),
        "softmax": is_softmax,
        "embedding": bool(ill) and all("Embedding" in layer.module_type for layer in ill),
        "relu": "ReLU" in types,
        "recurrent": bool(modules & set(RECURRENT)),
        "deep": len({layer.module for layer in info.layers if len(layer.shape) >= 2}) >= DEEP,
        "linear": _is_linear(types, modules, history),
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
        "zero": evidence.get("grad.is_none") == 0,
        "waves": evidence.get("grad_norm.autocorrelation", 0.0) > 0 or ONE_SIDED in evidence,
        "broadcast": "tape-broadcast" in kinds,
        "singular": bool(kinds & {"tape-singular", "tape-log-of-softmax"}),
        "constant": "tape-constant" in kinds,
        "over-batch": "tape-over-batch" in kinds,
        "heads": "tape-heads" in kinds,
        "unregistered": "parameters-unregistered" in kinds,
        "noisy": (noise := noise_scale(history)) is not None and noise.is_noisy,
        "statistics": not any(kind.startswith("mode-") for kind in kinds),
        "rising": jump is None and _is_rising(history, leading.step),
        "moderate": info.optimizer == "SGD" and bool(rate_T[-1] <= MODERATE) and (is_steep or leading.step <= START),
        "spiked": any(f.kind == "gradient-spike" and START < f.step <= leading.step + 5 for f in history.findings),
        "steep": is_steep,
        "zeroed": _is_zeroed(history),
        "gain": "backward.gain_decades" in evidence,
        "endless": ENDLESS in evidence,
        "last": bool(info.activations) and leading.layer == info.activations[-1].name and not is_softmax,
        "shut": all(abs(evidence.get(name, math.inf)) < SHUT for name in ("act.mean", "act.std")),
        "bad-batch": "batch-nonfinite" in kinds,
        "good-batch": "batch-finite" in kinds,
        "held": any(layer.group is not None for layer in ill),
    }
    return frozenset(name for name, is_so in holds.items() if is_so)


def told(history: History, leading: Finding) -> list[str]:
    """Return what the tape of the loss says of a finding, the newest first: a formula, the place of a cut, shapes."""
    before = [event for event in history.events if event.step <= leading.step]
    kinds = TOLD.get(leading.kind, ())
    events = next((found for kind in kinds if (found := [e for e in before if e.kind == kind])), [])
    if events and events[0].kind == "tape-cut":
        ill = _tensors(history, leading.layer)
        places = [place for place, layer in enumerate(history.info.layers) if layer in ill]
        events = [e for e in events if any(e.values["first"] <= place <= e.values["last"] for place in places)]
    return [event.text for event in sorted(events, key=lambda event: -event.step)[:MOST_TOLD]]


def _is_linear(activations: set[str], modules: set[str], history: History) -> bool:
    """Say whether a model has several weight matrices and neither activations nor layers that hold some."""
    matrices = [layer for layer in history.info.layers if len(layer.shape) >= 2]
    composed = modules & set(RECURRENT) or any("Attention" in m or "Transformer" in m for m in modules)
    return len(matrices) > 1 and not activations and not composed


def _is_rising(history: History, step: int) -> bool:
    """Say whether the rate has tripled over the last steps, beyond all before: no warm-up goes on for that long."""
    steps_T, rate_T = history.steps("lr.0"), history["lr.0"]
    now_T, before_T = rate_T[steps_T <= step], rate_T[steps_T <= step - RISING]
    return len(before_T) > 0 and bool(now_T[-1] >= JUMP * np.fmax.reduce(before_T) > 0)


def _is_steep(history: History, step: int) -> bool:
    """Say whether the gradient norm was out of all proportion to the loss, or to 1 where that is NaN, by a step."""
    steps_T = history.steps("loss")
    near_T = (steps_T >= step - 16) & (steps_T <= step)
    loss_T, norm_T = np.abs(history["loss"][near_T]), history["grad_norm.before_clip"][near_T]
    return bool(np.any(norm_T > STEEP * np.where(np.isfinite(loss_T), loss_T, 1)))


def _is_zeroed(history: History) -> bool:
    """Say whether most weight matrices were zero when they were first measured."""
    matrices = [i for i, layer in enumerate(history.info.layers) if layer.trainable and len(layer.shape) >= 2]
    norm_TL = history["weight.l2"][:1, matrices]
    return bool(norm_TL.size and 2 * np.count_nonzero(norm_TL == 0) > norm_TL.size)


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
