"""Define the causes: the symptoms each explains, its conditions, its confirmation, its remedies and its source.

Odds are ratios: the likelihood of an observation with the cause, over its likelihood without the cause. They are
judged, not measured, on a coarse scale: 2 a hint, 4 a good sign, 10 nearly certain. `rank` multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from gradwatch.diagnose.condition import Condition, DataCondition, Fact, RankCondition


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row of the table of causes.

    Args:
        id: Stable name that code compares.
        name: Name to show to a person.
        leads: Kinds of findings that can lead to the cause, with the odds against causes outside the table.
        explains: Further kinds that follow from the cause, with the odds that each kind adds.
        announced_by: Kinds of notes that belong to the cause, however many steps before it they come.
        requires: Conditions without which the cause is ruled out.
        excludes: Conditions that rule the cause out.
        conditions: Conditions that make the cause likelier, or less likely, with their odds.
        because: One sentence on the mechanism.
        confirm: Test that confirms the cause.
        is_confirmed_by_rerun: Whether the test is to run the step again, which names the first bad operation.
        remedies: Keys of `remedies.KNOWN`; the remedy that cures most cases comes first.
        source: Publication or page that describes the cause.
    """

    id: str
    name: str
    leads: Mapping[str, float]
    explains: Mapping[str, float] = field(default_factory=dict)
    announced_by: frozenset[str] = frozenset()
    requires: frozenset[Fact] = frozenset()
    excludes: frozenset[Fact] = frozenset()
    conditions: Mapping[Fact, float] = field(default_factory=dict)
    because: str
    confirm: str
    remedies: tuple[str, ...]
    source: str
    is_confirmed_by_rerun: bool = False


DDP = (
    "PyTorch, DistributedDataParallel, "
    "https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
)

MEMORY_FAQ = "PyTorch, Frequently Asked Questions, https://pytorch.org/docs/stable/notes/faq.html"

