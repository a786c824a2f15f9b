"""Map the evidence names in run directories of gradwatch 0.1 to the present keys."""

from __future__ import annotations

import re

KEYS = {
    "act.dead_frac of the first samples": "act.dead_frac.before",
    "best loss": "loss.best",
    "best val_loss": "val_loss.best",
    "climb of grad_norm.before_clip": "grad_norm.climb",
    "correlation from step to step": "grad_norm.autocorrelation",
    "deviation of the weights": "weight.std",
    "distance to the nearest, median": "batch.nearest_distance",
    "equal batches in a row, at least": "batch.equal_run",
    "factor of each use": "recurrence.factor_per_use",
    "fall from the last use to the first": "recurrence.fall_decades",
    "fall over depth": "depth.fall_decades",
    "fall per module": "depth.fall_per_module_decades",
    "gain of the backward pass": "backward.gain_decades",
    "gap below the median layer": "dead_layer.gap_decades",
    "gap between the medians of the two kinds": "sources.gap_decades",
    "grad.l2 of the output's bias": "grad.l2.output_bias",
    "gradient element": "grad.element",
    "gradient element at the first": "grad.element.first",
    "gradient element at the input": "grad.element.first",
    "gradient element before the output": "grad.element.last",
    "gradient element behind the last": "grad.element.last",
    "gradient is None": "grad.is_none",
    "gradient of the median weight by that of the output's bias": "init.median_by_output_bias",
    "gradient of the weight, by that of the bias": "input_scale.weight_by_bias",
    "growth at each use": "recurrence.factor_per_use",
    "growth from the last use to the first": "recurrence.growth_decades",
    "growth of weight.l2, median": "weight.l2.growth_decades",
    "jump at step": "lr.jump_step",
    "labels minus predictions, mean over the batch": "batch.one_sided",
    "largest grad.l2": "grad.l2.largest",
    "layers drawn too large": "init.large_layers",
    "layers drawn too small": "init.small_layers",
    "layers with NaN or Inf": "non_finite.layers",
    "lead over the median layer": "imbalance.lead_over_median_decades",
    "logarithm of the number of classes": "loss.log_classes",
    "loss after": "loss.after",
    "loss around the best": "loss.at_best",
    "loss at step 0": "loss.step_0",
    "loss before": "loss.before",
    "loss in units of the first": "loss.by_first",
    "loss of knowing nothing": "loss.chance",
    "loss of the batches with small gradients": "sources.quiet_loss",
    "loss, 10 % quantile": "loss.low",
    "loss, 90 % quantile": "loss.high",
    "loss, by the size of the first": "loss.by_first_size",
    "loss, first 16 steps": "loss.first",
    "loss, median of 48 steps": "loss.median",
    "loss, median of 6": "loss.median",
    "loss, median of the newest quarter": "loss.newest_quarter",
    "loss, newest 48 steps": "loss.newest",
    "lowest loss that it can reach": "loss.floor",
    "matrices of zeros": "init.zero_matrices",
    "median grad.l2 of all tensors": "grad.l2.median",
    "median of the 32 steps before": "spike.usual_norm",
    "norm of all other gradients, by its own": "imbalance.others_by_own",
    "rise above the best": "val_loss.rise_frac",
    "rise over depth": "depth.rise_decades",
    "rise per module": "depth.rise_per_module_decades",
    "rise since the first 16 steps": "zero_frac.rise",
    "skipped in a row": "skipped.run_steps",
    "smallest float16 / loss_scale": "fp16.smallest",
    "smallest gradient of another matrix, by its own": "input_scale.weakest_by_own",
    "smallest lead over the second largest": "imbalance.lead_over_second_decades",
    "smallest lead over the second largest head": "imbalance.lead_over_second_head_decades",
    "spike at step": "spike.step",
    "spread of grad_norm.before_clip": "grad_norm.spread_decades",
    "step of the best": "val_loss.best_step",
    "steps without gradient": "no_gradient.steps",
    "the same in the beginning": "sources.quiet_loss_first",
    "the same of as many random samples, at most": "batch.one_sided_random",
    "times the median": "spike.above_median",
    "times the second largest of the steps before": "spike.above_largest",
    "update.ratio of the first update, largest": "update.ratio.first_max",
    "update.ratio of the other groups, largest": "update.ratio.other_groups",
    "update.ratio, median": "update.ratio.median",
    "updates before which nothing was cleared": "accumulation.uncleared_updates",
    "validation loss by training loss": "val_loss.by_loss",
    "weight.l2, by the first, median of the weight matrices": "weight.l2.growth",
}
"""Key of a quantity by its former name. Statistics of the catalogue used their key as the name."""

PREFIXES = {
    "act.silent of ": "act.silent",
    "act.dead_frac ": "act.dead_frac.before",
    "grad.zero_frac ": "grad.zero_frac.before",
    "largest grad.l2 in ": "grad.l2.largest",
    "crossings of the middle in ": "grad_norm.crossings",
    "grad_norm.before_clip, median of the newest": "grad_norm.newest_quarter",
    "grad_norm.before_clip, median of the first": "grad_norm.first",
}
"""Key of a quantity by the start of its former name, if the rest was a number or a module."""


def key_of(name: str) -> str:
    """Return the key of a quantity with a former name, or the name if it has no other key."""
    if re.fullmatch(r"lr\.\d+ (before|after)", name):
        return f"lr.{name.rpartition(' ')[2]}"
    prefixed = (key for prefix, key in PREFIXES.items() if name.startswith(prefix))
    return KEYS.get(name) or next(prefixed, name)
