"""Compute which conditions hold for a finding of a run, one predicate per condition, grouped by data source."""

# T = steps, A = activation modules

from __future__ import annotations

import math

import numpy as np

from gradwatch.detect.features.structure import structure_of
from gradwatch.diagnose.condition import Condition, DataCondition, Fact, RankCondition
from gradwatch.diagnose.gradient_noise import noise_scale
from gradwatch.diagnose.graph_notes import layers_of
from gradwatch.diagnose.run_numbers import (
    KAIMING_TOLERANCE,
    RATE_JUMP,
    USUAL_STEPS,
    first_weights,
    is_clipped,
    kaiming_ratios,
    measure_run,
)
from gradwatch.events import (
    BATCH_FINITE,
    BATCH_NONFINITE,
    BROADCAST,
    CLEARED_EARLY,
    CLIPPED_LATE,
    CONSTANT_SOFTMAX,
    DERIVATIVE,
    DRAWS_REPEATED,
    FREEZE_IGNORED,
    GRADIENTS_REUSED,
    HEADS,
    LABELS_EQUAL,
    LOG_OF_SOFTMAX,
    OPTIMIZER_REBUILT,
    OPTIMIZERS_OPPOSED,
    OUTPUTS_AVERAGED,
    PADDING_ATTENDED,
    POOLED,
    RANK_LOSS_NONFINITE,
    RATE_IGNORED,
    SEQUENCE_AXIS,
    SINGULAR,
    SOFTMAX_OVER_BATCH,
    TARGETS_AHEAD,
    TARGETS_COPIED,
    TARGETS_SHARED,
    TARGETS_UNREACHABLE,
    UNREGISTERED,
    WEIGHTS_STILL,
)
from gradwatch.history.store import History
from gradwatch.records import Finding, LayerInfo, Severity

SATURATING = ("Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh")
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")

CENTERED = ("Tanh", "ReLU", "LeakyReLU", "GELU", "SiLU", "ELU")
"""Module types with outputs that vary about as much as their inputs. A sigmoid's output varies a quarter as much."""

FAINT_STD = 0.01
"""Standard deviation of such an output below which the signal is lost; initializations aim at values near 1."""

SHUT_SIZE = 0.01
"""Mean and standard deviation below which an activation blocks its input: a sigmoid at -4.6, for every sample."""

DEEP_MODULES = 8
"""Modules with a weight matrix at which a network is deep: products over fewer factors stay moderate."""

JUMP_STEPS = 100
"""Steps before a finding within which a jump of the learning rate may have caused it."""

START_STEPS = 20
"""Steps that count as the start: few detectors wait longer for a symptom that is there from the first step."""

RISING_STEPS = 60
"""Steps over which a rate that triples is still rising, instead of warming up for the first time."""

CALM_STEPS = 16
"""Steps before a finding with gradient norms that show whether the run was calm or steep."""

MODERATE_RATE = 0.1
"""Rate that plain SGD tolerates if gradients are of usual size: PyTorch's examples use up to 0.1."""

LARGE_INPUT = 30.0
"""Root mean square of an input, as the layer's gradients show it, above which the data are not normalized."""

USUAL_INPUT = 5.0
"""Root mean square of an input below which the inputs are not to blame; normalized data are at 1."""

RATIO_NATS = 0.1
"""Divergence of a policy in the first pass over new samples, where it must be 0; one of 8 readings is often there."""

STEEP = 1e3
"""Gradient norm in units of the loss: with weights of order 1, a step of 1/1000 would undo all of the loss."""


def conditions_of(history: History, leading: Finding) -> frozenset[Fact]:
    """Return the conditions that hold for a finding; `Condition` defines them."""
    if history.step < 0:  # the first step ran out of memory: it has no numbers
        return frozenset()
    holds = {
        **_of_model(history),
        **_of_layer(history, leading),
        **_of_evidence(leading),
        **_of_rate(history, leading),
        **_of_norms(history, leading),
        **_of_events(history, leading),
    }
    return frozenset(condition for condition, is_so in holds.items() if is_so)


