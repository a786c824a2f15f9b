"""List every recorded statistic: its name, unit, meaning and cost. A name is `tensor.reduction`, with its unit last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """When a statistic is measured, and the cost.

    Args:
        text: Steps at which it is measured, and the reads that this takes.
        is_sampled: Whether only some steps measure it, fewer of them if the watch budget is spent.
    """

    text: str
    is_sampled: bool = True


@dataclass(frozen=True, slots=True)
class Statistic:
    """One row of the catalogue.

    Args:
        name: Name, such as `grad.l2`.
        unit: Unit; empty for a number in the units of the tensor.
        meaning: One sentence.
        cost: When it is measured.
        is_clock: Whether it depends on the clock or the memory of the machine, and thus differs in every run.
    """

    name: str
    unit: str
    meaning: str
    cost: Cost
    is_clock: bool = False


_ONE_READ = Cost("every step; shares one read of the gradient", is_sampled=False)
_SAMPLED_COPY = Cost(
    "every watch.updates_every steps; one read of weights and moments, or of weights and a copy of them"
)
_SAMPLED_FORWARD = Cost("every watch.activations_every steps; a few reads of at most watch.activation_elements values")
_SAMPLED_QUERIES = Cost(
    "every watch.activations_every steps; the products of 8 queries in each of 4 samples with all keys"
)
_POLICY = Cost(
    "every watch.activations_every steps, if the loss is a policy gradient; a few reads of what its graph keeps"
)
_REMEMBERED = Cost("every watch.activations_every steps; a few bits of memory for each unit")
_MICRO = Cost("every watch.updates_every steps, if gradients are accumulated; one read of the gradient")
_HASHED = Cost("every step; one read of the inputs", is_sampled=False)
_HOST = Cost("every step; no tensor is read", is_sampled=False)
_VALIDATED = Cost("every train.eval_every steps")

# in the order in which the native code writes them: see `csrc/fast_path.h`
PARAM: tuple[Statistic, ...] = (
    Statistic("grad.l2", "", "L2 norm of the gradient, unscaled and before clipping", _ONE_READ),
    Statistic("grad.absmax", "", "largest magnitude in the gradient; NaN if the gradient contains NaN", _ONE_READ),
    Statistic("grad.mean", "", "mean of the gradient", _ONE_READ),
    Statistic("grad.std", "", "standard deviation of the gradient's elements (divided by n)", _ONE_READ),
    Statistic("grad.zero_frac", "0..1", "fraction of elements that are exactly zero", _ONE_READ),
    Statistic("grad.nonfinite", "elements", "number of NaN and Inf elements", _ONE_READ),
    Statistic("weight.l2", "", "L2 norm of the weight before the update", _SAMPLED_COPY),
    Statistic("update.ratio", "", "L2 norm of the update / L2 norm of the weight before it", _SAMPLED_COPY),
)

ACT: tuple[Statistic, ...] = (
    Statistic("act.dead_frac", "0..1", "fraction of dead units: zero for every sample of the batch", _SAMPLED_FORWARD),
    Statistic(
        "act.saturated_frac",
        "0..1",
        "fraction of saturated outputs: in the flat tail of the function",
        _SAMPLED_FORWARD,
    ),
    Statistic("act.mean", "", "mean of the output", _SAMPLED_FORWARD),
    Statistic("act.std", "", "standard deviation of the output", _SAMPLED_FORWARD),
    Statistic(
        "attention.max_logit",
        "",
        "largest logit of attention: a scaled product of query and key, before the softmax",
        _SAMPLED_QUERIES,
    ),
    Statistic(
        "attention.entropy",
        "0..1",
        "entropy of the attention weights over the log of the number of keys, of the head with the smallest",
        _SAMPLED_QUERIES,
    ),
    Statistic("act.silent", "units", "units that were zero at each sampled step since act.silent_since", _REMEMBERED),
    Statistic("act.silent_since", "step", "the step since which 90 % of the silent units have been zero", _REMEMBERED),
    Statistic("act.units", "units", "channels or features of the module", _REMEMBERED),
)

RUN: tuple[Statistic, ...] = (
    Statistic("loss", "", "training loss of the optimizer step: mean over all samples of its micro-batches", _HOST),
    Statistic("val_loss", "", "validation loss, on the step after which it was measured", _VALIDATED),
    Statistic("val_accuracy", "0..1", "fraction of validation targets predicted correctly", _VALIDATED),
    Statistic("grad_norm.before_clip", "", "L2 norm over the gradients that an optimizer holds, unscaled", _HOST),
    Statistic(
        "grad_norm.after_clip", "", "L2 norm over all gradients after clipping; equal if nothing was clipped", _HOST
    ),
    Statistic(
        "grad_norm.micro",
        "",
        "L2 norm of the gradient of the step's first micro-batch alone, scaled like the gradient of the whole step",
        _MICRO,
    ),
    Statistic("policy.entropy", "0..1", "entropy of a policy over the log of the number of actions", _POLICY),
    Statistic(
        "policy.divergence",
        "nats",
        "estimate of the KL divergence of a policy from the one that drew the samples",
        _POLICY,
    ),
    Statistic("policy.clipped_frac", "0..1", "fraction of the ratios of a policy outside of their clip range", _POLICY),
    Statistic("loss_scale", "", "scale of the GradScaler during the step; 1 without one", _HOST),
    Statistic("skipped", "0 or 1", "1 if the optimizer step was skipped", _HOST),
    Statistic("step_ms", "ms", "wall time from one recorded step to the next", _HOST, is_clock=True),
    Statistic("data_wait_ms", "ms", "time that the step waited for its batches", _HOST, is_clock=True),
    Statistic("samples_per_s", "1/s", "samples of the step divided by step_ms", _HOST, is_clock=True),
    Statistic(
        "peak_memory_bytes",
        "bytes",
        "peak memory: of the allocator on CUDA, of the process elsewhere",
        _HOST,
        is_clock=True,
    ),
    Statistic("batch_hash", "", "48-bit hash of the step's inputs; equal batches have equal hashes", _HASHED),
    Statistic("watch_ms", "ms", "overhead of the monitor in the step", _HOST, is_clock=True),
)
"""Statistics of the whole run. One `lr.<i>` per optimizer group follows them; see `run_names`."""

PARAM_NAMES: tuple[str, ...] = tuple(s.name for s in PARAM)
ACT_NAMES: tuple[str, ...] = tuple(s.name for s in ACT)
CLOCK_NAMES: frozenset[str] = frozenset(s.name for s in RUN if s.is_clock)
POLICY_NAMES: tuple[str, ...] = tuple(s.name for s in RUN if s.name.startswith("policy."))
SAMPLED_NAMES: frozenset[str] = frozenset(s.name for s in (*PARAM, *ACT, *RUN) if s.cost.is_sampled)


def run_names(num_groups: int) -> tuple[str, ...]:
    """Return the names of the statistics of a run, with one learning rate per optimizer group."""
    return (*(s.name for s in RUN), *(f"lr.{i}" for i in range(num_groups)))
