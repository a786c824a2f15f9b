"""Define every kind of event that a run records: its name, meaning, values with units, and text for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, final

from gradwatch.records import Event

NO_VALUES: Mapping[str, float] = MappingProxyType({})

PER_PARAMETER = "<parameter>"
"""Name of a declaration for several values, each under the name of a parameter."""
PER_SAMPLE = "sample.<hash>"
"""Name of a declaration for several values, each under the hash of a sample."""
A_FORMULA = "a `Formula`"
AN_ARGUMENT = "index of the operation that makes its argument, in `ARGUMENTS`"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # hashed by identity: there is one of each
class EventKind:
    """One row of the catalogue of events.

    Args:
        name: Name in `events.jsonl`, such as `graph-cut`. Code compares kinds, never texts.
        meaning: One sentence.
        values: Unit of each value that an event may carry; empty for a pure number.
        text: Template of the sentence for people. Its slots are the values and the `words` of `observe`.
    """

    name: str
    meaning: str
    text: str
    values: Mapping[str, str] = field(default_factory=dict)

    def observe(
        self, layer: str | None = None, *, values: Mapping[str, float] = NO_VALUES, **words: object
    ) -> Observation:
        """Return an event of this kind without a step.

        Args:
            layer: Module or parameter name, or None for the whole run.
            values: Named numbers, all declared by this kind.
            words: Values for the other slots of the text.
        """
        # names of parameters and samples cannot be declared in advance
        unknown = set() if {PER_PARAMETER, PER_SAMPLE} & self.values.keys() else values.keys() - self.values.keys()
        assert not unknown, f"{self.name}: got values {sorted(unknown)}, expected some of {sorted(self.values)}"
        text = self.text.format(**values, **words)
        return Observation(self.name, layer, text, {name: float(value) for name, value in values.items()})

    def emit(
        self, *, step: int, layer: str | None = None, values: Mapping[str, float] = NO_VALUES, **words: object
    ) -> Event:
        """Return an event of this kind at an optimizer step. Further arguments as for `observe`."""
        return self.observe(layer, values=values, **words).at(step)


class Observation(NamedTuple):
    """An event without a step: the name of its kind, its layer, its text and its values."""

    kind: str
    layer: str | None
    text: str
    values: dict[str, float]

    @property
    def key(self) -> EventKey:
        """Kind and layer: a run records most kinds once per layer."""
        return self.kind, self.layer

    def at(self, step: int) -> Event:
        """Return the event at an optimizer step."""
        return Event(kind=self.kind, step=step, layer=self.layer, text=self.text, values=self.values)


EventKey = tuple[str, str | None]
"""Kind and layer of an event."""

# The autograd graph of the loss.

PROBABILITIES = EventKind(
    name="graph-probabilities",
    meaning="The loss gets probabilities but expects logits or log-probabilities.",
    values={"classes": "classes", "floor": "nats per sample"},
    text="{misuse}: {effect}",
)
BOUNDED_SCORES = EventKind(
    name="graph-bounded-scores",
    meaning="The loss expects logits of any sign and size but gets the output of a ReLU or a tanh.",
    values={"classes": "classes", "floor": "nats per sample"},
    text="the loss gets scores that a {bound} has bounded: {effect}",
)
SCORES = EventKind(
    name="graph-scores",
    meaning="The loss gets logits but expects log-probabilities.",
    text="the loss expects log-probabilities but gets logits",
)
SOFTMAX_OVER_BATCH = EventKind(
    name="graph-over-batch",
    meaning="The softmax before a classification loss normalizes over the samples of the batch.",
    values={"samples": "samples"},
    text="the softmax runs over the {samples:.0f} samples of the batch, not over the classes",
)
LOG_OF_SOFTMAX = EventKind(
    name="graph-log-of-softmax",
    meaning="The loss takes the logarithm of a softmax or sigmoid, which can round to log(0).",
    values={"formula": A_FORMULA, "argument": AN_ARGUMENT},
    text="log(softmax(x)) or log(sigmoid(x)) can round to log(0): use log_softmax or logsigmoid",
)
CONSTANT_SOFTMAX = EventKind(
    name="graph-constant",
    meaning="A softmax normalizes over a single value.",
    text="a softmax over a single value is always 1",
)
BROADCAST = EventKind(
    name="graph-broadcast",
    meaning="Prediction and target are broadcast against each other into all pairs of samples.",
    values={"samples": "samples"},
    text="prediction and target of shapes {shapes} broadcast to {samples:.0f} x {samples:.0f} differences",
)
POOLED = EventKind(
    name="graph-pooled",
    meaning="A single prediction, made of all samples of a batch, is broadcast against their targets.",
    values=BROADCAST.values,
    text="a single prediction is compared with {samples:.0f} targets, as the model pools all samples of the batch",
)
MIXED_AXES = EventKind(
    name="graph-mixed",
    meaning="A view before the loss mixes the outputs of several samples or positions in one softmax.",
    values={"classes": "classes"},
    text="the softmax runs over {classes:.0f} values that are not the {outputs} outputs of one position",
)
SEQUENCE_AXIS = EventKind(
    name="graph-sequence-axis",
    meaning="A recurrent layer or an attention mistakes the samples of a batch for the steps of a sequence.",
    values={"rows": "rows of the loss", "samples": "sequences that the layer sees"},
    text="it mistakes the {rows:.0f} samples of a batch for the steps of a sequence, and mixes them",
)
CUT = EventKind(
    name="graph-cut",
    meaning="The loss does not reach consecutive parameters of the model.",
    values={"first": "index of the first parameter", "last": "index of the last parameter"},
    text="the loss does not reach {number}: the graph is cut {where}",
)
SINGULAR = EventKind(
    name="graph-singular",
    meaning="The loss contains an operation with a singularity, and nothing keeps its input away from it.",
    values={
        "rank": "0 for the likeliest culprit",
        "formula": A_FORMULA,
        "argument": AN_ARGUMENT,
    },
    text="{description}",
)
UNSTABLE = EventKind(
    name="graph-unstable",
    meaning="The loss contains a formula that overflows, cancels or has an infinite gradient somewhere; "
    "another form does not.",
    values={"formula": A_FORMULA, "argument": AN_ARGUMENT},
    text="{description}",
)
EMPTY_MEAN = EventKind(
    name="graph-empty-mean",
    meaning="A loss that is not finite is the mean of no values.",
    text="the loss is a mean over nothing: {why}",
)
IGNORES_LABELS = EventKind(
    name="graph-ignores-labels",
    meaning="A loss that is not finite contains a cross entropy that leaves out the labels of an `ignore_index`.",
    values={"ignore_index": ""},
    text="the cross entropy leaves out labels of ignore_index ({ignore_index:.0f})",
)
DERIVATIVE = EventKind(
    name="graph-derivative",
    meaning="The loss is differentiable with respect to tensors that are not parameters (physics-informed loss).",
    values={"tensors": "tensors", "width": "largest last dimension of them"},
    text="the loss is differentiable with respect to tensors of shape {shapes}, which are not parameters",
)
OUTPUT_PAIRS = EventKind(
    name="graph-output-pairs",
    meaning="The loss compares outputs with each other, or divides them by their norm.",
    text="the loss compares outputs of the last layer with each other, which hardly depends on its bias",
)
CLASSES = EventKind(
    name="graph-classes",
    meaning="The loss is one cross entropy of logits; the layer is the bias of the output.",
    values={"samples": "samples", "classes": "classes", "nat": "loss per nat and sample"},
    text="a cross entropy of {samples:.0f} samples and {classes:.0f} classes",
)
CHANCE = EventKind(
    name="graph-chance",
    meaning="The loss is one cross entropy, so the loss of a uniform guess is known.",
    values={"nat": "loss per nat and sample", "classes": "classes"},
    text="a cross entropy of {classes:.0f} classes",
)
EMBEDDING_PRODUCT = EventKind(
    name="graph-embedding-product",
    meaning="Rows of embedding tables are multiplied and summed.",
    values={"first": "index of a parameter", "second": "index of a parameter", "dimension": "summed products"},
    text="{rows} are multiplied and summed over {width} dimensions",
)
TIED_EMBEDDING = EventKind(
    name="graph-tied-embedding",
    meaning="An embedding table is also the weight of the output layer.",
    values={
        "weight": "index of the parameter",
        "dimension": "columns",
        "classes": "rows",
        "normalised": "1 if a normalization comes before the output layer",
    },
    text="{table} is also the output layer, over {dimension:.0f} dimensions for {classes:.0f} classes",
)
HEADS = EventKind(
    name="graph-heads",
    meaning="Several output layers share the layers before them.",
    values={PER_PARAMETER: "index of the weight of a head"},
    text="{heads} heads share the layers before them",
)
TOWERS = EventKind(
    name="graph-towers",
    meaning="Parts of the model with several layers each share no layer, as an actor and a critic may.",
    values={PER_PARAMETER: "number of the part of the weight"},
    text="{towers} parts of the model share no layer",
)
DEPTHS = EventKind(
    name="graph-depths",
    meaning="The layers are not registered in the order in which they run, from the input to the output.",
    values={PER_PARAMETER: "layers on the longest path from the loss to the weight, with its own"},
    text="the layers run in another order than they are registered",
)
SIDE_BY_SIDE = EventKind(
    name="graph-side-by-side",
    meaning="Numbered modules of equal shape run in parallel, as experts do.",
    values={"modules": "modules"},
    text="{modules:.0f} modules run side by side",
)
ENTROPY_MINIMIZED = EventKind(
    name="graph-entropy-minimized",
    meaning="The loss of a policy gradient adds the entropy of the policy, with a factor of unknown sign.",
    text="the loss adds the entropy of the policy: with a positive factor, training minimizes it",
)
POLICY = EventKind(
    name="graph-policy",
    meaning="The loss weighs log-probabilities or ratios of chosen classes, as a policy gradient does.",
    text="the loss weighs the chosen classes one by one, as a policy gradient weighs actions",
)
CODEBOOK = EventKind(
    name="graph-codebook",
    meaning="A loss pulls rows of a table to fixed values, as in a vector quantizer.",
    text="the loss pulls rows of {table} to fixed values",
)
ADVERSARY = EventKind(
    name="graph-adversary",
    meaning="Parameters of another learner stand between the model and the loss.",
    text="parameters of another learner stand between the model and the loss",
)
CHOSEN_OUTPUTS = EventKind(
    name="graph-chosen-outputs",
    meaning="A regression compares chosen outputs with its targets, as Q-learning does with the values of actions.",
    text="the loss is a regression of chosen outputs, as of the values of actions",
)
MATRIX = EventKind(
    name="graph-matrix",
    meaning="A custom module multiplies by one of its parameters.",
    values={"weight": "index of the parameter", "inputs": "inputs of each unit"},
    text="{inputs:.0f} inputs",
)
RECURRENCE = EventKind(
    name="graph-recurrence",
    meaning="The gradient grows or shrinks in backprop through the uses of one parameter.",
    values={"uses": "uses", "growth": "powers of ten from the last use to the first"},
    text="the gradient changes by a factor of 10^{growth:.1f} in backprop through {uses:.0f} uses",
)
UNREAD = EventKind(
    name="graph-unread",
    meaning="The training loop passed the loss as a number, so its autograd graph was not analyzed.",
    text="the autograd graph of the loss: the loss was passed as a number; "
    "pass the loss tensor itself, before item() and detach()",
)

# Parameters.

UNREGISTERED = EventKind(
    name="parameters-unregistered",
    meaning="The loss uses parameters that `parameters()` does not return, and nothing updates them.",
    values={"tensors": "tensors"},
    text="the loss uses {what}, {reason}",
)
UNHELD = EventKind(
    name="parameters-unheld",
    meaning="The loss reaches tensors that no watched model and no optimizer holds, and nothing clears their gradient.",
    values={"tensors": "tensors"},
    text="the loss reaches {what}, which no watched model holds and no optimizer moves, and the gradient adds up: "
    "give it to an optimizer, or freeze it if it is meant to stay",
)
UNHELD_KEPT = EventKind(
    name="gradients-unheld-kept",
    meaning="The gradient of a parameter that no optimizer holds is never cleared.",
    text="the gradient of {parameter}, which no optimizer holds, is never cleared and adds up",
)
PARAMETERS_NEW = EventKind(
    name="parameters-new",
    meaning="Parameters of the model that were not there when the monitor attached, and that no optimizer holds.",
    values={"tensors": "tensors", "replaced": "tensors that take the place of a watched parameter"},
    text="{parameters} {how} after `watch`, and no optimizer holds {pronoun}",
)
PARAMETERS_JOINED = EventKind(
    name="parameters-joined",
    meaning="Parameters have joined the model since the last comparison, and an optimizer holds them.",
    values={"tensors": "tensors", "since": "step of the last comparison"},
    text="{parameters} joined the model and an optimizer after `watch`, and {are} not watched",
)
NOTHING_TRAINABLE = EventKind(
    name="nothing-trainable",
    meaning="No parameter of the model requires a gradient, or an optimizer holds no parameter.",
    text="{reason}",
)
EMPTY_GROUP = EventKind(
    name="group-empty",
    meaning="A group of an optimizer holds no parameter.",
    values={"group": "index of the group"},
    text="group {group:.0f} of the optimizer holds no parameter",
)
ASCENDED = EventKind(
    name="weights-ascended",
    meaning="An optimizer moves a parameter up the gradient, while others are moved down: the loss has a saddle point.",
    text="moved up the gradient (`maximize=True`), while other parameters are moved down",
)
WEIGHTS_OFFSET = EventKind(
    name="weights-offset",
    meaning="The initial elements of a weight have a mean other than zero.",
    values={"place": "index of the parameter", "mean": ""},
    text="initialized around a mean other than 0",
)
WEIGHTS_MOVED = EventKind(
    name="weights-moved",
    meaning="Consecutive weights change although no monitored optimizer holds them.",
    values={"first": "index of the first parameter", "last": "index of the last parameter"},
    text="{weights} changed although no monitored optimizer holds it",
)
WEIGHTS_STILL = EventKind(
    name="weights-still",
    meaning="Nothing has moved most of the weights that the monitored optimizers hold since the start.",
    values={"still": "tensors", "held": "tensors", "steps": "steps"},
    text="{still:.0f} of {held:.0f} tensors have not changed in {steps:.0f} steps",
)
WEIGHTS_CLIPPED = EventKind(
    name="weights-clipped",
    meaning="A tenth or more of the values of a weight are its largest or its smallest: the loop clips it.",
    values={"first": "index of the first tensor", "last": "index of the last tensor"},
    text="{weights}: many values are the largest or the smallest, as if clipped",
)
COPY_UNCHANGED = EventKind(
    name="copy-unchanged",
    meaning="A copy of trained weights is written again and again, and keeps the values of its first step.",
    values={"steps": "steps", "distance": "norm of the difference to the trained weights, in units of the copy"},
    text="{what} is written again and again and has kept its values for {steps:.0f} steps, while the trained weights "
    "moved away from it by {distance:.0%}",
)
OPTIMIZER_REBUILT = EventKind(
    name="optimizer-rebuilt",
    meaning="Each update so far was made by a new optimizer.",
    values={"updates": "updates"},
    text="{updates:.0f} updates in a row were each made by a new {optimizer}",
)
CLIPPED_LATE = EventKind(
    name="clipped-late",
    meaning="The gradients of the first updates were clipped after the updates that used them, and then cleared.",
    values={"updates": "updates", "factor": "smallest factor of the norm; -1 if values are clipped"},
    text="the gradients of {updates:.0f} updates were clipped after the update, and then cleared",
)
GRADIENTS_REUSED = EventKind(
    name="gradients-reused",
    meaning="Some of the first updates used the gradient of the update before, with no backward pass between them.",
    values={"reused": "updates that used the gradient again", "updates": "updates"},
    text="{reused:.0f} of the first {updates:.0f} updates had no backward pass of their own",
)
CLEARED_EARLY = EventKind(
    name="cleared-early",
    meaning="The first updates found no gradient, although a backward pass had made one since the update before.",
    values={"updates": "updates"},
    text="{updates:.0f} updates found no gradient: it was cleared after the backward pass",
)
FREEZE_IGNORED = EventKind(
    name="freeze-ignored",
    meaning="An attribute of tensors or modules that reads like `requires_grad` is False, and the tensors train.",
    values={"tensors": "tensors"},
    text="{tensors:.0f} tensors train although {attribute} is set to False for them: torch does not read it there",
)
RATE_IGNORED = EventKind(
    name="rate-ignored",
    meaning="An optimizer has an attribute for a learning rate that is lower than the rate in use.",
    values={"wanted": "rate of the attribute", "rate": "rate in use"},
    text="the learning rate is still {rate:g}: `optimizer.{attribute} = {wanted:g}` has no effect",
)
DRAWS_REPEATED = EventKind(
    name="draws-repeated",
    meaning="Many steps in a row began with the same seed, and then drew random numbers.",
    values={"steps": "steps"},
    text="{steps:.0f} steps in a row drew the same random numbers, since each called torch.manual_seed({seed})",
)
OPTIMIZERS_OPPOSED = EventKind(
    name="optimizers-opposed",
    meaning="Two optimizers hold the same weights, and their gradients are opposed for many updates in a row.",
    values={"cosine": "median cosine of the two gradients", "tensors": "tensors that both optimizers hold"},
    text="two optimizers hold {tensors:.0f} tensors and move them in opposite directions",
)
WEIGHTS_TRAINED = EventKind(
    name="weights-trained",
    meaning="The weights had already been changed in place many times when the monitor attached.",
    values={"changes": "changes of a weight"},
    text="each weight had been changed {changes:.0f} times before: the model was already trained",
)
WEIGHTS_NOT_LOADED = EventKind(
    name="weights-not-loaded",
    meaning="A load with strict=False matched no parameter of a module, which is trained as it was initialized.",
    values={"tensors": "tensors"},
    text="load_state_dict(strict=False) loaded nothing: the state has {unexpected} where the model has {missing}, and "
    "none of its {tensors:.0f} names matches",
)
OWN_STATE_LOADED = EventKind(
    name="own-state-loaded",
    meaning="A state of an earlier step was loaded, but its tensors are still the model's own, so nothing changed.",
    values={"since": "step at which the state was taken"},
    text="load_state_dict restored nothing: the state of step {since:.0f} was not copied, so it has been trained since",
)
WEIGHTS_ALIKE = EventKind(
    name="weights-alike",
    meaning="All initial elements of adjacent weight matrices are equal.",
    values={"place": "index of the parameter"},
    text="all weights are equal, as in an adjacent layer: its units are identical and stay identical",
)

# Modules.

MODE_TRAINING = EventKind(
    name="mode-training",
    meaning="Dropout or batch normalization is in evaluation mode while the model is trained, or the module around it.",
    values={
        "dropouts": "modules",
        "normalisations": "modules",
        "never measured": "normalizations with initial statistics",
        "trained before": "modules that were in training mode before",
        "whole model": "0 or 1",
    },
    text="{modules} in evaluation mode while {owner}",
)
MODE_FROZEN = EventKind(
    name="mode-frozen",
    meaning="Single modules are in evaluation mode inside a trained part of the model, as frozen layers are.",
    values=MODE_TRAINING.values,
    text=MODE_TRAINING.text,
)
MODE_VALIDATION = EventKind(
    name="mode-validation",
    meaning="The model was evaluated in training mode.",
    values={"calls in training mode": "forward calls", "calls in evaluation mode": "forward calls"},
    text="the model was evaluated in training mode",
)
MODE_TEACHER = EventKind(
    name="mode-teacher",
    meaning="Dropout is active in a frozen module that gets the inputs of a trained one, without gradients.",
    values={"dropouts": "modules", "calls": "forward calls"},
    text="{what} gets the inputs of a trained module, as a teacher does, and drops features at random: its weights are "
    "frozen, and {dropouts:.0f} of its dropouts are in training mode",
)
DRAWS_ENDED = EventKind(
    name="mode-draws-ended",
    meaning="Modules drew random numbers in each training pass until the first evaluation, and none since.",
    values={"drawing modules": "modules", "samples before": "sampled steps", "samples since": "sampled steps"},
    text="{who} drew random numbers in training until the first evaluation, and none since",
)
NORM_STUCK = EventKind(
    name="norm-stuck",
    meaning="Momentum 0 keeps running statistics at their initial values.",
    values={"momentum": "", "normalisations": "modules"},
    text="momentum 0 keeps the running mean at 0 and the running variance at 1",
)
NORM_HASTY = EventKind(
    name="norm-hasty",
    meaning="A momentum near 1 makes running statistics forget all but the last batch.",
    values={"momentum": "", "normalisations": "modules"},
    text="momentum {momentum:g} makes the running statistics equal to the statistics of the last batch",
)
COPY_STATISTICS = EventKind(
    name="copy-statistics",
    meaning="A copy whose weights follow the model is evaluated with running statistics that nothing has updated.",
    values={"shift": "standard deviations", "log of spread": "natural logarithm of a ratio of variances"},
    text="the weights of {what} follow the model, and its running statistics have never been updated",
)
NORM_DISTANCE = EventKind(
    name="norm-distance",
    meaning="Running statistics at a validation differ from the statistics of the next batch.",
    values={"shift": "standard deviations", "log of spread": "natural logarithm of a ratio of variances"},
    text="distance of the running statistics from the statistics of the next batch",
)
FUNCTION_ACTIVE = EventKind(
    name="function-active",
    meaning="A module calls dropout or batch normalization as a function that is active in evaluation mode.",
    values={"evaluations of the same inputs": "forward calls"},
    text="{function} is called as a function and stays active in evaluation mode",
)

# Batches.

INPUTS_DIFFER = EventKind(
    name="inputs-differ",
    meaning="Validation inputs differ from training inputs in mean or scale.",
    values={"shift": "standard deviations", "log of spread": "natural logarithm of a ratio of deviations"},
    text="validation inputs have a mean of {mean:.3g} and a standard deviation of {deviation:.3g}, "
    "training inputs {usual_mean:.3g} and {usual_deviation:.3g}",
)
BATCH_ALIKE = EventKind(
    name="batch-alike",
    meaning="All inspected batches consist of the same samples.",
    values={
        "distance": "distance to the nearest first sample / distance of that sample to its nearest neighbor",
        "samples": "samples",
        "features": "numbers of a sample",
        "exact": "1 if the batches are bit-identical",
        "held": "1 if it is the same memory",
        "integers": "1 if the inputs are whole numbers",
        "equal": "1 if all samples of these batches are the same",
        "part": "1 if there is more data, or the loop keeps none",
    },
    text="the inspected batches consist of the same samples",
)
INPUTS_ALIKE = EventKind(
    name="inputs-alike",
    meaning="The model gets the same samples again, in a loop that does not pass its batches.",
    values=BATCH_ALIKE.values,
    text=BATCH_ALIKE.text,
)
SAMPLES_EQUAL = EventKind(
    name="samples-equal",
    meaning="All samples of each inspected batch are the same, and the batches differ.",
    values={"samples": "samples of a batch", "batches": "inspected batches that differ from each other"},
    text="all {samples} samples of a batch are the same, in each of {batches} different batches",
)
TENSOR_HELD = EventKind(
    name="tensor-held",
    meaning="The loop passed the tensor of step 0 again.",
    text="the loop passes the same tensor again",
)
PART_BATCH = EventKind(
    name="batch-part",
    meaning="A repeated batch is only a part of the data, or is made of data that the loop does not keep. On a device, "
    "the batch of step 1 counts as repeated.",
    values={"samples": "samples"},
    text="the batch of {samples} samples is a part of the data: {why}",
)
WORKERS = EventKind(
    name="batch-workers",
    meaning="A DataLoader with several workers yields batches of the size of one that came again. On a device, the "
    "batch of step 1 counts as such.",
    values={"workers": "workers"},
    text="the DataLoader has {workers:.0f} workers",
)
UNPAIRED = EventKind(
    name="outputs-unpaired",
    meaning="Predictions fit the targets of other samples as well as their own targets.",
    values={"explained": "fraction of the loss of the best constant"},
    text="predictions fit other samples as well as their own",
)
UNCLEAR = EventKind(
    name="outputs-unclear",
    meaning="Predictions do not fit their own targets yet, and so few samples would not show a slow start.",
    values=UNPAIRED.values,
    text="predictions do not fit yet, which proves little after so few samples",
)
PAIRED = EventKind(
    name="outputs-paired",
    meaning="Predictions fit their own targets, though not well yet.",
    values=UNPAIRED.values,
    text="predictions fit",
)
OUTPUTS_AVERAGED = EventKind(
    name="outputs-averaged",
    meaning="The loss depends on the mean of the outputs of a batch alone.",
    values={"samples": "samples of a batch"},
    text="the gradient is the same for all {samples:.0f} outputs of a batch, whatever their targets are",
)
TARGETS_SHARED = EventKind(
    name="targets-shared",
    meaning="All samples of a batch have the same target, and the next batch has another one.",
    values=OUTPUTS_AVERAGED.values,
    text="all {samples:.0f} samples of a batch have the same target",
)
LABELS_EQUAL = EventKind(
    name="labels-equal",
    meaning="All labels of the first sampled steps are one class.",
    values={"labels": "labels", "class": "index of the class"},
    text="all {labels:.0f} labels that were read are class {class:.0f}",
)
MAJORITY_PREDICTED = EventKind(
    name="predictions-majority",
    meaning="Every prediction of many sampled steps is one class, though some labels are others.",
    values={
        "class": "index of the class",
        "share": "fraction of the labels of this class",
        "others": "labels of other classes",
    },
    text="every prediction is class {class:.0f}; {others:.0f} labels that were read are others",
)
MINORITY_PREDICTED = EventKind(
    name="predictions-minority",
    meaning="After predictions of a single class, another class is predicted, too.",
    text="another class is predicted, too",
)
FIRST_OUTPUTS = EventKind(
    name="outputs-first",
    meaning="The first outputs of a squared error are at least ten times as large as their targets.",
    values={"outputs": "root mean square of the outputs", "targets": "root mean square of the targets"},
    text="the first outputs have a root mean square of {outputs:.3g}, and their targets of {targets:.3g}",
)
TARGETS_UNREACHABLE = EventKind(
    name="targets-unreachable",
    meaning="Some targets of a squared error lie outside of the range of the activation that computes the outputs.",
    values={"share": "fraction of the variance of the targets", "target": "the farthest target, in its own unit"},
    text="the output is a {activation}, and a target is {target:.3g}",
)
TARGETS_VISIBLE = EventKind(
    name="targets-visible",
    meaning="A language model sees the token after each position, which is the label of that position.",
    values={"labels": "labels that were compared"},
    text="each label is the next input token, and every position sees it",
)
TARGETS_AHEAD = EventKind(
    name="targets-ahead",
    meaning="The labels of a language model are more than one token ahead of its inputs.",
    values={"ahead": "positions", "labels": TARGETS_VISIBLE.values["labels"]},
    text="each label is the input token {ahead:.0f} positions later",
)
TARGETS_COPIED = EventKind(
    name="targets-copied",
    meaning="The labels of a model are tokens of its input, in their own places.",
    values={"labels": TARGETS_VISIBLE.values["labels"]},
    text="each label is the input token in its own place",
)
LATENT_UNUSED = EventKind(
    name="latent-unused",
    meaning="The latent of a variational autoencoder has almost no information on its samples, in four reads in a row.",
    values={"nats": "nats per sample, of all dimensions together", "dimensions": "dimensions"},
    text="all {dimensions:.0f} deviations are close to 1, so the latent carries {nats:.2g} nats about a sample",
)
LATENT_USED = EventKind(
    name="latent-used",
    meaning="A latent that carried almost no information carries some again.",
    values=LATENT_UNUSED.values,
    text="the latent carries {nats:.2g} nats about a sample",
)
PADDING_READ = EventKind(
    name="padding-read",
    meaning="The gradient of a padding token is larger than that of another token.",
    values={"padding": "fraction of the positions", "decades": "orders of magnitude"},
    text="the gradient of a padding token is 1e{decades:.2g} times that of another token",
)
PADDED_INPUT = EventKind(
    name="padded-input",
    meaning="A recurrent layer gets sequences of different lengths that end in zeros.",
    values={"padding": PADDING_READ.values["padding"], "rms": "root mean square of the other numbers"},
    text="its sequences end in zeros of different numbers",
)
PADDING_ATTENDED = EventKind(
    name="padding-attended",
    meaning="The mask of an attention hides the tokens and shows the padding.",
    values={"padding": PADDING_READ.values["padding"]},
    text="its mask hides the tokens and shows the padding",
)

# Clearing of gradients.

GRADIENTS_KEPT = EventKind(
    name="gradients-kept",
    meaning="No backward pass since the last update found the gradients cleared.",
    text="the gradients were not cleared since the previous update",
)
GRADIENTS_KEPT_LATER = EventKind(
    name="gradients-kept-later",
    meaning="Nothing cleared the gradients between several consecutive updates later in the run.",
    text="the gradients are no longer cleared between updates, since step {since}",
)

GRADIENTS_LEFT = EventKind(
    name="gradients-left",
    meaning="An update used a gradient that the loss of another optimizer had left on its way through the model.",
    text="the gradients held what the loss of another optimizer had left",
)

# Losses that a loop reports.

LOSS_NAN = EventKind(
    name="loss-nan",
    meaning="The first step whose loss was given, and NaN.",
    text="the loop passed a loss of NaN",
)
LOSS_WITHHELD = EventKind(
    name="loss-withheld",
    meaning="The first step whose loss was None.",
    text="the loop passed no loss",
)
BATCH_FINITE = EventKind(
    name="batch-finite",
    meaning="The inputs of the first loss that is not finite are finite.",
    text="the inputs contain no NaN or Inf",
)
BATCH_NONFINITE = EventKind(
    name="batch-nonfinite",
    meaning="The inputs of the first loss that is not finite hold NaN or Inf.",
    text="the inputs contain NaN or Inf",
)

# Other ranks of a distributed training.

RANK_GRADIENTS_DIFFER = EventKind(
    name="rank-gradients-differ",
    meaning="The gradients of a parameter, or of most parameters, began to differ between the ranks.",
    values={
        "rank": "the rank that differs from the others; -1 if all differ",
        "parameters": "number of parameters whose gradients differ",
        "difference": "largest relative difference of two norms",
        "clipped": "1 if gradients were clipped at the step",
    },
    text="the gradients of {parameters:.0f} parameters differ between the ranks",
)
RANK_GRADIENTS_AGREE = EventKind(
    name="rank-gradients-agree",
    meaning="All gradients are equal on all ranks, at the first compared step or again.",
    text="the gradients are equal on all ranks",
)
RANK_WEIGHTS_DIFFER = EventKind(
    name="rank-weights-differ",
    meaning="The weights of a parameter, or of most parameters, began to differ between the ranks.",
    values={
        "rank": RANK_GRADIENTS_DIFFER.values["rank"],
        "parameters": "number of parameters whose weights differ",
        "difference": RANK_GRADIENTS_DIFFER.values["difference"],
    },
    text="the weights of {parameters:.0f} parameters differ between the ranks",
)
RANK_WEIGHTS_AGREE = EventKind(
    name="rank-weights-agree",
    meaning="All weights are equal on all ranks, at the first compared step or again.",
    text="the weights are equal on all ranks",
)
RANK_BATCHES_EQUAL = EventKind(
    name="rank-batches-equal",
    meaning="Several ranks began to train on equal batches at equal steps.",
    values={"rank": "the lowest rank whose batch another rank has as well", "other": "that other rank"},
    text="ranks {rank:.0f} and {other:.0f} train on the same batches",
)
RANK_SAMPLES_SHARED = EventKind(
    name="rank-samples-shared",
    meaning="Two ranks train on the same samples in one epoch, at equal or at other steps.",
    values={"rank": "the lower rank", "other": "the higher rank", "shared": "fraction of their samples"},
    text="ranks {rank:.0f} and {other:.0f} train on the same samples: they share {percent:.0f} % of them",
)
RANK_ORDER_REPEATED = EventKind(
    name="rank-order-repeated",
    meaning="A sampler that shuffles gave two epochs the same order.",
    values={"epoch": "the number that the sampler has for both epochs", "steps": "steps of an epoch"},
    text="two epochs of {steps:.0f} steps have the same order",
)
RANK_RATES_DIFFER = EventKind(
    name="rank-rates-differ",
    meaning="The learning rates began to differ between the ranks.",
    values={
        "rank": "the rank that differs from the others",
        "group": "index of the optimizer group",
        "rate": "its learning rate",
        "usual": "learning rate of the other ranks",
    },
    text="the learning rate of group {group:.0f} is {rate:g} on rank {rank:.0f} and {usual:g} on the others",
)
RANK_WEIGHTS_CHANGED = EventKind(
    name="rank-weights-changed",
    meaning="The weights of a rank changed between two updates.",
    values={"parameters": "number of parameters that changed"},
    text="{parameters:.0f} parameters changed between two updates",
)
RANK_OPTIMIZER_LOADED = EventKind(
    name="rank-optimizer-loaded",
    meaning="The optimizer of a rank loaded a state.",
    text="the optimizer loaded a state",
)
RANK_MOMENTS_DIFFER = EventKind(
    name="rank-moments-differ",
    meaning="The states of the optimizers, such as their moments, began to differ between the ranks.",
    values={"rank": RANK_GRADIENTS_DIFFER.values["rank"]},
    text="the states of the optimizers differ between the ranks",
)
RANK_STATE = EventKind(
    name="rank-state",
    meaning="The state of a rank at a step, to compare it with the other ranks.",
    values={
        "buffers": "L2 norm of all buffers when the forward pass begins",
        "weights": "L2 norm of some weights before the update",
        "random": "checksum of the random state when the forward pass begins, if the pass draws random numbers",
        "moments": "sum of the logarithms of the L2 norms of some tensors in the state of the optimizer",
        "local": "squared L2 norm of some gradients before the average over the ranks",
        "reduced": "squared L2 norm of these gradients before the update",
        "product": "inner product of the two",
        "samples_until": "step that ends the steps whose samples are counted",
        PER_SAMPLE: "first step that had a sample, by a hash of the sample",
    },
    text="the state of this rank was read",
)
RANK_FACTOR = EventKind(
    name="rank-factor",
    meaning="The gradients are a multiple of their average over the ranks.",
    values={"factor": "times as large as the average", "ranks": "number of ranks"},
    text="the gradients are {factor:.3g} times as large as their average over the ranks",
)
RANK_NOISE = EventKind(
    name="rank-noise",
    meaning="The gradients of the ranks before and after the average, for the gradient noise scale.",
    values={
        "local": "squared L2 norm of some gradients before the average, averaged over the ranks",
        "average": "squared L2 norm of the average of these gradients",
        "ranks": "number of ranks",
    },
    text="the average of the gradients has {fraction:.3g} times the power of the gradient of a rank",
)
RANK_BUFFERS_DIFFER = EventKind(
    name="rank-buffers-differ",
    meaning="The buffers differ between the ranks when a forward pass begins.",
    values={"rank": RANK_GRADIENTS_DIFFER.values["rank"]},
    text="the buffers differ between the ranks",
)
RANK_DRAWS_EQUAL = EventKind(
    name="rank-draws-equal",
    meaning="Several ranks draw the same random numbers in the forward pass.",
    values={"rank": "the lowest such rank", "other": "the next one"},
    text="ranks {rank:.0f} and {other:.0f} draw the same random numbers",
)
RANK_LOSS_NONFINITE = EventKind(
    name="rank-loss-nonfinite",
    meaning="The first loss that is NaN or Inf while the loss of another rank is finite.",
    values={"rank": "the rank", "inputs": "1 if its inputs hold NaN or Inf, 0 if not, -1 if unknown"},
    text="the loss is not finite on rank {rank:.0f} first",
)
SHARDS_LOCAL = EventKind(
    name="shards-local",
    meaning="From this step, the statistics of sharded parameters are those of the shards on this rank.",
    values={"rank": "the lowest rank whose part is missing; -1 if the run has no directory"},
    text="the statistics of sharded parameters are those of the shards on this rank: the other parts are missing",
)
SHARDS_WHOLE = EventKind(
    name="shards-whole",
    meaning="From this step, the statistics of sharded parameters are those of whole parameters again.",
    text="the statistics of sharded parameters are those of whole parameters again",
)

# Memory.

GRAPH_KEPT = EventKind(
    name="graph-kept",
    meaning="The autograd graphs of several successive steps are still alive many steps later.",
    values={"since": "first of these steps", "steps": "number of these steps"},
    text="the autograd graph of every step since step {since:.0f} is kept in memory{by}",
)
EVALUATED_WITH_GRAPH = EventKind(
    name="evaluated-with-graph",
    meaning="Forward passes in evaluation mode built autograd graphs, and no backward pass followed.",
    values={"passes": "number of these passes", "alive": "largest number of these graphs at the same time"},
    text="{passes:.0f} forward passes in evaluation mode built an autograd graph that nothing used{at}{kept}",
)
MEMORY_GROWS = EventKind(
    name="memory-grows",
    meaning="The memory in use grows steadily, and would be full after as many steps as were seen.",
    values={"rate": "bytes per step", "used": "bytes in use", "left": "bytes that are free", "steps": "steps left"},
    text="the memory grows by {megabytes:.3g} MB a step, and is full in about {steps:,.0f} steps",
)
MEMORY_FRAGMENTED = EventKind(
    name="memory-fragmented",
    meaning="The CUDA allocator had to free its cache and try again, with much of its memory in unusable pieces.",
    values={"split": "bytes in pieces of split blocks", "reserved": "bytes reserved", "retries": "retries so far"},
    text="{gigabytes:.3g} of {of:.3g} GB reserved are unusable pieces, and {retries:.0f} allocations were tried again",
)
ALLOCATION_FAILED = EventKind(
    name="allocation-failed",
    meaning="An allocation failed, which ended the training.",
    values={"requested": "bytes requested; -1 if unknown", "used": "bytes in use; -1 if unknown"},
    text="{reason}",
)

# The monitor, the run directory and the training.

THINNED = EventKind(
    name="thinned",
    meaning="Sampled statistics are measured less often than before, to stay within `watch.budget`.",
    values={"factor": "times as many steps between samples", "budget": "fraction of the time"},
    text="to stay within watch.budget, sampled statistics are measured {factor:.0f} times less often",
)
NOT_SHOWN = EventKind(
    name="not-shown",
    meaning="Steps came faster than the outputs could show them.",
    values={"steps": "steps"},
    text="{steps:.0f} steps came faster than they could be shown; all of them are recorded",
)
EVENTS_DROPPED = EventKind(
    name="events-dropped",
    meaning="A history is full of events.",
    text="there were more than {limit} events; later events are not recorded",
)
LEFT_OUT = EventKind(
    name="left-out",
    meaning="A check or an output raised exceptions several times in a row, so the rest of the run is without it.",
    values={"detector": "1 if `gradwatch diagnose --redetect` repeats the check"},
    text="{part} ({reason})",
)
MEMORY_PLANNED = EventKind(
    name="memory-planned",
    meaning="The memory of a training step was planned, without running it.",
    values={"peak_bytes": "bytes"},
    text="the tensors of a step were planned to take {peak_bytes:,.0f} bytes",
)
INCIDENT = EventKind(
    name="incident",
    meaning="The state that reproduces a step was written.",
    text="{path} holds {content}",
)
NOT_RECORDED = EventKind(
    name="not-recorded",
    meaning="The state that would reproduce a step is not saved.",
    text="{reason}",
)
REWIND = EventKind(
    name="rewind",
    meaning="The training went back to an earlier state, or has done so as often as it may.",
    text="step {culprit}: {reason}{action}",
)
BATCH_LEFT_OUT = EventKind(
    name="batch-left-out",
    meaning="The training skips a batch from now on.",
    text="step {culprit}: {reason}; its batch is skipped from now on",
)

KINDS: Mapping[str, EventKind] = {kind.name: kind for kind in [*globals().values()] if isinstance(kind, EventKind)}
"""Every kind by its name."""

OLD_NAMES = {"tape-opponent": ADVERSARY.name}
OLD_PREFIX, PREFIX = "tape-", "graph-"
"""Names of kinds in runs and checkpoints of gradwatch 0.1, and the prefixes of the old and the new names."""


def read_event(data: Mapping[str, Any]) -> Event:
    """Return the event from the result of `Event.to_json`, with the present name of its kind."""
    kind: str = data["kind"]
    if kind.startswith(OLD_PREFIX):
        kind = OLD_NAMES.get(kind, PREFIX + kind.removeprefix(OLD_PREFIX))
    return Event.from_json({**data, "kind": kind})