def _of_model(history: History) -> dict[Fact, bool]:
    info = history.info
    activations = {a.module_type for a in info.activations}
    modules = {layer.module_type for layer in info.layers}
    return {
        Condition.SATURATING: bool(activations & set(SATURATING)),
        Condition.RECURRENT: bool(modules & set(RECURRENT)),
        Condition.DEEP: len({layer.module for layer in info.layers if len(layer.shape) >= 2}) >= DEEP_MODULES,
        Condition.LINEAR: _is_linear(activations, modules, history),
        Condition.IDENTITY: (info.settings or {}).get("model.activation") == "identity",
        Condition.UNNORMALIZED: not any("Norm" in m for m in modules),
        Condition.FP16: info.precision == "fp16",
        Condition.LOSS_SCALED: info.loss_scaling,
        Condition.FAINT_SIGNAL: _is_faint(history),
        Condition.ZERO_WEIGHTS: _is_zeroed(history),
        Condition.FROZEN: not any(layer.trainable for layer in info.layers),
        Condition.SOLVED_BY_ZERO: _is_solved_by_zero(history),
    }


def _is_solved_by_zero(history: History) -> bool:
    """Return whether the gradient alone may lead to weights of 0, as in a linear model whose inputs say nothing."""
    decays = history.info.initial_decays
    has_no_decay = bool(decays) and all(decay == 0 for decay in decays)  # None is unknown
    return has_no_decay and len(structure_of(history).matrices.indices_M) == 1


def _of_layer(history: History, leading: Finding) -> dict[Fact, bool]:
    activations = history.info.activations
    own = {a.module_type for a in activations if a.name == leading.layer}
    # a parameter is not an activation: then any softmax of the model counts
    is_softmax = any(name.startswith("Softmax") for name in own or {a.module_type for a in activations})
    affected = layers_of(history, leading.layer)
    # a backward gain ends at a layer whose inputs the network computes; the first layer shows the size of the data
    is_gain = any(q.key == "backward.gain_decades" for q in leading.evidence)
    input_size = _input_size(history, None if is_gain else leading.layer)
    is_last = bool(activations) and leading.layer == activations[-1].name and not is_softmax
    kinds = {event.kind for event in history.events}
    is_beyond = TARGETS_UNREACHABLE.name in kinds
    is_bias = bool(affected) and all(len(layer.shape) == 1 for layer in affected)
    return {
        DataCondition.LARGE_INPUTS: input_size > LARGE_INPUT,
        DataCondition.USUAL_INPUTS: input_size < USUAL_INPUT,
        Condition.WHOLE_RUN: leading.layer is None,
        Condition.SOFTMAX: is_softmax,
        # `all` of no tensor is True
        Condition.EMBEDDING: bool(affected) and all("Embedding" in layer.module_type for layer in affected),
        Condition.OFFSET_OF_DERIVATIVES: is_bias and DERIVATIVE.name in kinds,
        Condition.STATE_WEIGHTS: bool(affected) and all(_multiplies_state(layer) for layer in affected),
        Condition.IN_OPTIMIZER: any(layer.group is not None for layer in affected),
        Condition.LAST_ACTIVATION: is_last,
        DataCondition.TARGETS_OUT_OF_RANGE: is_beyond or (is_last and leading.kind == "saturated-activation"),
    }


