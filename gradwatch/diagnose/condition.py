"""Define the conditions of a run that causes depend on: facts of the model, the rate, the norms and the graph."""

from __future__ import annotations

import enum
from typing import TypeAlias


class Condition(enum.Enum):
    """A fact about a run, or about the layer of a finding, that makes causes likelier or rules them out."""

    SATURATING = enum.auto()
    """The model has sigmoid or tanh modules."""

    SOFTMAX = enum.auto()
    """The finding concerns a softmax, or a tensor of a model that has one."""

    EMBEDDING = enum.auto()
    """The finding concerns an embedding."""

    OFFSET_OF_DERIVATIVES = enum.auto()
    """The finding concerns a bias, and the loss may be made of derivatives by the inputs."""

    STATE_WEIGHTS = enum.auto()
    """The finding concerns the weights of a recurrent layer that multiply its state."""

    RECURRENT = enum.auto()
    """The model has recurrent modules."""

    DEEP = enum.auto()
    """The model has at least `DEEP_MODULES` modules with a weight matrix."""

    LINEAR = enum.auto()
    """The model has several weight matrices and no nonlinear module between them."""

    IDENTITY = enum.auto()
    """The config names the identity as the activation."""

    UNNORMALIZED = enum.auto()
    """No module of the model normalizes."""

    UNCLIPPED = enum.auto()
    """No gradient was ever clipped."""

    FP16 = enum.auto()
    """The forward pass runs in float16."""

    LOSS_SCALED = enum.auto()
    """A GradScaler scales the loss."""

    RATE_JUMPED = enum.auto()
    """The learning rate rose threefold above all earlier rates in the 100 steps before the finding."""

    RATE_RISING = enum.auto()
    """The learning rate tripled gradually over the 60 steps before the finding."""

    RATE_DECAYED = enum.auto()
    """The learning rate has fallen to 1 % of its maximum."""

    RATE_SQUARED = enum.auto()
    """The largest learning rate is the square of the one that the optimizer was given."""

    MODERATE_SGD = enum.auto()
    """The optimizer is SGD at a rate of at most 0.1, and the gradient was steep or the run had just begun: large
    updates then come from large gradients."""

    AT_FIRST_STEP = enum.auto()
    """The finding is at step 0."""

    AT_START = enum.auto()
    """The finding is within the first 20 steps."""

    LATE = enum.auto()
    """The finding is after step 40."""

    CALM = enum.auto()
    """The gradient norms of the 16 steps before the finding were within 10 times the usual norm."""

    SPIKED = enum.auto()
    """A single gradient spike came before the finding, after the start."""

    STEEP = enum.auto()
    """The gradient norm was 1,000 times the loss."""

    NOISY = enum.auto()
    """The gradient noise scale is more than 10 times the batch size."""

    FAINT_SIGNAL = enum.auto()
    """The outputs of a tanh or ReLU hardly vary between samples."""

    WHOLE_RUN = enum.auto()
    """The finding is for the whole run, not for one layer."""

    IN_OPTIMIZER = enum.auto()
    """An optimizer holds the layer."""

    FROZEN = enum.auto()
    """No parameter of the model requires a gradient."""

    LAST_ACTIVATION = enum.auto()
    """The finding concerns the last activation, which is not a softmax."""

    ZERO_GRADIENT = enum.auto()
    """The gradient is zero, not None."""

    NONE_GRADIENT = enum.auto()
    """The gradient is None: a factor of zero would give zero."""

    WAVES = enum.auto()
    """The gradient comes in waves, or the batches come class by class."""

    BACKWARD_GAIN = enum.auto()
    """The finding contains the gain of the backward pass."""

    AMPLIFIED = enum.auto()
    """The first loss or the backward gain is high, but no weight matrix began larger than Kaiming initialization."""

    UNBOUNDED_LOSS = enum.auto()
    """The loss falls below zero without bound."""

    JUMPING = enum.auto()
    """The loss or its gradient jumps between ordinary and huge."""

    EMPTY_MEAN = enum.auto()
    """The loss is a mean over nothing."""

    UPDATES_MISSING = enum.auto()
    """No update is made, at a rate that would move the weights."""

    ZERO_LOSS = enum.auto()
    """The loss is exactly 0 from the first step on."""

    SHUT = enum.auto()
    """The finding concerns an activation with an output near zero for every sample."""

    UNUSED_EXPERTS = enum.auto()
    """The finding concerns a router that sends no token to most of its experts."""

    RATIO_AT_ONCE = enum.auto()
    """Even the smallest reading of a policy is far from the policy that drew the samples."""

    ZERO_WEIGHTS = enum.auto()
    """Most weight matrices started at zero."""

    BROADCAST = enum.auto()
    """The autograd graph shows targets that broadcast against predictions."""

    CLIMBING_LOSS = enum.auto()
    """The loss has climbed from the start, without a fall before it."""

    SHRUNK_WEIGHTS = enum.auto()
    """Half of the weight matrices have shrunk to a small part of their first norms, or only shrink."""

    SOLVED_BY_ZERO = enum.auto()
    """The optimizers have no weight decay, and the model is one matrix: its gradient alone may lead to weights of 0."""

    OUTPUTS_AVERAGED = enum.auto()
    """The loss depends on the mean of the outputs of a batch alone."""

    OPTIMIZER_REBUILT = enum.auto()
    """Each update was made by a new optimizer."""

    COPY_UNCHANGED = enum.auto()
    """The finding is about a copy of trained weights that is written and keeps its values."""

    COPY_STATISTICS = enum.auto()
    """The finding is about the running statistics of a copy."""

    CLIPPED_LATE = enum.auto()
    """The gradients are clipped after the updates that used them."""

    GRADIENTS_REUSED = enum.auto()
    """Updates use the gradient of the update before, with no backward pass between them."""

    CLEARED_EARLY = enum.auto()
    """The gradients are cleared between the backward pass and the update."""

    SETTING_IGNORED = enum.auto()
    """The finding is about an attribute that torch does not read."""

    DRAWS_REPEATED = enum.auto()
    """Each step seeds torch's generators alike."""

    OPTIMIZERS_OPPOSED = enum.auto()
    """Two optimizers move the same weights in opposite directions."""

    NOT_LOADED = enum.auto()
    """A load with `strict=False` matched no parameter."""

    UNUSED_LATENT = enum.auto()
    """The latent of a variational autoencoder carries no information on its samples."""

    UPDATES_ENDED = enum.auto()
    """After some updates, no watched optimizer steps, and no watched gradient changes."""

    NEVER_STEPPED = enum.auto()
    """No optimizer has made a step, and most weights have not moved."""

    SINGULAR_FORMULA = enum.auto()
    """The autograd graph contains a formula near its singular point."""

    CONSTANT_OUTPUT = enum.auto()
    """The autograd graph shows a constant output."""

    UNMOVED = enum.auto()
    """The finding is for the whole run, or the gradient of a layer is zero and the graph shows a constant output."""

    SOFTMAX_OVER_BATCH = enum.auto()
    """The autograd graph contains a softmax over the batch dimension."""

    SEVERAL_HEADS = enum.auto()
    """The autograd graph shows several output heads."""

    UNREGISTERED = enum.auto()
    """The loss uses parameters that the model does not register."""

    STATISTICS_DIFFER = enum.auto()
    """No module is in the wrong mode, so the statistics of a normalization are to blame."""

    DRAWS_ENDED = enum.auto()
    """The finding names modules that drew random numbers until the first evaluation."""

    ENTROPY_ADDED = enum.auto()
    """The finding concerns a policy with an entropy that its loss adds."""

    FINITE_LOSS = enum.auto()
    """The loss was finite at the step of the finding: NaN in the data would have reached it."""


