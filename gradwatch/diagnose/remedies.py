"""Build remedies: a change in words and, if a config can express it, dotted keys with their new values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal

from gradwatch.diagnose.conditions import START_STEPS
from gradwatch.diagnose.run_numbers import RunNumbers
from gradwatch.records import Finding, Remedy

CLIP_BY_USUAL = 2.0
"""Clipping limit in units of the usual norm: usual gradients pass unchanged."""

USUAL_RATIO = 1e-3
"""Update/weight ratio of most trainings (https://cs231n.github.io/neural-networks-3/#ratio)."""

MAX_RATE_FACTOR = 1e3
"""Largest factor for a single proposed raise of a rate."""


def remedies(names: Sequence[str], *, findings: Sequence[Finding], numbers: RunNumbers) -> tuple[Remedy, ...]:
    """Build the remedies of a cause, in its order, without those that do not apply.

    Args:
        names: Names of remedies: keys of `KNOWN`.
        findings: Findings that the cause explains, the leading one first.
        numbers: Learning rates and norms of the run.
    """
    made = [KNOWN[name](findings, numbers) for name in names]
    return tuple(remedy for remedy in made if remedy is not None)


def _where(findings: Sequence[Finding]) -> str:
    """Return the names of the layers of the leading kind, at most three."""
    named = list(dict.fromkeys(name for f in findings if f.kind == findings[0].kind for name in f.names))
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return ", ".join(named[:3]) + more if named else "the model"


def _round(value: float) -> float:
    """Return a number rounded to one significant digit, as a person would write it."""
    return float(f"{Decimal(value):.0e}") if value > 0 and math.isfinite(value) else value


def _lower_rate(findings: Sequence[Finding], numbers: RunNumbers) -> Remedy | None:
    if numbers.jumped_at is not None or not numbers.steady_rate > 0:
        return None  # the rate before the jump was right
    rate = _round(numbers.steady_rate / 10)
    return Remedy(text=f"lower the learning rate to {rate:g}", patch={"optim.lr": rate})


def _drop_jump(findings: Sequence[Finding], numbers: RunNumbers) -> Remedy | None:
    if numbers.jumped_at is None:
        return None
    # a schedule made the jump, so the patch removes the schedule
    text = f"keep the learning rate at {numbers.steady_rate:g}: remove the jump at step {numbers.jumped_at}"
    return Remedy(text=text, patch={"schedule": None, "optim.lr": _round(numbers.steady_rate)})


def _raise_rate(findings: Sequence[Finding], numbers: RunNumbers) -> Remedy | None:
    if not (numbers.steady_rate > 0 and numbers.update_ratio > 0):
        return Remedy(text="raise the learning rate by factors of 10 until the update/weight ratio is near 1e-3")
    # rounded down to a power of ten, and limited because a tiny ratio would ask for any factor
    factor = 10 ** math.floor(math.log10(min(max(USUAL_RATIO / numbers.update_ratio, 10.0), MAX_RATE_FACTOR)))
    rate = _round(numbers.steady_rate * factor)
    return Remedy(text=f"raise the learning rate to {rate:g}", patch={"optim.lr": rate})


def _clip(findings: Sequence[Finding], numbers: RunNumbers) -> Remedy | None:
    if any(f.kind == "vanishing-gradient" for f in findings):
        return None  # such gradients are too small
    # norms that were too large from the start do not show the usual norm
    norm = _round(CLIP_BY_USUAL * numbers.usual_norm) if findings[0].step > START_STEPS else 1.0
    norm = norm if norm > 0 else 1.0  # False for nan
    text = f"clip the gradient norm at {norm:g} to limit the size of a single step"
    return Remedy(text=text, patch={"train.clip": {"norm": norm}})


def _reattach(findings: Sequence[Finding], numbers: RunNumbers) -> Remedy:
    # no setting can express this change
    where = _where(findings)
    return Remedy(
        text=f"reconnect {where} to the loss: look for detach(), no_grad(), .data or .item() after it, or an unused "
        f"output; if this is intended, freeze it with requires_grad_(False)"
    )


def _words(text: str) -> Callable[[Sequence[Finding], RunNumbers], Remedy]:
    """Return a remedy that changes code, not settings; {where} stands for the layers."""
    return lambda findings, _: Remedy(text=text.replace("{where}", _where(findings)))


def _setting(text: str, **patch: object) -> Callable[[Sequence[Finding], RunNumbers], Remedy]:
    """Return a remedy with fixed settings; two underscores in a keyword stand for a dot."""
    keys = {key.replace("__", "."): value for key, value in patch.items()}
    return lambda findings, _: Remedy(text=text.replace("{where}", _where(findings)), patch=dict(keys))  # a copy


KNOWN: dict[str, Callable[[Sequence[Finding], RunNumbers], Remedy | None]] = {
    "lower_rate": _lower_rate,
    "drop_jump": _drop_jump,
    "raise_rate": _raise_rate,
    "clip": _clip,
    "reattach": _reattach,
    "relu": _setting("replace the saturating activation with ReLU", model__activation="relu"),
    "relu_residual_norm": _setting(
        "use ReLU, residual connections and batch normalization",
        model__activation="relu",
        model__residual=True,
        model__normalization="batch",
    ),
    "leaky_relu": _setting(
        "use LeakyReLU, which has a gradient for negative inputs too", model__activation="leaky_relu"
    ),
    "normalise": _setting("add normalization between the layers", model__normalization="batch"),
    "kaiming": _setting("use Kaiming initialization", model__init="kaiming"),
    "xavier": _setting("use Xavier initialization, made for tanh and sigmoid", model__init="xavier"),
    "scaler": _setting("enable loss scaling with a GradScaler", train__scaler__enabled=True),
    "init_scale": _setting("reset the loss scale to 65536", train__scaler__init_scale=65536.0),
    "bf16": _setting("use bfloat16, which has the exponent range of float32", train__precision="bf16"),
    "shuffle": _setting("shuffle the training data", data__shuffle=True),
    "per_epoch": _setting("step the schedule once per epoch", schedule__per="epoch"),
    "early_stop": _setting(
        "stop early when the validation loss no longer falls, and keep the best checkpoint",
        train__early_stop={"metric": "val_loss", "patience": 5},
    ),
    "weight_decay": _setting("add weight decay", optim__weight_decay=0.1),
    "augment": _words("augment the training data, collect more, or use a smaller model or dropout"),
    "find_operation": _words(
        "find the operation with gradwatch replay or gradwatch.locate, and guard it against overflow"
    ),
    "stable_formula": _words(
        "use the stable form: log_softmax, cross_entropy on logits, log(x + eps), sqrt(x + eps), x / (s + eps)"
    ),
    "leave_out_empty": _words(
        "leave out batches without a label that counts, or divide the summed loss by max(number of labels, 1)"
    ),
    "count_terms": _words(
        "check that labels and mask leave terms in the loss, and raise the margin above the distances at the start"
    ),
    "make_updates": _words(
        "find out why optimizer.step() changes nothing: gradients that are cleared before it, a step that returns early"
    ),
    "keep_labels": _words(
        "find out why no label is left: a sequence that is cut off before its answer, a mask that is too strict"
    ),
    "clean_data": _words(
        "find and fix the samples of that batch; check range, labels and normalization of all samples"
    ),
    "standardise": _setting(
        "normalize the inputs of {where} to mean 0 and standard deviation 1", data__standardize=True
    ),
    "nonlinear": _setting("add a nonlinearity, such as ReLU, between the layers", model__activation="relu"),
    "divide_scores": _words("divide the scores before {where} by the square root of their dimension"),
    "single_unit": _words(
        "use a sigmoid with BCEWithLogitsLoss on a single output unit, or a softmax over all classes"
    ),
    "freeze_target": _words("compute the targets with a frozen copy of the model, updated every few hundred steps"),
    "open_gate": _words("check what multiplies {where}: open its gate, or train the scale of its normalization"),
    "hold_parameters": _words("build the optimizer after the model is complete, and pass it the parameters of {where}"),
    "register": _words(
        "keep {where} in nn.ModuleList, nn.ModuleDict or nn.ParameterList before the optimizer is built"
    ),
    "balance_tasks": _words("normalize the targets, or weight the losses so that {where} does not dominate"),
    "over_classes": _words("apply the softmax over the classes: dim=1"),
    "master_weights": _words("keep the weights of {where} in float32, and use autocast for the forward pass"),
    "small_embeddings": _words(
        "initialize {where} with a standard deviation of 0.02 to 0.1: nn.init.normal_(embedding.weight, std=0.05)"
    ),
    "zero_grad": _words("call optimizer.zero_grad() once per update"),
    "advance_iterator": _words(
        "create the data iterator once, before the loop, and do not seed a generator inside the loop"
    ),
    "fit_range": _words("remove {where} from the output, or scale the targets to its range"),
    "bound_loss": _words(
        "check the sign of the loss, and bound it: a penalty on the critic's gradient, spectral normalization, "
        "a penalty on energies, vectors of length 1"
    ),
    "divide_sums": _words(
        "divide each sum by the square root of its number of terms; in a graph, normalize by node degree"
    ),
    "larger_batch": _words(
        "accumulate more micro-batches per step, or use larger ones, up to the gradient noise scale"
    ),
    "drop_activation": _words(
        "return logits from {where}: remove the softmax or sigmoid from forward, and apply it to the predictions only"
    ),
    "set_mode": _words("call model.train() before every training pass, and model.eval() before every validation"),
    "group_norm": _words("use GroupNorm or LayerNorm in {where}, or re-estimate the running statistics"),
    "check_shapes": _words("make predictions and targets equal in shape, and check that labels match their inputs"),
}
"""All remedies by their names in the table of causes."""