def _of_evidence(leading: Finding) -> dict[Fact, bool]:
    evidence = {q.key: q.value for q in leading.evidence}
    return {
        # a finding without this evidence gives None, which is not 0
        Condition.ZERO_GRADIENT: evidence.get("grad.is_none") == 0,
        Condition.NONE_GRADIENT: evidence.get("grad.is_none") == 1,
        Condition.WAVES: evidence.get("grad_norm.autocorrelation", 0.0) > 0 or "batch.one_sided" in evidence,
        Condition.NOT_LOADED: "load.unmatched" in evidence,
        DataCondition.EQUAL_SAMPLES: "batch.equal_samples" in evidence,
        DataCondition.COPIED_SAMPLES: "batch.copied_samples" in evidence,
        DataCondition.MAYBE_ALL: leading.kind == "constant-batch" and leading.severity is Severity.INFO,
        DataCondition.WORKER_COPIES: "batch.workers" in evidence,
        Condition.BACKWARD_GAIN: "backward.gain_decades" in evidence,
        Condition.CLIMBING_LOSS: "loss.climb" in evidence,
        Condition.SHRUNK_WEIGHTS: "weight.l2.shrunk_decades" in evidence or "update.inward" in evidence,
        Condition.UNBOUNDED_LOSS: "loss.by_first_size" in evidence,
        Condition.JUMPING: "size.jumps" in evidence,
        Condition.COPY_UNCHANGED: "copy.steps" in evidence,
        Condition.COPY_STATISTICS: "copy.shift" in evidence,
        Condition.DRAWS_ENDED: "drawing modules" in evidence,
        Condition.ENTROPY_ADDED: "policy.fall" in evidence,
        Condition.EMPTY_MEAN: evidence.get("loss.values") == 0,
        Condition.UPDATES_MISSING: evidence.get("update.ratio.largest") == 0,
        Condition.ZERO_LOSS: "loss.zero_steps" in evidence,
        RankCondition.CLIPPED: "rank.clipped" in evidence,
        RankCondition.FACTOR: "rank.factor" in evidence,
        RankCondition.RATES: "rank.rate" in evidence,
        RankCondition.BUFFERS: "rank.buffers" in evidence,
        RankCondition.MOMENTS: "rank.moments" in evidence,
        RankCondition.ORDER: "rank.epoch_steps" in evidence,
        RankCondition.DRAWS: "rank.draws" in evidence,
        Condition.UNUSED_EXPERTS: "routing.unused" in evidence,
        Condition.RATE_SQUARED: "lr.initial" in evidence,
        Condition.RATIO_AT_ONCE: evidence.get("policy.divergence.smallest", 0.0) > RATIO_NATS,
        Condition.SHUT: all(abs(evidence.get(key, math.inf)) < SHUT_SIZE for key in ("act.mean", "act.std")),
    }


def _of_rate(history: History, leading: Finding) -> dict[Fact, bool]:
    rate_T = history["lr.0"]
    jump = measure_run(history, until=leading.step).jumped_at
    is_sgd = history.info.optimizer == "SGD" and bool(rate_T[-1] <= MODERATE_RATE)
    return {
        Condition.RATE_JUMPED: jump is not None and leading.step - jump <= JUMP_STEPS,
        Condition.RATE_RISING: jump is None and _is_rising(history, leading.step),
        Condition.RATE_DECAYED: bool(rate_T[-1] < np.fmax.reduce(rate_T) / 100),
        Condition.MODERATE_SGD: is_sgd and (_is_steep(history, leading.step) or leading.step <= START_STEPS),
    }


def _of_norms(history: History, leading: Finding) -> dict[Fact, bool]:
    step, noise = leading.step, noise_scale(history)
    spikes = [f.step for f in history.findings if f.kind == "gradient-spike"]
    return {
        Condition.AT_FIRST_STEP: step == 0,
        Condition.FINITE_LOSS: bool(np.isfinite(history["loss"][history.steps("loss") == step]).any()),
        Condition.AT_START: step <= START_STEPS,
        Condition.LATE: step > 2 * START_STEPS,
        Condition.UNCLIPPED: not is_clipped(history),
        Condition.CALM: _is_calm(history, step),
        Condition.STEEP: _is_steep(history, step),
        # the detector of spikes runs every 5 steps, so the report may follow the harm
        Condition.SPIKED: any(START_STEPS < spike <= step + 5 for spike in spikes),
        Condition.NOISY: noise is not None and noise.is_noisy,
        Condition.AMPLIFIED: _is_amplified(history, leading),
    }