class DataCondition(enum.Enum):
    """A fact about the batches of a run, their samples, labels and padding."""

    LARGE_INPUTS = enum.auto()
    """The gradients of the layer, or of the first layer for a backward gain, show inputs far larger than 1."""

    USUAL_INPUTS = enum.auto()
    """The gradients of the layer, or of the first layer for a backward gain, show inputs of usual size."""

    SEQUENCE_AXIS = enum.auto()
    """The autograd graph shows a layer that mistakes the samples of a batch for the steps of a sequence."""

    TARGETS_AHEAD = enum.auto()
    """The labels of a language model are more than one token ahead of its inputs."""

    EQUAL_SAMPLES = enum.auto()
    """All samples of a batch are the same."""

    COPIED_SAMPLES = enum.auto()
    """All samples of a batch are the same, while the batches differ."""

    MAYBE_ALL = enum.auto()
    """The samples that come again may be all the data, so that a repeated batch is no mistake."""

    WORKER_COPIES = enum.auto()
    """Each worker of a DataLoader makes the same batches."""

    TARGETS_SHARED = enum.auto()
    """All samples of a batch have the same target."""

    LABELS_EQUAL = enum.auto()
    """All labels that were read are one class."""

    TARGETS_COPIED = enum.auto()
    """The labels are tokens of the input, in their own places."""

    TARGETS_OUT_OF_RANGE = enum.auto()
    """The last activation saturates, or cannot give some targets of a squared error."""

    PADDING_READ = enum.auto()
    """The gradient of padding is larger than that of the rest of a sequence."""

    PADDING_ATTENDED = enum.auto()
    """The mask of an attention hides the tokens and shows the padding."""

    BAD_BATCH = enum.auto()
    """The inputs of a loss that was not finite contain NaN or Inf."""

    GOOD_BATCH = enum.auto()
    """The inputs of a loss that was not finite are finite."""


class RankCondition(enum.Enum):
    """A fact about the ranks of a run that causes depend on."""

    CLIPPED = enum.auto()
    """Gradients that differ between the ranks were clipped."""

    FACTOR = enum.auto()
    """The gradients are a multiple of their average over the ranks."""

    INPUTS_BAD = enum.auto()
    """The inputs of one rank hold NaN or Inf."""

    NAN = enum.auto()
    """The loss of one rank became NaN or Inf while the losses of others were finite."""

    RATES = enum.auto()
    """The learning rates differ between the ranks."""

    BUFFERS = enum.auto()
    """The buffers differ between the ranks."""

    MOMENTS = enum.auto()
    """The states of the optimizers differ between the ranks."""

    ORDER = enum.auto()
    """Two epochs have the same order of samples."""

    DRAWS = enum.auto()
    """Several ranks draw the same random numbers."""


Fact: TypeAlias = Condition | DataCondition | RankCondition
