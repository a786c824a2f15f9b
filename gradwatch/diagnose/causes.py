"""The causes: which symptoms each explains, what makes it likelier, how to confirm it, what mends it, who describes it.

Odds say how many times likelier something is with the cause than without it. They are judged, not measured, on a coarse
scale: 2 a hint, 4 a good sign, 10 nearly proof. `rank` multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row of the table.

    Args:
        name: What a person would call it.
        leads: Kinds of findings that can lead to it, with the odds that this is it, against something not in the table.
        explains: Further kinds that follow from it, with the odds that each adds.
        requires: Circumstances (`circumstances.signs`) without which it is out of the question.
        excludes: Circumstances that rule it out.
        signs: Circumstances that make it likelier, or less likely, with their odds.
        because: One sentence on the mechanism.
        confirm: How to be sure.
        remedies: Names of functions in `remedy`, the smallest change first.
        source: Where it is described.
    """

    name: str
    leads: Mapping[str, float]
    explains: Mapping[str, float] = field(default_factory=dict)
    requires: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()
    signs: Mapping[str, float] = field(default_factory=dict)
    because: str
    confirm: str
    remedies: tuple[str, ...]
    source: str


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="the learning rate is too high",
        leads={
            "learning-rate-too-high": 12,
            "exploding-gradient": 1,
            "oscillating-gradient": 1.5,
            "dead-relu": 1,
            "non-finite": 0.5,
            "gradient-spike": 0.3,
        },
        explains={
            "rising-sparsity": 2,
            "saturated-activation": 2,
            "dead-layer": 2,
            "no-gradient": 1.5,
            "loss-plateau": 2,
        },
        excludes=frozenset({"waves"}),
        signs={"jumped": 12, "unclipped": 1.3, "at-start": 1.2},
        because="Steps beyond 2 / curvature overshoot by more than they came from, and throw weights far off.",
        confirm="Run the same steps at a tenth of the rate: the symptom must be gone.",
        remedies=("lower_rate", "drop_jump", "clip"),
        source="Bottou et al. 2018, https://arxiv.org/abs/1606.04838, sec. 4",
    ),
    Cause(
        name="saturating activations in a deep stack",
        leads={"vanishing-gradient": 8, "saturated-activation": 1},
        explains={
            "dead-layer": 2,
            "loss-plateau": 3,
            "layer-imbalance": 1.5,
            "learning-rate-too-low": 1.5,
            "fp16-underflow": 1.5,
            "poor-initialization": 1.2,
        },
        requires=frozenset({"saturating"}),
        signs={"deep": 2, "unnormalised": 1.5, "faint": 0.1},
        because="A sigmoid passes on at most a quarter of the gradient, tanh less than all; over depth none is left.",
        confirm="Look at the gradient norms from the output to the input: they fall by about one factor per layer.",
        remedies=("relu", "relu_residual_norm", "xavier"),
        source="Glorot & Bengio 2010, https://proceedings.mlr.press/v9/glorot10a.html, sec. 3",
    ),
    Cause(
        name="weights drawn too small or too large",
        leads={"poor-initialization": 12, "exploding-gradient": 1.5, "vanishing-gradient": 2},
        explains={
            "saturated-activation": 2,
            "dead-relu": 2,
            "learning-rate-too-high": 1.5,
            "loss-plateau": 2,
            "layer-imbalance": 1.5,
            "no-gradient": 1.5,
            "non-finite": 3,
            "gradient-spike": 1.5,
        },
        signs={"faint": 4, "at-start": 2, "unnormalised": 1.5, "deep": 1.5, "jumped": 0.2, "late": 0.2},
        because="Every layer multiplies the signal by its gain; over the layers the product is far from 1.",
        confirm="Print the standard deviation of each layer's output for one batch at step 0: it must stay near 1.",
        remedies=("kaiming", "normalise", "clip"),
        source="He et al. 2015, https://arxiv.org/abs/1502.01852, sec. 2.2",
    ),
    Cause(
        name="a deep stack that nothing normalises",
        leads={"exploding-gradient": 1.5, "vanishing-gradient": 1},
        explains={"non-finite": 3, "gradient-spike": 2, "loss-plateau": 2, "oscillating-gradient": 1.5},
        requires=frozenset({"unnormalised"}),
        signs={"deep": 2, "recurrent": 2, "unclipped": 1.3, "jumped": 0.3},
        because="Nothing brings the signal back to unit scale between the layers, so small errors of scale multiply.",
        confirm="Add a normalisation after each layer: norms per layer become equal.",
        remedies=("normalise", "clip", "lower_rate"),
        source="Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, sec. 2",
    ),
    Cause(
        name="a target that follows the model",
        leads={"exploding-gradient": 0.8, "oscillating-gradient": 0.3},
        explains={"non-finite": 2, "gradient-spike": 1.5, "loss-plateau": 1.2},
        signs={"late": 2.5, "jumped": 0.2, "at-start": 0.3},
        because="Where the model makes its own targets (bootstrapped values, pseudo-labels), an error feeds itself.",
        confirm="Freeze what makes the targets for a hundred steps: the climb must stop.",
        remedies=("freeze_target", "clip"),
        source="van Hasselt et al. 2018, https://arxiv.org/abs/1812.02648",
    ),
    Cause(
        name="half precision without loss scaling",
        leads={"fp16-underflow": 15},
        explains={
            "no-gradient": 3,
            "dead-layer": 3,
            "vanishing-gradient": 2,
            "rising-sparsity": 3,
            "loss-plateau": 2,
            "learning-rate-too-low": 2,
            "not-optimized": 1.5,
        },
        requires=frozenset({"unscaled"}),
        signs={"fp16": 4},
        because="float16 has nothing between 0 and 2^-24, and most gradients are smaller than activations by far.",
        confirm="Run the same step in float32 or bfloat16: the zeros are gone.",
        remedies=("scaler", "bf16"),
        source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.2",
    ),
    Cause(
        name="a loss scale that has fallen too low",
        leads={"fp16-underflow": 10},
        explains={"loss-scale-collapse": 4, "dead-layer": 2, "no-gradient": 1.5, "rising-sparsity": 2},
        requires=frozenset({"scaled"}),
        because="The scaler halves its scale at every overflow; too many of them leave it where gradients underflow.",
        confirm="Look at the loss scale and at the skipped steps over the run.",
        remedies=("init_scale", "bf16"),
        source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.2",
    ),
    Cause(
        name="NaN that no loss scale can mend",
        leads={"loss-scale-collapse": 10},
        explains={"non-finite": 4, "not-optimized": 2, "loss-plateau": 2, "fp16-underflow": 1.5},
        because="An overflow is gone at half the scale; what is skipped again and again is NaN at any scale.",
        confirm="Run one step in float32 under torch.autograd.detect_anomaly: it names the operation.",
        remedies=("find_operation", "bf16"),
        source="PyTorch, torch.amp.GradScaler, https://pytorch.org/docs/stable/amp.html",
    ),
    Cause(
        name="a layer cut from the graph",
        leads={"no-gradient": 8},
        explains={"dead-layer": 2, "not-optimized": 2, "loss-plateau": 1.5},
        excludes=frozenset({"whole"}),
        signs={"zero": 0.4},
        because="The loss does not depend on it: something between the two detaches, or its output is not used.",
        confirm="torch.autograd.grad(loss, parameter, allow_unused=True) returns None for its parameters.",
        remedies=("reattach",),
        source="PyTorch, autograd mechanics, https://pytorch.org/docs/stable/notes/autograd.html",
    ),
    Cause(
        name="an output that is constant",
        leads={"no-gradient": 8},
        explains={"saturated-activation": 4, "loss-plateau": 3, "dead-layer": 2},
        requires=frozenset({"whole"}),
        because="Where no weight changes the loss, the output depends on none: a softmax over one unit, a constant.",
        confirm="Perturb the weights and look at the output: it does not move.",
        remedies=("single_unit",),
        source="StackOverflow 42800203, https://stackoverflow.com/questions/42800203",
    ),
    Cause(
        name="a branch that is multiplied by zero",
        leads={"no-gradient": 3, "dead-layer": 4},
        explains={"vanishing-gradient": 1.5, "saturated-activation": 3, "layer-imbalance": 1.5},
        excludes=frozenset({"whole"}),
        signs={"zero": 4},
        because="A gate that is shut, or a norm whose scale is zero and frozen, multiplies the gradient by zero.",
        confirm="Look at what the layer's output is multiplied by: the bias of its gate, the weight of its norm.",
        remedies=("open_gate",),
        source="Srivastava et al. 2015, https://arxiv.org/abs/1505.00387, sec. 2.2",
    ),
    Cause(
        name="ReLUs that never fire",
        leads={"dead-relu": 4},
        explains={
            "no-gradient": 4,
            "dead-layer": 4,
            "rising-sparsity": 4,
            "vanishing-gradient": 2,
            "loss-plateau": 3,
            "learning-rate-too-low": 1.5,
        },
        signs={"jumped": 0.3, "unnormalised": 1.3},
        because="Their inputs are below zero for every sample; a ReLU has no gradient there, so they stay there.",
        confirm="Look at the inputs of the ReLU for one batch: nearly all are negative; look at the bias before it.",
        remedies=("leaky_relu", "kaiming", "lower_rate"),
        source="Lu et al. 2020, https://arxiv.org/abs/1903.06733",
    ),
    Cause(
        name="units that a penalty or large steps push to zero",
        leads={"rising-sparsity": 6},
        explains={"dead-relu": 3, "dead-layer": 2, "loss-plateau": 1.5},
        because="A unit that is silent for every batch has no gradient and stays so; something pushes more there.",
        confirm="Halve the L1 penalty, weight decay or learning rate: the zero fraction must rise more slowly.",
        remedies=("leaky_relu", "lower_rate"),
        source="Bricken et al. 2023, https://transformer-circuits.pub/2023/monosemantic-features",
    ),
    Cause(
        name="a formula at its singular point",
        leads={"non-finite": 2},
        explains={"gradient-spike": 1.5, "exploding-gradient": 1.2, "loss-scale-collapse": 2},
        signs={"calm": 3, "first": 0.5, "jumped": 0.5},
        because="log(0), 0 / 0, a root or norm at 0, an exponential that overflows give Inf, and Inf times 0 is NaN.",
        confirm="Run the step again under torch.autograd.detect_anomaly: it names the operation.",
        remedies=("stable_formula", "find_operation"),
        source="PyTorch, numerical accuracy, https://pytorch.org/docs/stable/notes/numerical_accuracy.html",
    ),
    Cause(
        name="NaN or Inf in the data",
        leads={"non-finite": 1},
        signs={"first": 8, "calm": 1.5},
        because="One value that is not finite in a batch makes the loss so, and with it every gradient.",
        confirm="assert torch.isfinite(batch).all() on the batch of that step; its hash is in the history.",
        remedies=("clean_data",),
        source="PyTorch, torch.isfinite, https://pytorch.org/docs/stable/generated/torch.isfinite.html",
    ),
    Cause(
        name="values above 65504 in half precision",
        leads={"non-finite": 3},
        explains={"loss-scale-collapse": 3, "exploding-gradient": 1.5},
        requires=frozenset({"fp16"}),
        because="float16 ends at 65504: large activations, sums over many values and exponentials overflow in it.",
        confirm="Run the same step in bfloat16 or float32: it is finite.",
        remedies=("bf16", "find_operation"),
        source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.3",
    ),
    Cause(
        name="a batch unlike the others",
        leads={"gradient-spike": 6},
        explains={"non-finite": 2, "exploding-gradient": 1.5, "dead-relu": 1.5},
        signs={"unclipped": 1.2},
        because="Gradients of one batch far above all others come from its data: its scale, its labels, an outlier.",
        confirm="Look at the batch of that step: its hash is in the history, its range tells.",
        remedies=("clip", "clean_data"),
        source="Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, sec. 5.1",
    ),
    Cause(
        name="data in a bad order",
        leads={"oscillating-gradient": 3},
        explains={"gradient-spike": 3, "loss-plateau": 2, "exploding-gradient": 1.5},
        signs={"waves": 4},
        because="Batches of one kind after the other teach each time what the last ones unteach.",
        confirm="Look at the labels of successive batches; shuffle and run again.",
        remedies=("shuffle",),
        source="LeCun et al. 1998, Efficient BackProp, sec. 4.2, https://doi.org/10.1007/3-540-49430-8_2",
    ),
    Cause(
        name="inputs of another scale",
        leads={"layer-imbalance": 5, "saturated-activation": 4, "exploding-gradient": 0.7},
        explains={
            "vanishing-gradient": 1.5,
            "dead-relu": 2,
            "gradient-spike": 1.5,
            "poor-initialization": 1.2,
            "loss-plateau": 2,
            "dead-layer": 1.5,
        },
        signs={"at-start": 2, "softmax": 0.5},
        because="A layer's gradient is proportional to its input, and its output grows with it.",
        confirm="Print mean and standard deviation of every input feature: 0 and 1 is what layers are made for.",
        remedies=("standardise",),
        source="LeCun et al. 1998, Efficient BackProp, sec. 4.3, https://doi.org/10.1007/3-540-49430-8_2",
    ),
    Cause(
        name="scores that are not divided by the root of their dimension",
        leads={"saturated-activation": 3},
        explains={"dead-layer": 2, "layer-imbalance": 2, "vanishing-gradient": 2, "loss-plateau": 1.5},
        requires=frozenset({"softmax"}),
        signs={"at-start": 2},
        because="A dot product over d dimensions has deviation root d: the softmax picks one entry and is flat.",
        confirm="Print the standard deviation of the scores before the softmax: it must be near 1.",
        remedies=("divide_scores",),
        source="Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, sec. 3.2.1",
    ),
    Cause(
        name="parameters that no optimizer holds",
        leads={"not-optimized": 12},
        explains={"layer-imbalance": 2, "loss-plateau": 2},
        excludes=frozenset({"held"}),
        because="The optimizer was built before the layer was, or no group's rule matches it.",
        confirm="Compare the parameters of optimizer.param_groups with model.parameters().",
        remedies=("hold_parameters",),
        source="PyTorch, torch.optim, https://pytorch.org/docs/stable/optim.html",
    ),
    Cause(
        name="updates that are lost in rounding",
        leads={"not-optimized": 8},
        explains={"loss-plateau": 2, "learning-rate-too-low": 2},
        requires=frozenset({"held"}),
        because="An update below half of the weight's last digit is rounded away: bfloat16 has 8 bits.",
        confirm="Look at the dtype of the parameters, and at update.ratio: below 2^-9 bfloat16 does not move.",
        remedies=("master_weights", "raise_rate"),
        source="Zamirai et al. 2020, Revisiting BFloat16 training, https://arxiv.org/abs/2010.06192",
    ),
    Cause(
        name="the learning rate is too low",
        leads={"learning-rate-too-low": 12},
        explains={"loss-plateau": 4, "not-optimized": 3},
        excludes=frozenset({"decayed"}),
        because="At this rate nothing can be learned in any reasonable number of steps.",
        confirm="Run a hundred steps at ten and at a hundred times the rate: the loss must fall.",
        remedies=("raise_rate",),
        source="Karpathy, CS231n, https://cs231n.github.io/neural-networks-3/#ratio",
    ),
    Cause(
        name="a schedule that decays too fast",
        leads={"learning-rate-too-low": 12},
        explains={"loss-plateau": 4, "not-optimized": 3},
        requires=frozenset({"decayed"}),
        because="The rate fell to nothing long before the end: a schedule meant for epochs is stepped for every batch.",
        confirm="Plot the learning rate over the run.",
        remedies=("per_epoch", "raise_rate"),
        source="ivadomed/ivadomed#55, https://github.com/ivadomed/ivadomed/issues/55",
    ),
    Cause(
        name="gradients that are never cleared",
        leads={"missing-zero-grad": 15},
        explains={
            "exploding-gradient": 4,
            "oscillating-gradient": 3,
            "learning-rate-too-high": 3,
            "gradient-spike": 2,
            "loss-plateau": 2,
            "non-finite": 3,
            "dead-relu": 2,
        },
        because="Each backward adds to what is there; without zero_grad every update repeats all that came before.",
        confirm="Print a parameter's grad before the first backward of a step: it must be None or zero.",
        remedies=("zero_grad",),
        source="PyTorch, https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html",
    ),
    Cause(
        name="the same batch at every step",
        leads={"constant-batch": 10},
        explains={"overfitting": 5, "loss-plateau": 1.5, "vanishing-gradient": 1.2},
        because="An iterator that is made anew, or a generator that is seeded anew, gives its first batch each time.",
        confirm="Print the hash of successive batches, or their first labels.",
        remedies=("advance_iterator",),
        source="pytorch/pytorch#1917, https://github.com/pytorch/pytorch/issues/1917",
    ),
    Cause(
        name="a model that learns its training data by heart",
        leads={"overfitting": 10},
        because="It has room for every sample, and goes on fitting what holds for no other.",
        confirm="Train on twice the data, or on half: the gap to the validation loss must change with it.",
        remedies=("early_stop", "weight_decay", "augment"),
        source="Zhang et al. 2017, https://arxiv.org/abs/1611.03530",
    ),
    Cause(
        name="a loss that does not depend on the inputs as it should",
        leads={"loss-plateau": 3},
        explains={"oscillating-gradient": 1.5, "vanishing-gradient": 1.2},
        because="Nothing else explains that it does not fall: shapes that broadcast, labels that belong elsewhere.",
        confirm="Overfit ten samples: a model that cannot has a mistake in its loss, its labels or its wiring.",
        remedies=("check_shapes",),
        source="Karpathy 2019, https://karpathy.github.io/2019/04/25/recipe/",
    ),
)
"""Every cause that is known. A kind that leads nowhere is reported as unexplained, with what to look at."""