def _of_events(history: History, leading: Finding) -> dict[Fact, bool]:
    kinds = {event.kind for event in history.events if event.step <= leading.step}
    is_constant = CONSTANT_SOFTMAX.name in kinds
    # a layer that the loss does not use has a gradient of None
    is_zero = any(q.key == "grad.is_none" and q.value == 0 for q in leading.evidence)
    evidence = {q.key for finding in history.findings for q in finding.evidence}
    return {
        Condition.BROADCAST: bool(kinds & {BROADCAST.name, POOLED.name}),
        DataCondition.SEQUENCE_AXIS: SEQUENCE_AXIS.name in kinds,
        DataCondition.TARGETS_AHEAD: TARGETS_AHEAD.name in kinds,
        Condition.OUTPUTS_AVERAGED: OUTPUTS_AVERAGED.name in kinds,
        DataCondition.TARGETS_SHARED: TARGETS_SHARED.name in kinds,
        DataCondition.LABELS_EQUAL: LABELS_EQUAL.name in kinds,
        Condition.OPTIMIZER_REBUILT: OPTIMIZER_REBUILT.name in kinds,
        Condition.SETTING_IGNORED: bool(kinds & {FREEZE_IGNORED.name, RATE_IGNORED.name}),
        Condition.DRAWS_REPEATED: DRAWS_REPEATED.name in kinds,
        Condition.OPTIMIZERS_OPPOSED: OPTIMIZERS_OPPOSED.name in kinds,
        Condition.CLIPPED_LATE: CLIPPED_LATE.name in kinds,
        Condition.GRADIENTS_REUSED: GRADIENTS_REUSED.name in kinds,
        Condition.CLEARED_EARLY: CLEARED_EARLY.name in kinds,
        Condition.UPDATES_ENDED: "updates.ended" in evidence,
        Condition.NEVER_STEPPED: WEIGHTS_STILL.name in kinds,
        DataCondition.TARGETS_COPIED: TARGETS_COPIED.name in kinds,
        DataCondition.PADDING_READ: "padding.fall_decades" in evidence,
        Condition.UNUSED_LATENT: "latent.nats" in evidence,
        DataCondition.PADDING_ATTENDED: PADDING_ATTENDED.name in kinds,
        Condition.SINGULAR_FORMULA: bool(kinds & {SINGULAR.name, LOG_OF_SOFTMAX.name}),
        Condition.CONSTANT_OUTPUT: is_constant,
        Condition.UNMOVED: leading.layer is None or (is_constant and is_zero),
        Condition.SOFTMAX_OVER_BATCH: SOFTMAX_OVER_BATCH.name in kinds,
        Condition.SEVERAL_HEADS: HEADS.name in kinds,
        Condition.UNREGISTERED: UNREGISTERED.name in kinds,
        # `mode-` events name a module in the wrong mode
        Condition.STATISTICS_DIFFER: not any(kind.startswith("mode-") for kind in kinds),
        RankCondition.NAN: RANK_LOSS_NONFINITE.name in kinds,
        RankCondition.INPUTS_BAD: any(
            event.values["inputs"] == 1 for event in history.events if event.kind == RANK_LOSS_NONFINITE.name
        ),
        DataCondition.BAD_BATCH: BATCH_NONFINITE.name in kinds,
        DataCondition.GOOD_BATCH: BATCH_FINITE.name in kinds,
    }


def _multiplies_state(layer: LayerInfo) -> bool:
    """Return whether a tensor is the weight of a recurrent layer that multiplies its state."""
    return layer.module_type in RECURRENT and layer.name.rpartition(".")[2].startswith("weight_hh")


def _is_linear(activations: set[str], modules: set[str], history: History) -> bool:
    """Return whether a model has several weight matrices and no activation, not even inside a layer."""
    matrices = [layer for layer in history.info.layers if len(layer.shape) >= 2]
    # these modules compute their activations inside, where no hook sees them
    composed = modules & set(RECURRENT) or any("Attention" in m or "Transformer" in m for m in modules)
    return len(matrices) > 1 and not activations and not composed