CAUSES: tuple[Cause, ...] = (
    Cause(
        id="learning-rate-too-high",
        name="learning rate too high",
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
            "attention-collapse": 3,
            "policy-divergence": 3,
            "dead-layer": 2,
            "no-gradient": 1.5,
            "loss-plateau": 2,
            "vanishing-gradient": 1.5,
        },
        excludes=frozenset({Condition.WAVES}),
        conditions={
            Condition.RATE_JUMPED: 12,
            Condition.RATE_RISING: 10,
            Condition.MODERATE_SGD: 0.1,
            Condition.SPIKED: 0.1,
            Condition.UNCLIPPED: 1.3,
            Condition.AT_START: 1.2,
        },
        because="A step larger than 2 / curvature overshoots the minimum and throws the weights far off.",
        confirm=(
            "Run the same steps at a tenth of the rate: the symptom must disappear. For plain SGD, "
            "gradwatch.curvature(model, loss).largest_rate is the largest stable rate."
        ),
        remedies=("drop_jump", "lower_rate"),
        source="Bottou et al. 2018, https://arxiv.org/abs/1606.04838, sec. 4",
    ),
    Cause(
        id="clip-after-update",
        name="gradients clipped after the update",
        leads={"learning-rate-too-high": 150},
        explains={"exploding-gradient": 3, "gradient-spike": 3, "oscillating-gradient": 2, "non-finite": 3},
        requires=frozenset({Condition.CLIPPED_LATE}),
        because="step() has used the gradients when they are clipped, and zero_grad() clears them before the next one.",
        confirm="Print the total norm right before optimizer.step(): it is above the limit.",
        remedies=("clip_first",),
        source="VGraphRNN/VGRNN#4, https://github.com/VGraphRNN/VGRNN/issues/4",
    ),
    Cause(
        id="ignored-setting",
        name="setting that torch does not read",
        leads={"learning-rate-too-high": 150},
        explains={"overfitting": 1.5, "loss-plateau": 1.5},
        requires=frozenset({Condition.SETTING_IGNORED}),
        because="Python takes any attribute, so a misspelled name or one of the wrong object raises no error.",
        confirm="Print param.requires_grad and optimizer.param_groups[0]['lr']: they have not changed.",
        remedies=("set_read",),
        source="PyTorch, https://pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad",
    ),
    Cause(
        id="saturating-stack",
        name="saturating activations in a deep network",
        leads={"vanishing-gradient": 8, "saturated-activation": 1},
        explains={
            "dead-layer": 2,
            "loss-plateau": 3,
            "layer-imbalance": 1.5,
            "learning-rate-too-low": 1.5,
            "fp16-underflow": 1.5,
            "poor-initialization": 1.2,
        },
        requires=frozenset({Condition.SATURATING}),
        conditions={Condition.DEEP: 2, Condition.UNNORMALIZED: 1.5, Condition.FAINT_SIGNAL: 0.1},
        because=(
            "The slope of a sigmoid is at most 0.25 and that of tanh at most 1, so the gradient shrinks at every layer."
        ),
        confirm=(
            "Compare the gradient norms from the output to the input: they fall by about the same factor at each layer."
        ),
        remedies=("relu_kaiming", "normalize", "relu_residual_norm", "xavier"),
        source="Glorot & Bengio 2010, https://proceedings.mlr.press/v9/glorot10a.html, sec. 3",
    ),
    Cause(
        id="bad-initialization",
        name="bad weight initialization",
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
        excludes=frozenset({Condition.EMBEDDING}),
        conditions={
            Condition.FAINT_SIGNAL: 4,
            Condition.AT_START: 2,
            Condition.UNNORMALIZED: 1.5,
            Condition.DEEP: 1.5,
            Condition.RATE_JUMPED: 0.2,
            Condition.LATE: 0.2,
            Condition.BACKWARD_GAIN: 0.5,
            Condition.AMPLIFIED: 0.1,
        },
        because="Every layer multiplies the signal by its gain; over many layers the product moves far from 1.",
        confirm="Print the standard deviation of each layer's output for one batch at step 0: it must stay near 1.",
        remedies=("kaiming", "normalize"),
        source="He et al. 2015, https://arxiv.org/abs/1502.01852, sec. 2.2",
    ),
    Cause(
        id="names-of-another-model",
        name="pretrained weights that were not loaded",
        leads={"failed-load": 25},
        explains={"loss-plateau": 2, "overfitting": 2},
        requires=frozenset({Condition.NOT_LOADED}),
        because=(
            "The names in the state have a prefix that the model's names lack, such as `module.` from DataParallel, or "
            "the state is nested one level deeper in the file. With strict=False, other names are skipped silently."
        ),
        confirm="Print the return value of load_state_dict: its missing_keys lists every parameter of the model.",
        remedies=("match_names",),
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict",
    ),
    Cause(
        id="state-not-copied",
        name="a state that was kept without a copy",
        leads={"failed-load": 25},
        excludes=frozenset({Condition.NOT_LOADED}),
        because=(
            "state_dict() returns the tensors of the model, which each update changes. So the state of an earlier step "
            "is always the newest one."
        ),
        confirm="Compare one weight of the kept state before and after an update: it changes with the model.",
        remedies=("copy_state",),
        source="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
    ),
    Cause(
        id="large-embeddings",
        name="embeddings initialized too large",
        leads={"poor-initialization": 12},
        explains={"learning-rate-too-high": 1.5, "loss-plateau": 2, "overfitting": 1.5},
        requires=frozenset({Condition.EMBEDDING}),
        because=(
            "nn.Embedding initializes from N(0, 1): the dot product of two d-dimensional rows has a standard deviation "
            "of sqrt(d)."
        ),
        confirm=(
            "Before the first step, compare the standard deviation of the predictions with the standard deviation of "
            "the targets."
        ),
        remedies=("small_embeddings",),
        source="pytorch/pytorch#3121, https://github.com/pytorch/pytorch/issues/3121",
    ),
    Cause(
        id="unnormalized-stack",
        name="deep network without normalization",
        leads={"exploding-gradient": 1.5, "vanishing-gradient": 1, "non-finite": 0.3},
        explains={"non-finite": 3, "gradient-spike": 2, "loss-plateau": 2, "oscillating-gradient": 1.5},
        requires=frozenset({Condition.UNNORMALIZED}),
        conditions={
            Condition.DEEP: 2,
            Condition.RECURRENT: 2,
            Condition.STEEP: 4,
            Condition.UNCLIPPED: 1.3,
            Condition.RATE_JUMPED: 0.3,
            Condition.BACKWARD_GAIN: 0.5,
        },
        because="Nothing brings the signal back to unit scale between the layers, so small errors of scale multiply.",
        confirm="Add a normalization layer after each layer: the gradient norms of the layers must become similar.",
        remedies=("normalize", "clip", "lower_rate"),
        source="Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, sec. 2",
    ),
    Cause(
        id="zero-weights",
        name="weights initialized to zero",
        leads={"dead-relu": 15, "no-gradient": 10, "loss-plateau": 6, "poor-initialization": 15},
        explains={"dead-layer": 2, "rising-sparsity": 1.5},
        requires=frozenset({Condition.ZERO_WEIGHTS}),
        because="Units that start equal stay equal, and no gradient passes through a matrix of zeros.",
        confirm="Print the weight norms before the first step: only single branches may be zero.",
        remedies=("kaiming",),
        source="Goodfellow et al. 2016, Deep learning, sec. 8.4, https://www.deeplearningbook.org",
    ),
    Cause(
        id="steep-gradients",
        name="gradients too large for a usual learning rate",
        leads={"learning-rate-too-high": 3, "exploding-gradient": 0.5, "non-finite": 0.3},
        explains={"gradient-spike": 1.5, "saturated-activation": 1.5, "dead-relu": 1.5, "loss-plateau": 1.5},
        requires=frozenset({Condition.MODERATE_SGD}),
        conditions={
            Condition.AT_START: 2,
            Condition.STEEP: 4,
            Condition.RATE_JUMPED: 0.1,
            Condition.RATE_RISING: 0.1,
            Condition.SPIKED: 0.1,
            Condition.BACKWARD_GAIN: 0.3,
        },
        because=(
            "At this rate only extremely large gradients move the weights so far. Usual reasons: badly scaled inputs or"
            " targets, a sum instead of a mean, a deep network without normalization."
        ),
        confirm=(
            "Print the first loss and the standard deviation of each layer's output: the first value far from 1 marks "
            "the place."
        ),
        remedies=("standardize", "normalize"),
        source="LeCun et al. 1998, Efficient BackProp, sec. 4.3, https://doi.org/10.1007/3-540-49430-8_2",
    ),
    Cause(
        id="undivided-sum",
        name="sum over neighbors or positions without averaging",
        leads={"exploding-gradient": 6},
        explains={"poor-initialization": 3, "learning-rate-too-high": 1.5, "loss-plateau": 1.5, "non-finite": 2},
        requires=frozenset({Condition.BACKWARD_GAIN}),
        conditions={DataCondition.LARGE_INPUTS: 0.1, Condition.AMPLIFIED: 4},
        because=(
            "Backpropagation amplifies the gradient because each layer sums many values without dividing by their "
            "number."
        ),
        confirm="Print the norm of the activations layer by layer: it grows with the number of values that are summed.",
        remedies=("divide_sums",),
        source="Kipf & Welling 2017, https://arxiv.org/abs/1609.02907, sec. 2",
    ),
    Cause(
        id="unbounded-loss",
        name="loss is unbounded below",
        leads={"exploding-gradient": 10},
        explains={"learning-rate-too-high": 3, "gradient-spike": 2, "non-finite": 2},
        requires=frozenset({Condition.UNBOUNDED_LOSS}),
        because=(
            "The loss can fall forever, so the weights only grow: a sign is wrong, or nothing bounds a critic, energy "
            "or similarity."
        ),
        confirm="Multiply the output by 10: if the loss falls tenfold below zero, it is unbounded below.",
        remedies=("bound_loss",),
        source="Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028, sec. 2 to 4",
    ),
    Cause(
        id="small-divisor",
        name="division by a value near 0",
        leads={"exploding-gradient": 10},
        explains={"gradient-spike": 3, "oscillating-gradient": 3, "learning-rate-too-high": 1.5, "loss-plateau": 1.5},
        requires=frozenset({Condition.JUMPING}),
        because=(
            "A value of order 1 divided by 0 plus an epsilon of 1e-6 becomes a million. Usual divisors of 0: the "
            "standard deviation of equal values, a count."
        ),
        confirm="Print the smallest and the largest divisor of each batch: they differ by orders of magnitude.",
        remedies=("bound_divisor",),
        source="Liu et al. 2025, https://arxiv.org/abs/2503.20783, sec. 3, on advantages over a deviation",
    ),
    Cause(
        id="moving-target",
        name="target that depends on the model",
        leads={"exploding-gradient": 0.8, "oscillating-gradient": 0.3},
        explains={"non-finite": 2, "gradient-spike": 1.5, "loss-plateau": 2},
        conditions={Condition.LATE: 2.5, Condition.RATE_JUMPED: 0.2, Condition.AT_START: 0.3},
        because="If the model makes its own targets (bootstrapped values, pseudo-labels), errors feed on themselves.",
        confirm="Freeze the network that makes the targets for 100 steps: the climb must stop.",
        remedies=("freeze_target",),
        source="van Hasselt et al. 2018, https://arxiv.org/abs/1812.02648",
    ),
    Cause(
        id="unscaled-half-precision",
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
        excludes=frozenset({Condition.LOSS_SCALED}),
        conditions={Condition.FP16: 4},
        because="float16 has no numbers between 0 and 2^-24, and many gradients are smaller than that.",
        confirm="Run the same step in float32 or bfloat16: the zeros must disappear.",
        remedies=("scaler", "bf16"),
        source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.2",
    ),
    Cause(
        id="low-loss-scale",
        name="loss scale too low",
        leads={"fp16-underflow": 10},
        explains={"loss-scale-collapse": 4, "dead-layer": 2, "no-gradient": 1.5, "rising-sparsity": 2},
        requires=frozenset({Condition.LOSS_SCALED}),
        because="The GradScaler halves its scale at every overflow; after many overflows gradients underflow.",
        confirm="Plot the loss scale and the skipped steps over the run.",
        remedies=("init_scale", "bf16"),
        source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.2",
    ),
    Cause(
        id="unscalable-nan",
        name="NaN at any loss scale",
        leads={"loss-scale-collapse": 10},
        explains={"non-finite": 4, "not-optimized": 2, "loss-plateau": 2, "fp16-underflow": 1.5},
        because=(
            "An overflow disappears at a lower loss scale. If updates are skipped again and again, the gradients are "
            "NaN at any scale."
        ),
        confirm="Run the step again: the rerun names the first bad operation, its line and the samples.",
        is_confirmed_by_rerun=True,
        remedies=("stable_formula", "find_operation"),
        source="PyTorch, torch.amp.GradScaler, https://pytorch.org/docs/stable/amp.html",
    ),
    Cause(
        id="detached-layer",
        name="layer detached from the graph",
        leads={"no-gradient": 8},
        explains={"dead-layer": 2, "not-optimized": 2, "loss-plateau": 1.5},
        excludes=frozenset({Condition.WHOLE_RUN}),
        conditions={Condition.ZERO_GRADIENT: 0.4},
        because="The loss does not depend on the layer: its output is detached or not used.",
        confirm="torch.autograd.grad(loss, parameter, allow_unused=True) returns None for its parameters.",
        remedies=("reattach",),
        source="PyTorch, autograd mechanics, https://pytorch.org/docs/stable/notes/autograd.html",
    ),
    Cause(
        id="constant-output",
        name="constant output",
        leads={"no-gradient": 8},
        explains={"saturated-activation": 4, "loss-plateau": 3, "dead-layer": 2},
        requires=frozenset({Condition.UNMOVED}),
        excludes=frozenset({Condition.NONE_GRADIENT}),
        conditions={Condition.CONSTANT_OUTPUT: 4},
        because="The output is the same whatever the weights are, as after a softmax over a single unit.",
        confirm="Perturb the weights and compare the outputs: they do not change.",
        remedies=("single_unit",),
        source="StackOverflow 42800203, https://stackoverflow.com/questions/42800203",
    ),
    Cause(
        id="no-backward",
        name="no backward pass through the model",
        leads={"no-gradient": 10},
        explains={"loss-plateau": 4, "not-optimized": 3},
        requires=frozenset({Condition.WHOLE_RUN, Condition.NONE_GRADIENT}),
        because="backward() is not called, or the loss was cut off from the outputs of the model.",
        confirm="Print loss.requires_grad, and a parameter's grad after loss.backward(): False, or None.",
        remedies=("call_backward",),
        source="PyTorch, autograd mechanics, https://pytorch.org/docs/stable/notes/autograd.html",
    ),
    Cause(
        id="cleared-before-update",
        name="gradients cleared before the update",
        leads={"no-gradient": 60},
        explains={"loss-plateau": 4, "not-optimized": 3},
        requires=frozenset({Condition.CLEARED_EARLY}),
        because="zero_grad() stands between backward() and step(), so the optimizer finds no gradient to use.",
        confirm="Print a parameter's grad right before optimizer.step(): it is None, although backward() was called.",
        remedies=("clear_later",),
        source="PyTorch, https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html",
    ),
    Cause(
        id="derivatives-alone",
        name="loss of derivatives alone",
        leads={"no-gradient": 20},
        requires=frozenset({Condition.OFFSET_OF_DERIVATIVES, Condition.NONE_GRADIENT}),
        because="The derivatives of the outputs by the inputs do not depend on a bias that is added last.",
        confirm="Add a constant to the outputs: the loss does not change.",
        remedies=("fix_offset",),
        source="Raissi et al. 2019, https://doi.org/10.1016/j.jcp.2018.10.045, sec. 3, the loss of the boundary data",
    ),
    Cause(
        id="one-step-sequences",
        name="sequences of one step",
        leads={"no-gradient": 20},
        requires=frozenset({Condition.STATE_WEIGHTS, Condition.ZERO_GRADIENT}),
        because="The layer starts each sequence from a state of zeros, and a sequence of one step never uses another.",
        confirm="Print the shape of the layer's input: its axis of steps has length 1.",
        remedies=("several_steps",),
        source="PyTorch, LSTM, https://pytorch.org/docs/stable/generated/torch.nn.LSTM.html, h_0 and the sum over W_hh",
    ),
    Cause(
        id="zeroed-branch",
        name="branch multiplied by zero",
        leads={"no-gradient": 3, "dead-layer": 4, "saturated-activation": 0.3},
        explains={"vanishing-gradient": 1.5, "saturated-activation": 3, "layer-imbalance": 1.5},
        excludes=frozenset(
            {
                Condition.WHOLE_RUN,
                Condition.LAST_ACTIVATION,
                Condition.NONE_GRADIENT,
                Condition.CONSTANT_OUTPUT,
                Condition.STATE_WEIGHTS,  # a gate stops the gradients of the inputs' weights, too
            }
        ),
        conditions={Condition.ZERO_GRADIENT: 4, Condition.SHUT: 20},
        because="A closed gate, or a frozen normalization scale of zero, multiplies the gradient by zero.",
        confirm="Print what multiplies the layer's output: the bias of its gate, the scale of its normalization.",
        remedies=("open_gate",),
        source="Srivastava et al. 2015, https://arxiv.org/abs/1505.00387, sec. 2.2",
    ),
    Cause(
        id="dead-relus",
        name="dead ReLUs",
        leads={"dead-relu": 4},
        explains={
            "no-gradient": 4,
            "dead-layer": 4,
            "rising-sparsity": 4,
            "loss-plateau": 3,
            "learning-rate-too-low": 1.5,
        },
        conditions={Condition.RATE_JUMPED: 0.3, Condition.UNNORMALIZED: 1.3},
        because="The inputs of the ReLU are negative for every sample. Its gradient is zero there, so it stays dead.",
        confirm=(
            "Print the inputs of the ReLU for one batch: nearly all are negative. Check the bias of the layer before "
            "it."
        ),
        remedies=("leaky_relu", "kaiming"),
        source="Lu et al. 2020, https://arxiv.org/abs/1903.06733",
    ),
    Cause(
        id="vanishing-units",
        name="units pushed to zero by a penalty or by large steps",
        leads={"rising-sparsity": 6},
        explains={"dead-relu": 3, "dead-layer": 2, "loss-plateau": 1.5},
        because=(
            "A unit that is zero for every batch has no gradient and cannot recover; more and more units get stuck "
            "at zero."
        ),
        confirm="Halve the L1 penalty, weight decay or learning rate: the fraction of zeros must rise more slowly.",
        remedies=("leaky_relu", "lower_rate"),
        source="Bricken et al. 2023, https://transformer-circuits.pub/2023/monosemantic-features",
    ),
    Cause(
        id="singular-formula",
        name="numerically unstable operation",
        leads={"non-finite": 2},
        explains={
            "gradient-spike": 1.5,
            "exploding-gradient": 1.2,
            "loss-scale-collapse": 2,
        },
        announced_by=frozenset({"unstable-formula"}),
        excludes=frozenset({Condition.EMPTY_MEAN}),
        conditions={
            Condition.CALM: 3,
            Condition.SINGULAR_FORMULA: 4,
            Condition.STEEP: 0.3,
            DataCondition.BAD_BATCH: 0.2,
            Condition.AT_FIRST_STEP: 0.5,
            Condition.RATE_JUMPED: 0.5,
        },
        because=(
            "log(0), 0 / 0, a square root or norm at 0, or an exponential that overflows gives Inf, and Inf times 0 is "
            "NaN."
        ),
        confirm="Run the step again: the rerun names the first bad operation, its line and the samples.",
        is_confirmed_by_rerun=True,
        remedies=("stable_formula", "find_operation"),
        source="PyTorch, numerical accuracy, https://pytorch.org/docs/stable/notes/numerical_accuracy.html",
    ),
    Cause(
        id="latent-formula",
        name="formula with a stable form",
        leads={"unstable-formula": 20},
        because="The formula is finite for the current values, but overflows or rounds to log(0) for larger values.",
        confirm="Evaluate it in float32 and float64: gradwatch.precision shows how many digits it loses now.",
        remedies=("stable_formula",),
        source="Higham 2002, Accuracy and Stability of Numerical Algorithms, https://doi.org/10.1137/1.9780898718027",
    ),
    Cause(
        id="empty-mean",
        name="batch in which every label is ignored",
        leads={"non-finite": 20},
        requires=frozenset({Condition.EMPTY_MEAN}),
        because="A mean over nothing is 0 / 0, which is NaN. Its gradient is 0, so the weights do not change.",
        confirm="Count the labels of that batch that are not ignore_index, or the elements that its mask keeps.",
        remedies=("leave_out_empty", "keep_labels"),
        source="PyTorch, CrossEntropyLoss, https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
    ),
    Cause(
        id="zero-loss",
        name="loss that is 0 whatever the model does",
        leads={"loss-plateau": 20},
        requires=frozenset({Condition.ZERO_LOSS}),
        because="A loss of 0 has no gradient: every margin is met, there is only one class, or every label is ignored.",
        confirm="Print the terms of the loss for one batch: its labels, its mask, and the distance to the margin.",
        remedies=("count_terms", "single_unit"),
        source="PyTorch, MarginRankingLoss, https://pytorch.org/docs/stable/generated/torch.nn.MarginRankingLoss.html",
    ),
    Cause(
        id="bad-data",
        name="NaN or Inf in the data",
        leads={"non-finite": 1},
        excludes=frozenset({Condition.EMPTY_MEAN}),
        conditions={
            DataCondition.BAD_BATCH: 20,
            DataCondition.GOOD_BATCH: 0.3,
            Condition.FINITE_LOSS: 0.1,
            Condition.AT_FIRST_STEP: 8,
            Condition.CALM: 1.5,
            Condition.STEEP: 0.3,
        },
        because="One NaN or Inf in a batch makes the loss and every gradient NaN or Inf.",
        confirm="Run the step again: the rerun names the samples with NaN or Inf, if there are any.",
        is_confirmed_by_rerun=True,
        remedies=("clean_data",),
        source="PyTorch, torch.isfinite, https://pytorch.org/docs/stable/generated/torch.isfinite.html",
    ),
    Cause(
        id="half-precision-overflow",
        name="overflow in half precision (above 65504)",
        leads={"non-finite": 3},
        explains={"loss-scale-collapse": 3, "exploding-gradient": 1.5},
        requires=frozenset({Condition.FP16}),
        because=(
            "The largest float16 number is 65504: large activations, sums over many values and exponentials overflow."
        ),
        confirm="Run the step again: the rerun shows whether the same step is finite in float32.",
        is_confirmed_by_rerun=True,
        remedies=("bf16", "find_operation"),
        source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.3",
    ),
    Cause(
        id="odd-batch",
        name="outlier batch",
        leads={"gradient-spike": 6},
        explains={
            "non-finite": 2,
            "exploding-gradient": 1.5,
            "dead-relu": 1.5,
            "learning-rate-too-high": 2,
            "rising-sparsity": 1.5,
        },
        conditions={Condition.UNCLIPPED: 1.2, Condition.RATE_JUMPED: 0.1, Condition.RATE_RISING: 0.1},
        because=(
            "If one batch has a far larger gradient than all others, its data are the reason: their scale, their "
            "labels or an outlier."
        ),
        confirm=(
            "Inspect the batch of that step: its hash is in the history. Print the range of its inputs and its labels."
        ),
        remedies=("clean_data", "clip"),
        source="Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, sec. 5.1",
    ),
    Cause(
        id="unshuffled-data",
        name="data not shuffled",
        leads={"oscillating-gradient": 3},
        explains={"gradient-spike": 3, "loss-plateau": 2, "exploding-gradient": 1.5},
        conditions={Condition.WAVES: 4},
        because="Consecutive batches are alike: each group of batches undoes what the previous group taught.",
        confirm="Print the labels of consecutive batches; shuffle and run again.",
        remedies=("shuffle",),
        source="LeCun et al. 1998, Efficient BackProp, sec. 4.2, https://doi.org/10.1007/3-540-49430-8_2",
    ),
    Cause(
        id="unscaled-inputs",
        name="inputs not normalized",
        leads={
            "layer-imbalance": 5,
            "saturated-activation": 4,
            "exploding-gradient": 0.7,
            "poor-initialization": 0.7,
        },
        explains={
            "vanishing-gradient": 1.5,
            "dead-relu": 2,
            "gradient-spike": 1.5,
            "poor-initialization": 1.2,
            "loss-plateau": 2,
            "dead-layer": 1.5,
        },
        conditions={
            DataCondition.LARGE_INPUTS: 10,
            DataCondition.USUAL_INPUTS: 0.3,
            Condition.RATE_JUMPED: 0.1,
            Condition.RATE_RISING: 0.1,
            Condition.AT_START: 2,
            Condition.SOFTMAX: 0.25,
            Condition.LAST_ACTIVATION: 0.3,
            Condition.SHUT: 0.2,
        },
        because="The gradient of a layer is proportional to its input, and its output grows with the input.",
        confirm="Print the mean and the standard deviation of every input feature: layers expect about 0 and 1.",
        remedies=("standardize",),
        source="LeCun et al. 1998, Efficient BackProp, sec. 4.3, https://doi.org/10.1007/3-540-49430-8_2",
    ),
    Cause(
        id="targets-out-of-range",
        name="targets outside the range of the output activation",
        leads={"saturated-activation": 6, "loss-plateau": 20},
        explains={"dead-relu": 8, "dead-layer": 1.5, "no-gradient": 1.5, "rising-sparsity": 1.5},
        requires=frozenset({DataCondition.TARGETS_OUT_OF_RANGE}),
        because=(
            "tanh ranges from -1 to 1, a sigmoid from 0 to 1, and a ReLU starts at 0: targets outside that range keep "
            "the activation saturated."
        ),
        confirm="Print the smallest and the largest target, and the range of the last activation.",
        remedies=("fit_range",),
        source="LeCun et al. 1998, Efficient BackProp, sec. 4.5, https://doi.org/10.1007/3-540-49430-8_2",
    ),
    Cause(
        id="entropy-added",
        name="entropy bonus with the wrong sign",
        leads={"saturated-activation": 20},
        explains={"vanishing-gradient": 4, "dead-layer": 3, "layer-imbalance": 2, "loss-plateau": 2},
        requires=frozenset({Condition.ENTROPY_ADDED}),
        because="The loss adds the entropy, so training makes the policy certain before it has explored.",
        confirm="Print the entropy of the policy: it falls towards 0 from the first updates on.",
        remedies=("subtract_entropy",),
        source="Mnih et al. 2016, https://arxiv.org/abs/1602.01783, sec. 4",
    ),
    Cause(
        id="policy-steps",
        name="policy updates that are too many or too large for the same samples",
        leads={"policy-divergence": 6},
        explains={"saturated-activation": 2, "loss-plateau": 1.5, "gradient-spike": 1.5, "dead-layer": 1.2},
        conditions={Condition.RATIO_AT_ONCE: 0.5},
        because=(
            "Each pass over the same samples moves the policy further, and clipping only stops the gradient of a "
            "sample that has already moved too far."
        ),
        confirm="Print the divergence after each pass over the samples: it grows from pass to pass.",
        remedies=("lower_rate", "fewer_passes"),
        source="Schulman et al. 2017, https://arxiv.org/abs/1707.06347, sec. 3; Andrychowicz et al. 2021, "
        "https://arxiv.org/abs/2006.05990, sec. 3.5",
    ),
    Cause(
        id="other-ratios",
        name="old log-probabilities of other samples or of another distribution",
        leads={"policy-divergence": 4},
        explains={"loss-plateau": 2, "gradient-spike": 1.5},
        requires=frozenset({Condition.RATIO_AT_ONCE}),
        conditions={Condition.RATIO_AT_ONCE: 2},
        because=(
            "In the first pass over new samples, the policy is the one that drew them, so each ratio is 1. It is not "
            "if only the old or the new log-probabilities are shuffled, if the mode of the model differs, or if the "
            "sums over dimensions differ."
        ),
        confirm="Print the ratios of the first pass over new samples: they must be 1.",
        remedies=("same_log_probs",),
        source="huggingface/trl#454, https://github.com/huggingface/trl/issues/454",
    ),
    Cause(
        id="large-scores",
        name="attention scores too large",
        leads={"saturated-activation": 3},
        explains={"dead-layer": 2, "layer-imbalance": 2, "vanishing-gradient": 2, "loss-plateau": 1.5},
        requires=frozenset({Condition.SOFTMAX}),
        conditions={Condition.AT_START: 2, DataCondition.LARGE_INPUTS: 0.1},
        because=(
            "The softmax picks one entry and saturates. A dot product over d dimensions has a standard deviation of "
            "sqrt(d) unless it is divided by sqrt(d), and a larger one if queries and keys are larger than 1."
        ),
        confirm="Print the standard deviation of the scores before the softmax: it must be near 1.",
        remedies=("divide_scores",),
        source="Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, sec. 3.2.1",
    ),
    Cause(
        id="attention-logits",
        name="attention logits that grow without bound",
        leads={"attention-collapse": 12},
        explains={"loss-plateau": 2, "gradient-spike": 1.5, "exploding-gradient": 1.2, "layer-imbalance": 1.2},
        because=(
            "Logits are products of queries and keys, so they grow with the square of the weights. A rate that is too "
            "high for these weights drives the softmax to single keys, and no gradient leads back from there."
        ),
        confirm="Run the same steps at a tenth of the rate, or with normalized queries and keys: logits stay small.",
        remedies=("lower_rate", "normalize_queries"),
        source="Wortsman et al. 2023, https://arxiv.org/abs/2309.14322, sec. 3.1",
    ),
    Cause(
        id="unbalanced-router",
        name="router without load balancing",
        leads={"dead-layer": 12},
        explains={"no-gradient": 3, "rising-sparsity": 2, "saturated-activation": 2, "loss-plateau": 1.5},
        requires=frozenset({Condition.UNUSED_EXPERTS}),
        because=(
            "An expert that is chosen learns and is chosen more often, so a router converges to the same few experts "
            "unless a loss or a bias balances the load. A high rate and large logits speed this up."
        ),
        confirm="Print the share of tokens of each expert, with and without a loss that balances them.",
        remedies=("balance_experts", "calm_router"),
        source="Shazeer et al. 2017, https://arxiv.org/abs/1701.06538, sec. 4; Fedus et al. 2021, "
        "https://arxiv.org/abs/2101.03961, sec. 2.2; Zoph et al. 2022, https://arxiv.org/abs/2202.08906, sec. 3.3",
    ),
    Cause(
        id="unused-latent",
        name="latent that the decoder ignores",
        leads={"dead-layer": 20},
        explains={"rising-sparsity": 5, "dead-relu": 2, "vanishing-gradient": 2, "loss-plateau": 2},
        requires=frozenset({Condition.UNUSED_LATENT}),
        because=(
            "The divergence pulls the latent to the prior before the decoder has learned to use it. This is likely if "
            "the error is averaged over dimensions and the divergence is summed, or if the decoder sees its own "
            "outputs."
        ),
        confirm="Print the divergence from the prior: it is close to 0 nats.",
        remedies=("free_bits",),
        source="Bowman et al. 2016, https://arxiv.org/abs/1511.06349, sec. 3.1; Lucas et al. 2019, "
        "https://arxiv.org/abs/1911.02469",
    ),
    Cause(
        id="unregistered-layers",
        name="layers not registered in the model",
        leads={"not-optimized": 20},
        explains={"loss-plateau": 2},
        requires=frozenset({Condition.UNREGISTERED}),
        because=(
            "Modules in a plain list are not submodules: parameters(), to() and state_dict() leave them out. A "
            "parameter that forward() creates is missing as well, and is initialized again at each step."
        ),
        confirm="Print the names of model.named_parameters(): these layers are missing.",
        remedies=("register",),
        source="PyTorch, nn.ModuleList, https://pytorch.org/docs/stable/generated/torch.nn.ModuleList.html",
    ),
    Cause(
        id="unbalanced-tasks",
        name="losses of the tasks at different scales",
        leads={"layer-imbalance": 8},
        explains={"rising-sparsity": 1.5, "loss-plateau": 1.5},
        requires=frozenset({Condition.SEVERAL_HEADS}),
        because="The gradients of all tasks add up in the shared layers, and the largest one dominates.",
        confirm="Print each task's loss and the gradient norm that it alone gives the shared layers.",
        remedies=("balance_tasks",),
        source="Kendall et al. 2018, https://arxiv.org/abs/1705.07115; Chen et al. 2018, https://arxiv.org/abs/1711.02257",
    ),
    Cause(
        id="missing-parameters",
        name="parameters missing from the optimizer",
        leads={"not-optimized": 12},
        explains={"layer-imbalance": 2, "loss-plateau": 2},
        excludes=frozenset({Condition.IN_OPTIMIZER}),
        conditions={Condition.UNREGISTERED: 0.1},
        because="The optimizer was built before the layer, or no parameter group matches it.",
        confirm="Compare the parameters of optimizer.param_groups with model.parameters().",
        remedies=("hold_parameters",),
        source="PyTorch, torch.optim, https://pytorch.org/docs/stable/optim.html",
    ),
    Cause(
        id="rounded-updates",
        name="updates lost to rounding",
        leads={"not-optimized": 8},
        explains={"loss-plateau": 2, "learning-rate-too-low": 2},
        requires=frozenset({Condition.IN_OPTIMIZER}),
        excludes=frozenset({Condition.UPDATES_MISSING, Condition.FROZEN}),
        because="An update below half of the weight's last bit is rounded away: bfloat16 has 8 significant bits.",
        confirm="Check the dtype of the parameters and update.ratio: below 2^-9 a bfloat16 weight does not change.",
        remedies=("master_weights", "raise_rate"),
        source="Zamirai et al. 2020, Revisiting BFloat16 training, https://arxiv.org/abs/2010.06192",
    ),
    Cause(
        id="no-step",
        name="loop that never calls optimizer.step()",
        leads={"not-optimized": 20},
        explains={"loss-plateau": 2},
        requires=frozenset({Condition.NEVER_STEPPED}),
        because="Gradients are computed, but nothing uses them.",
        confirm="Print a weight at two steps: it stays the same, bit for bit.",
        remedies=("call_step",),
        source="PyTorch, torch.optim, https://pytorch.org/docs/stable/optim.html",
    ),
    Cause(
        id="another-model",
        name="loop that goes on with another model or optimizer",
        leads={"not-optimized": 20},
        explains={},
        requires=frozenset({Condition.UPDATES_ENDED}),
        because="The loop trains a new model, or the old one with a new optimizer, and `watch` got neither.",
        confirm="Compare id(model) and id(optimizer) with those that were passed to `watch`.",
        remedies=("watch_again",),
        source="PyTorch, torch.optim, https://pytorch.org/docs/stable/optim.html, on constructing an optimizer",
    ),
    Cause(
        id="copy-not-updated",
        name="copy of the model that is written and not updated",
        leads={"not-optimized": 20},
        explains={"loss-plateau": 2},
        requires=frozenset({Condition.COPY_UNCHANGED}),
        because=(
            "The copy is copied from itself, is averaged with a decay of 1, or keeps too few digits for the updates of "
            "its average."
        ),
        confirm="Print the largest difference of two states of the copy, before and after its update: it is 0.",
        remedies=("update_copy",),
        source="Mnih et al. 2015, https://www.nature.com/articles/nature14236, methods; Polyak averages in Lillicrap "
        "et al. 2016, https://arxiv.org/abs/1509.02971, sec. 3",
    ),
    Cause(
        id="optimizer-in-the-loop",
        name="optimizer rebuilt for each update",
        leads={"not-optimized": 20},
        explains={"oscillating-gradient": 3, "learning-rate-too-high": 3, "loss-plateau": 1.5},
        requires=frozenset({Condition.OPTIMIZER_REBUILT}),
        because=(
            "A new Adam divides each gradient by its own size, so each weight moves by the full learning rate each "
            "time, and the noise of the batches is not averaged."
        ),
        confirm="Print len(optimizer.state) just before optimizer.step(): it is 0 at every step.",
        remedies=("build_once",),
        source="Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, sec. 2.1 and 3",
    ),
    Cause(
        id="updates-missing",
        name="optimizer step without an update",
        leads={"not-optimized": 12},
        explains={"loss-plateau": 2},
        requires=frozenset({Condition.UPDATES_MISSING}),
        excludes=frozenset({Condition.NEVER_STEPPED}),
        because="optimizer.step() changes no weight: the optimizer holds other tensors, or finds no gradient.",
        confirm="Compare a weight before and after optimizer.step(): it stays the same, bit for bit.",
        remedies=("make_updates",),
        source="PyTorch, torch.optim, https://pytorch.org/docs/stable/optim.html",
    ),
    Cause(
        id="learning-rate-too-low",
        name="learning rate too low",
        leads={"learning-rate-too-low": 12},
        explains={"loss-plateau": 4, "not-optimized": 3},
        excludes=frozenset({Condition.RATE_DECAYED, Condition.RATE_SQUARED}),
        because="At this learning rate the model needs far too many steps.",
        confirm="Run 100 steps at 10 and at 100 times the rate: the loss must fall.",
        remedies=("raise_rate",),
        source="Karpathy, CS231n, https://cs231n.github.io/neural-networks-3/#ratio",
    ),
    Cause(
        id="fast-decay",
        name="schedule decays too fast",
        leads={"learning-rate-too-low": 12},
        explains={"loss-plateau": 4, "not-optimized": 3},
        requires=frozenset({Condition.RATE_DECAYED}),
        excludes=frozenset({Condition.RATE_SQUARED}),
        because=(
            "The learning rate fell to nearly zero long before the end: a schedule meant for epochs is stepped for "
            "every batch."
        ),
        confirm="Plot the learning rate over the run.",
        remedies=("per_epoch", "raise_rate"),
        source="ivadomed/ivadomed#55, https://github.com/ivadomed/ivadomed/issues/55",
    ),
    Cause(
        id="rate-as-factor",
        name="schedule that returns a rate instead of a factor",
        leads={"learning-rate-too-low": 40},
        explains={"loss-plateau": 4, "not-optimized": 3},
        requires=frozenset({Condition.RATE_SQUARED}),
        because=(
            "`LambdaLR` multiplies the learning rate of the optimizer by the return value of its function. If that is "
            "a rate, the result is its square."
        ),
        confirm="Print optimizer.param_groups[0]['lr'] after the warm-up, next to the rate given to the optimizer.",
        remedies=("return_factor",),
        source="https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LambdaLR.html",
    ),
    Cause(
        id="missing-zero-grad",
        name="gradients never cleared",
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
        because=(
            "Each backward pass adds to the stored gradient; without zero_grad() every update repeats all earlier "
            "gradients."
        ),
        confirm="Print a parameter's grad before the first backward pass of a step: it must be None or zero.",
        remedies=("zero_grad",),
        source="PyTorch, https://pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html",
    ),
    Cause(
        id="update-twice",
        name="two updates with one gradient",
        leads={"missing-zero-grad": 150},
        explains={"learning-rate-too-high": 2, "oscillating-gradient": 1.5, "loss-plateau": 1.5},
        requires=frozenset({Condition.GRADIENTS_REUSED}),
        because="step() is called again before the next backward(), so the same gradient moves the weights twice.",
        confirm="Count the calls of optimizer.step() and of backward(): there are twice as many updates.",
        remedies=("step_once",),
        source="PyTorch, torch.optim, https://pytorch.org/docs/stable/optim.html, on taking an optimization step",
    ),
    Cause(
        id="opposed-optimizers",
        name="two optimizers that undo each other",
        leads={"oscillating-gradient": 40},
        explains={"vanishing-gradient": 3, "exploding-gradient": 3, "learning-rate-too-high": 2, "loss-plateau": 2},
        requires=frozenset({Condition.OPTIMIZERS_OPPOSED}),
        because=(
            "One optimizer minimizes a loss that the other one's loss works against, and both hold the same weights: a "
            "generator's optimizer also teaches the discriminator to take forgeries for real."
        ),
        confirm="List the parameters that are in the param_groups of both optimizers.",
        remedies=("own_parameters",),
        source="soumith/ganhacks#29, https://github.com/soumith/ganhacks/issues/29",
    ),
    Cause(
        id="empty-inputs",
        name="inputs without content",
        leads={"constant-batch": 20},
        explains={"no-gradient": 5, "dead-layer": 5, "loss-plateau": 5},
        requires=frozenset({DataCondition.EQUAL_SAMPLES}),
        because=(
            "A step between the files and the model removes the content: an integer division, a second "
            "normalization, a tokenizer that knows none of the words."
        ),
        confirm="Print the minimum, the maximum and the mean of a batch before and after each transform.",
        remedies=("inspect_inputs",),
        source="Karpathy 2019, https://karpathy.github.io/2019/04/25/recipe/ (visualize just before the net)",
    ),
    Cause(
        id="samples-of-one-array",
        name="samples that share one array",
        leads={"constant-batch": 20},
        explains={"loss-plateau": 3, "vanishing-gradient": 1.5},
        requires=frozenset({DataCondition.COPIED_SAMPLES}),
        because=(
            "What is kept of each sample is the same array or tensor, which changes later: an environment that writes "
            "all of its observations to one array, or a buffer that is filled again."
        ),
        confirm="Print two samples of a batch, and np.shares_memory of two that are kept.",
        remedies=("copy_samples",),
        source="google-deepmind/dm_control#34, https://github.com/google-deepmind/dm_control/issues/34",
    ),
    Cause(
        id="seed-in-the-loop",
        name="generators seeded at each step",
        leads={"constant-batch": 40},
        explains={"overfitting": 3},
        requires=frozenset({Condition.DRAWS_REPEATED}),
        because=(
            "Each step starts the generators from the same state, so dropout drops the same units, and the same noise, "
            "indices and times come again."
        ),
        confirm="Print torch.rand(1) at the start of several steps: it is the same number.",
        remedies=("seed_once",),
        source="PyTorch, https://pytorch.org/docs/stable/notes/randomness.html",
    ),
    Cause(
        id="workers-alike",
        name="workers that all make the same batches",
        leads={"constant-batch": 20},
        explains={"overfitting": 3},
        requires=frozenset({DataCondition.WORKER_COPIES}),
        because=(
            "Each worker has its own copy of the data set. If a stream is not split among them, or all of them seed "
            "their generator alike, each makes the same samples."
        ),
        confirm="Set num_workers=0: each batch must then come once.",
        remedies=("split_workers",),
        source="PyTorch, https://pytorch.org/docs/stable/data.html#iterable-style-datasets",
    ),
    Cause(
        id="labels-of-one-class",
        name="labels of a single class",
        leads={"constant-batch": 20},
        explains={"loss-plateau": 1.5, "vanishing-gradient": 2},
        requires=frozenset({DataCondition.LABELS_EQUAL}),
        because=(
            "The model only has to give the same answer for every input. Usual reasons: the wrong column is read, an "
            "integer division, data sorted by class."
        ),
        confirm="Count the labels of each class over one epoch.",
        remedies=("inspect_labels",),
        source="Karpathy 2019, https://karpathy.github.io/2019/04/25/recipe/ (become one with the data)",
    ),
    Cause(
        id="class-imbalance",
        name="imbalanced classes",
        leads={"majority-class": 20},
        explains={"loss-plateau": 2},
        because=(
            "Every label counts alike, so rare classes give a small part of the gradient. Unless a sample is more "
            "likely than not to be of a rare class, the best model predicts the majority class."
        ),
        confirm="Count the labels of each class, and measure precision and recall at lower thresholds.",
        remedies=("weigh_classes",),
        source="Lin et al. 2017, sec. 3, https://arxiv.org/abs/1708.02002; He and Garcia 2009, "
        "https://doi.org/10.1109/TKDE.2008.239",
    ),
    Cause(
        id="constant-batch",
        name="same batch at every step",
        leads={"constant-batch": 10},
        excludes=frozenset(
            {
                DataCondition.EQUAL_SAMPLES,
                DataCondition.COPIED_SAMPLES,
                DataCondition.LABELS_EQUAL,
                DataCondition.WORKER_COPIES,
            }
        ),
        conditions={DataCondition.MAYBE_ALL: 0.01},
        explains={"overfitting": 5, "loss-plateau": 1.5, "vanishing-gradient": 1.2},
        because=(
            "An iterator that is created at every step, or a generator that is seeded at every step, returns its first "
            "batch each time."
        ),
        confirm="Print the hash of consecutive batches, or their first labels.",
        remedies=("advance_iterator",),
        source="pytorch/pytorch#1917, https://github.com/pytorch/pytorch/issues/1917",
    ),
    Cause(
        id="memorization",
        name="model memorizes its training data",
        leads={"overfitting": 10},
        because="The model is large enough to memorize every sample, including details that do not generalize.",
        confirm="Train on twice or on half the data: the gap to the validation loss must change.",
        remedies=("weight_decay", "early_stop", "augment"),
        source="Zhang et al. 2017, https://arxiv.org/abs/1611.03530",
    ),
    Cause(
        id="broadcast-targets",
        name="targets broadcast against predictions",
        leads={"loss-plateau": 20},
        explains={"oscillating-gradient": 1.5},
        requires=frozenset({Condition.BROADCAST}),
        because="Every prediction is compared with every target, so the best fit is the mean of all targets.",
        confirm="Print the shapes of prediction and target: they must be equal.",
        remedies=("check_shapes",),
        source="PyTorch, broadcasting semantics, https://pytorch.org/docs/stable/notes/broadcasting.html",
    ),
    Cause(
        id="error-averaged-first",
        name="errors averaged before they are squared",
        leads={"loss-plateau": 20},
        requires=frozenset({Condition.OUTPUTS_AVERAGED}),
        because=(
            "The errors of the samples cancel in their mean, so the loss is small once the mean output is right, "
            "however wrong each output is."
        ),
        confirm="Shuffle the targets within a batch: the loss stays the same.",
        remedies=("average_last",),
        source="PyTorch, MSELoss, https://docs.pytorch.org/docs/stable/generated/torch.nn.MSELoss.html",
    ),
    Cause(
        id="target-shared",
        name="one target for all samples of a batch",
        leads={"loss-plateau": 20},
        requires=frozenset({DataCondition.TARGETS_SHARED}),
        because="Every output is compared with the same target, which its own input does not determine.",
        confirm="Print the targets just before the loss: they must differ within a batch.",
        remedies=("own_targets",),
        source="PyTorch, broadcasting semantics, https://pytorch.org/docs/stable/notes/broadcasting.html",
    ),
    Cause(
        id="sequence-along-batch",
        name="sequence layer that runs along the batch",
        leads={"loss-plateau": 20},
        explains={"overfitting": 1.5},
        requires=frozenset({DataCondition.SEQUENCE_AXIS}),
        because=(
            "Without `batch_first=True`, sequence layers expect the steps in the first dimension. This layer mixes "
            "the samples of a batch, and sees nothing of the order within a sequence."
        ),
        confirm="Change one sample of a batch: the outputs of the other samples must stay the same.",
        remedies=("batch_first",),
        source="PyTorch, torch.nn.LSTM, https://pytorch.org/docs/stable/generated/torch.nn.LSTM.html",
    ),
    Cause(
        id="labels-too-far-ahead",
        name="labels that are shifted twice",
        leads={"loss-plateau": 20},
        requires=frozenset({DataCondition.TARGETS_AHEAD}),
        because=(
            "The data set shifts the labels by one token, and the model or the loss shifts them again. So the model "
            "learns to predict the token after the next one, which is harder and of no use."
        ),
        confirm="Print a row of input tokens and of labels at the loss: each label must be the next input token.",
        remedies=("shift_once",),
        source="transformers, ForCausalLMLoss, which shifts the labels, https://github.com/huggingface/transformers",
    ),
    Cause(
        id="reads-padding",
        name="model that reads the padding of its sequences",
        leads={"vanishing-gradient": 20},
        explains={"dead-layer": 8, "loss-plateau": 8, "rising-sparsity": 2},
        requires=frozenset({DataCondition.PADDING_READ}),
        because=(
            "The model uses the output at the end of the padding, where a recurrent layer has forgotten the tokens. So "
            "almost no gradient reaches them."
        ),
        confirm="Print the index at which each sequence is read: it must be the index of its last token.",
        remedies=("last_token",),
        source="PyTorch, pack_padded_sequence, "
        "https://pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pack_padded_sequence.html",
    ),
    Cause(
        id="opposite-mask",
        name="inverted attention mask",
        leads={"loss-plateau": 20},
        explains={"attention-collapse": 3, "vanishing-gradient": 1.5, "dead-layer": 1.5},
        requires=frozenset({DataCondition.PADDING_ATTENDED}),
        because=(
            "Each position sees nothing but padding. In `key_padding_mask`, True hides a key; in the `attn_mask` of "
            "`scaled_dot_product_attention`, True shows it."
        ),
        confirm="Print the attention weights of one sequence: the weights of its padding must be 0.",
        remedies=("invert_mask",),
        source="PyTorch, torch.nn.MultiheadAttention, "
        "https://pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html",
    ),
    Cause(
        id="no-causal-mask",
        name="positions that see later tokens",
        leads={"target-leakage": 20},
        excludes=frozenset({DataCondition.TARGETS_COPIED}),
        because="The label of each position is an input of the model, so the model only has to copy it.",
        confirm="Change the last input token: the scores of all earlier positions must stay the same.",
        remedies=("causal_mask",),
        source="Vaswani et al. 2017, sec. 3.2.3, https://arxiv.org/abs/1706.03762",
    ),
    Cause(
        id="labels-as-inputs",
        name="inputs that are the labels",
        leads={"target-leakage": 20},
        requires=frozenset({DataCondition.TARGETS_COPIED}),
        because=(
            "A decoder must get the labels shifted by one position, and an encoder must not see the tokens that it "
            "has to predict. Here, the model only has to copy its input."
        ),
        confirm="Print a row of input tokens and of labels: they are the same.",
        remedies=("shift_inputs",),
        source="Vaswani et al. 2017, fig. 1 (outputs shifted right), https://arxiv.org/abs/1706.03762",
    ),
    Cause(
        id="strong-weight-decay",
        name="weight decay that outweighs the gradient",
        leads={"loss-plateau": 20},
        explains={
            "dead-relu": 2,
            "rising-sparsity": 2,
            "vanishing-gradient": 2,
            "dead-layer": 2,
            "gradient-spike": 1.5,
        },
        requires=frozenset({Condition.SHRUNK_WEIGHTS}),
        # the divergence from the prior shrinks weights, too, and so does the gradient of a linear model
        excludes=frozenset({Condition.UNUSED_LATENT, Condition.SOLVED_BY_ZERO}),
        because=(
            "The decay takes more from the weights than the gradient gives them, until only the biases of the outputs "
            "are left."
        ),
        confirm="Train without weight decay and penalties: the weights must keep their size, and the loss must fall.",
        remedies=("less_decay",),
        source="Loshchilov & Hutter 2019, sec. 2, https://arxiv.org/abs/1711.05101",
    ),
    Cause(
        id="ascent",
        name="updates that raise the loss",
        leads={"loss-plateau": 20},
        explains={"exploding-gradient": 2, "oscillating-gradient": 2, "learning-rate-too-high": 1.5, "non-finite": 2},
        requires=frozenset({Condition.CLIMBING_LOSS}),
        because="A wrong sign of the loss, or of one of its terms, turns each update uphill.",
        confirm="Print the loss of one batch before and after an update at a hundredth of the rate: it must fall.",
        remedies=("check_sign",),
        source="PyTorch, torch.optim.SGD, argument maximize, https://pytorch.org/docs/stable/generated/torch.optim.SGD.html",
    ),
    Cause(
        id="softmax-dimension",
        name="softmax over the wrong dimension",
        leads={"probabilities-into-loss": 20},
        explains={"loss-plateau": 3},
        requires=frozenset({Condition.SOFTMAX_OVER_BATCH}),
        because=(
            "The softmax compares the samples of a batch with each other: a higher score for one sample lowers all "
            "others."
        ),
        confirm="Sum the probabilities over the classes: the sum must be 1 for each sample.",
        remedies=("over_classes",),
        source="PyTorch, nn.LogSoftmax, https://pytorch.org/docs/stable/generated/torch.nn.LogSoftmax.html",
    ),
    Cause(
        id="probabilities-as-scores",
        name="probabilities or bounded scores passed to a loss that expects logits",
        leads={"probabilities-into-loss": 20},
        explains={
            "loss-plateau": 3,
            "vanishing-gradient": 1.5,
            "saturated-activation": 2,
            "learning-rate-too-low": 1.5,
        },
        excludes=frozenset({Condition.SOFTMAX_OVER_BATCH}),
        because="The loss applies its own softmax, sigmoid or logarithm, so it needs scores of any sign and size.",
        confirm="Remove the last activation from the model: with C classes, the first loss becomes about ln C.",
        remedies=("drop_activation",),
        source="PyTorch, https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
    ),
    Cause(
        id="wrong-mode",
        name="wrong train/eval mode",
        leads={"train-eval-mismatch": 15},
        explains={"overfitting": 3, "loss-plateau": 1.5, "exploding-gradient": 1.5},
        excludes=frozenset({Condition.STATISTICS_DIFFER}),
        because="Dropout and batch normalization behave differently in training and in evaluation.",
        confirm="Print model.training, and module.training, in the training step and in the validation.",
        remedies=("set_mode",),
        source="Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, sec. 3.1",
    ),
    Cause(
        id="rate-overwritten",
        name="dropout rate overwritten by an evaluation",
        leads={"train-eval-mismatch": 40},
        explains={"overfitting": 3},
        requires=frozenset({Condition.DRAWS_ENDED}),
        because="A forward pass in evaluation mode sets the rate of the module to 0, and nothing sets it back.",
        confirm="Print the rate of the module before and after a validation: it must not change.",
        remedies=("keep_rate",),
        source="NVIDIA Megatron-LM, https://github.com/NVIDIA/Megatron-LM/issues/411",
    ),
    Cause(
        id="copied-statistics",
        name="averaged weights with running statistics of the start",
        leads={"train-eval-mismatch": 40},
        explains={"overfitting": 3},
        requires=frozenset({Condition.COPY_STATISTICS}),
        because="The average follows parameters(), which leaves out the running mean and variance: they are buffers.",
        confirm="Print running_mean of a normalization in the model and in its average.",
        remedies=("copy_buffers",),
        source="PyTorch, https://pytorch.org/docs/stable/optim.html, on taking care of batch normalization; Izmailov "
        "et al. 2018, https://arxiv.org/abs/1803.05407, sec. 3.2",
    ),
    Cause(
        id="stale-statistics",
        name="running statistics that do not fit the data",
        leads={"train-eval-mismatch": 15},
        explains={"overfitting": 3},
        requires=frozenset({Condition.STATISTICS_DIFFER}),
        because=(
            "Batch normalization uses averages from training that differ from the statistics of the evaluation data."
        ),
        confirm="Validate in training mode: the loss must then be near the training loss.",
        remedies=("group_norm",),
        source="Wu & Johnson 2021, https://arxiv.org/abs/2105.07576, sec. 3",
    ),
    Cause(
        id="noisy-batches",
        name="batch size too small for the gradient noise",
        leads={"loss-plateau": 4, "oscillating-gradient": 2},
        requires=frozenset({Condition.NOISY}),
        because="The gradient noise scale is more than 10 times the batch size: most of each update is noise.",
        confirm="Accumulate ten times as many micro-batches: the loss must fall, slowly, in the same number of steps.",
        remedies=("larger_batch", "lower_rate"),
        source="McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, sec. 2.2",
    ),
    Cause(
        id="linear-stack",
        name="no nonlinearity between linear layers",
        leads={"loss-plateau": 2},  # activations that are called as functions cannot be seen
        explains={"oscillating-gradient": 1.5},
        requires=frozenset({Condition.LINEAR}),
        excludes=frozenset({Condition.BROADCAST}),
        conditions={Condition.IDENTITY: 10},
        because=(
            "Consecutive linear layers are equivalent to one linear layer: the model separates only by hyperplanes."
        ),
        confirm="Print the model: there must be an activation between two linear layers, as a module or as a function.",
        remedies=("nonlinear",),
        source="Goodfellow et al. 2016, Deep learning, sec. 6.1, https://www.deeplearningbook.org",
    ),
    Cause(
        id="unrelated-loss",
        name="loss that does not depend on the inputs as intended",
        leads={"loss-plateau": 3},
        explains={"oscillating-gradient": 1.5, "vanishing-gradient": 1.2},
        excludes=frozenset({Condition.BROADCAST}),
        because=(
            "Nothing else explains the plateau. Usual reasons: shapes that broadcast, labels that belong to other "
            "inputs."
        ),
        confirm=(
            "Overfit 10 samples: if the model cannot, there is a bug in the loss, the labels or the model's "
            "connections."
        ),
        remedies=("check_shapes",),
        source="Karpathy 2019, https://karpathy.github.io/2019/04/25/recipe/",
    ),
    Cause(
        id="unaveraged-gradients",
        name="gradients not averaged over the ranks",
        leads={"unsynchronized-gradient": 12},
        explains={"rank-divergence": 4},
        excludes=frozenset({RankCondition.CLIPPED, RankCondition.FACTOR}),
        because="The backward pass bypasses the wrapper that averages, or even the last micro-batch is in no_sync().",
        confirm="Print the norm of a gradient on each rank before optimizer.step(): they must be equal.",
        remedies=("average_gradients",),
        source=DDP,
    ),
    Cause(
        id="clipped-before-average",
        name="gradients clipped before the average over the ranks",
        leads={"unsynchronized-gradient": 20},
        requires=frozenset({RankCondition.CLIPPED}),
        because="Each rank scales its own gradient, so the average has another direction and another norm.",
        confirm="Print the norm of a gradient on each rank just before it is clipped: they must be equal.",
        remedies=("clip_after_average",),
        source=DDP,
    ),
    Cause(
        id="summed-over-ranks",
        name="gradients not divided by the number of ranks, or divided twice",
        leads={"unsynchronized-gradient": 20},
        explains={"learning-rate-too-high": 3, "exploding-gradient": 2, "learning-rate-too-low": 3},
        requires=frozenset({RankCondition.FACTOR}),
        because="all_reduce sums the gradients; the average needs one division by the number of ranks.",
        confirm="Compare a gradient with the mean of the gradients of all ranks before the reduction.",
        remedies=("divide_by_ranks",),
        source=DDP,
    ),
    Cause(
        id="different-replicas",
        name="weights that differ between the ranks",
        leads={"rank-divergence": 12},
        excludes=frozenset({RankCondition.MOMENTS}),
        because="Equal gradients keep weights equal only if they were equal at first, and nothing else changes them.",
        confirm="Compare the norms of all weights between the ranks before the first step.",
        remedies=("broadcast_weights",),
        source="Li et al. 2020, https://arxiv.org/abs/2006.15704, sec. 3",
    ),
    Cause(
        id="different-moments",
        name="optimizer states that differ between the ranks",
        leads={"rank-divergence": 12},
        requires=frozenset({RankCondition.MOMENTS}),
        because="DDP averages gradients and broadcasts weights, but each rank keeps its own moments.",
        confirm="Print len(optimizer.state) and the norm of a moment on each rank: they must be equal.",
        remedies=("load_optimizer",),
        source=DDP,
    ),
    Cause(
        id="shared-batches",
        name="ranks that train on the same data",
        leads={"rank-data": 12},
        explains={"overfitting": 2},
        excludes=frozenset({RankCondition.ORDER}),
        because="Without a sampler that knows the rank, each rank reads the whole dataset.",
        confirm="Print the first labels of a batch on each rank: they must differ.",
        remedies=("split_data",),
        source="PyTorch, DistributedSampler, https://pytorch.org/docs/stable/data.html",
    ),
    Cause(
        id="equal-epochs",
        name="DistributedSampler without set_epoch",
        leads={"rank-data": 12},
        explains={"overfitting": 1.5},
        requires=frozenset({RankCondition.ORDER}),
        because="DistributedSampler shuffles with its seed + its epoch, which stays 0 unless the loop sets it.",
        confirm="Print the first labels of the first batch in two epochs: they must differ.",
        remedies=("set_epoch",),
        source="PyTorch, DistributedSampler, https://pytorch.org/docs/stable/data.html",
    ),
    Cause(
        id="bad-data-on-rank",
        name="NaN or Inf in the data of one rank",
        leads={"rank-non-finite": 20, "non-finite": 40},
        explains={"exploding-gradient": 2, "gradient-spike": 2, "dead-layer": 2},
        requires=frozenset({RankCondition.INPUTS_BAD}),
        because="The average of the gradients carries the NaN of one rank to all ranks in the same step.",
        confirm="Print torch.isfinite(batch).all() on that rank at that step.",
        remedies=("clean_data",),
        source=DDP,
    ),
    Cause(
        id="nan-on-rank",
        name="formula that fails on the batch of one rank",
        leads={"rank-non-finite": 10, "non-finite": 40},
        explains={"exploding-gradient": 2, "gradient-spike": 2, "dead-layer": 2},
        requires=frozenset({RankCondition.NAN}),
        excludes=frozenset({RankCondition.INPUTS_BAD}),
        because="The average of the gradients carries the NaN of one rank to all ranks in the same step.",
        confirm="Run the step of that rank again: the rerun names the first bad operation.",
        is_confirmed_by_rerun=True,
        remedies=("record_ranks",),
        source=DDP,
    ),
    Cause(
        id="different-rates",
        name="learning rates that differ between the ranks",
        leads={"rank-setting": 12},
        explains={"rank-divergence": 6},
        requires=frozenset({RankCondition.RATES}),
        because="A scheduler reads the loss of its own rank, or runs on one rank only.",
        confirm="Print the learning rate on each rank after each step of the scheduler.",
        remedies=("same_rates",),
        source="PyTorch, ReduceLROnPlateau, "
        "https://pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
    ),
    Cause(
        id="own-statistics",
        name="running statistics that differ between the ranks",
        leads={"rank-setting": 12},
        explains={"train-eval-mismatch": 3},
        requires=frozenset({RankCondition.BUFFERS}),
        because="Each rank updates its buffers from its own batches, and only the buffers of rank 0 are saved.",
        confirm="Compare running_mean between the ranks when the forward pass begins.",
        remedies=("sync_statistics",),
        source="PyTorch, SyncBatchNorm, https://pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
    ),
    Cause(
        id="equal-seeds",
        name="equal random seeds on all ranks",
        leads={"rank-setting": 12},
        requires=frozenset({RankCondition.DRAWS}),
        because="Equal seeds give equal dropout masks, so the noise of the ranks does not average out.",
        confirm="Print torch.initial_seed() on each rank.",
        remedies=("seed_by_rank",),
        source="PyTorch, Reproducibility, https://pytorch.org/docs/stable/notes/randomness.html",
    ),
    Cause(
        id="kept-graphs",
        name="tensors kept with their graphs",
        leads={"graph-leak": 20},
        explains={"memory-growth": 8, "out-of-memory": 3},
        because="A tensor with a graph keeps the graph of its whole history alive.",
        confirm="Print the grad_fn of what is kept: it must be None.",
        remedies=("detach_kept",),
        source=MEMORY_FAQ,
    ),
    Cause(
        id="evaluation-graphs",
        name="evaluation with autograd enabled",
        leads={"evaluation-with-graph": 20},
        explains={"out-of-memory": 1.5},
        because="Autograd keeps the activations of every pass for a backward pass that never comes.",
        confirm="Print torch.is_grad_enabled() in the evaluation: it must be False.",
        remedies=("no_grad",),
        source="PyTorch, Autograd mechanics, https://pytorch.org/docs/stable/notes/autograd.html",
    ),
    Cause(
        id="growing-collection",
        name="collection that grows at every step",
        leads={"memory-growth": 4},
        explains={"out-of-memory": 3},
        because="The memory in use grows evenly over the run, although every training step needs the same amount.",
        confirm="Print the lengths of the lists and dictionaries of the loop every 100 steps.",
        remedies=("bound_collection",),
        source=MEMORY_FAQ,
    ),
    Cause(
        id="fragmented-memory",
        name="allocations of many sizes",
        leads={"memory-fragmentation": 10},
        explains={"out-of-memory": 2},
        because="The allocator splits its blocks for batches of one size, and the pieces do not fit the next size.",
        confirm="Print torch.cuda.memory_summary() and compare inactive with reserved memory.",
        remedies=("expandable_segments",),
        source="PyTorch, CUDA semantics, https://pytorch.org/docs/stable/notes/cuda.html",
    ),
    Cause(
        id="step-too-large",
        name="step that needs more memory than there is",
        leads={"out-of-memory": 4},
        because="The weights, the state of the optimizer and the activations of one batch do not fit together.",
        confirm="Plan the step: gradwatch plan CONFIG, or gradwatch.plan(model, step, *batch, optimizer=optimizer).",
        remedies=("smaller_batch", "bf16"),
        source=MEMORY_FAQ,
    ),
)
"""All known causes. A kind that leads to no cause is reported as unexplained, with a hint on what to check."""


def cause_of(cause_id: str) -> Cause:
    """Return the cause with an id."""
    return next(cause for cause in CAUSES if cause.id == cause_id)