def _is_rising(history: History, step: int) -> bool:
    """Return whether the rate tripled over the last steps above all earlier rates: no warm-up lasts that long."""
    steps_T, rate_T = history.steps("lr.0"), history["lr.0"]
    now_T, before_T = rate_T[steps_T <= step], rate_T[steps_T <= step - RISING_STEPS]
    return len(before_T) > 0 and bool(now_T[-1] >= RATE_JUMP * np.fmax.reduce(before_T) > 0)


def _is_steep(history: History, step: int) -> bool:
    """Return whether the gradient norm was out of proportion to the loss (to 1 if the loss is NaN) before a step."""
    steps_T = history.steps("loss")
    near_T = (steps_T >= step - CALM_STEPS) & (steps_T <= step)
    loss_T, norm_T = np.abs(history["loss"][near_T]), history["grad_norm.before_clip"][near_T]
    return bool(np.any(norm_T > STEEP * np.where(np.isfinite(loss_T), loss_T, 1)))


def _is_zeroed(history: History) -> bool:
    """Return whether most weight matrices were zero at their first measurement."""
    matrices = [i for i, layer in enumerate(history.info.layers) if layer.trainable and len(layer.shape) >= 2]
    norm_L = first_weights(history, matrices)
    return bool(norm_L.size and 2 * np.count_nonzero(norm_L == 0) > norm_L.size)


def _input_size(history: History, name: str | None) -> float:
    """Return the root mean square of a layer's input as its gradients show it, or nan if they cannot show it.

    The gradient of the weight is the sum of g x over the batch, and the gradient of the bias is the sum of g. If `name`
    is not a layer with both, the first layer of the model is measured.
    """
    layers = history.info.layers
    if any("Norm" in layer.module_type for layer in layers) or not len(history.param):
        return math.nan  # a normalization after the layer cancels the gradient of its bias
    own = [i for i, layer in enumerate(layers) if name in (layer.name, layer.module)][:1]
    weight = own[0] if own else 0
    bias = weight + 1
    if bias >= len(layers) or layers[weight].module != layers[bias].module:
        return math.nan
    if len(layers[weight].shape) < 2 or len(layers[bias].shape) != 1:
        return math.nan
    weight_T, bias_T = history["grad.l2"][:USUAL_STEPS, [weight, bias]].T
    known_T = np.isfinite(weight_T) & (bias_T > 0)
    sizes_T = weight_T[known_T] / bias_T[known_T] / math.sqrt(math.prod(layers[weight].shape[1:]))
    return float(np.median(sizes_T)) if len(sizes_T) else math.nan


def _is_faint(history: History) -> bool:
    """Return whether the forward pass loses the signal: outputs near zero that hardly differ between samples."""
    if not history.info.activations or not len(history.act.steps(1)):
        return False
    std_A = history.act.newest("act.std")
    kept = [a.module_type in CENTERED for a in history.info.activations]
    return bool((std_A[kept] < FAINT_STD).any())


def _is_amplified(history: History, leading: Finding) -> bool:
    """Return whether the first loss or the backward gain is high, and no weight matrix began above Kaiming's size."""
    is_high = any(q.key in ("backward.gain_decades", "loss.log_classes") for q in leading.evidence)
    ratio_L = kaiming_ratios(history) if is_high else np.empty(0)
    return bool(ratio_L.size) and bool(np.all(ratio_L < 1 + KAIMING_TOLERANCE))


def _is_calm(history: History, step: int) -> bool:
    """Return whether the norms just before a step were within 10 times the usual norm."""
    steps_T, norm_T = history.steps("grad_norm.before_clip"), history["grad_norm.before_clip"]
    before_T = norm_T[(steps_T >= step - CALM_STEPS) & (steps_T < step) & np.isfinite(norm_T)]
    usual_T = norm_T[np.isfinite(norm_T) & (steps_T < step)][:USUAL_STEPS]
    return len(before_T) > 0 and bool(np.max(before_T) < 10 * np.median(usual_T))  # no norms: unknown
