"""Find weights and embeddings initialized so large or so small that the signal is lost (GW203)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.activations.poor_initialization_rules.equal_weights import find_equal_units, find_zero_weights
from gradwatch.detect.activations.poor_initialization_rules.first_loss import find_high_first_loss, find_large_outputs
from gradwatch.detect.activations.poor_initialization_rules.large_weights import find_large_weights
from gradwatch.detect.activations.poor_initialization_rules.small_weights import find_small_weights
from gradwatch.events import (
    CHANCE,
    EMBEDDING_PRODUCT,
    FIRST_OUTPUTS,
    MATRIX,
    WEIGHTS_ALIKE,
    WEIGHTS_OFFSET,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoorInitialization:
    """Weights or embeddings that are badly scaled at step 0.

    What it measures: the gain of each weight before the first update, the factor by which it multiplies a random
    signal; and the initial loss.

    Why it matters: gains multiply: three layers with a gain of 17 multiply by 5,000. Units saturate, and the first
    thousands of steps only undo the initialization.

    Example: `nn.init.normal_(fc.weight)`, which has a standard deviation of 1, instead of
    `nn.init.kaiming_normal_(fc.weight)`.

    What to do: use Kaiming initialization for ReLU, Xavier for tanh and sigmoid, or PyTorch's default. Initialize
    embeddings that are multiplied, or tied to the output, with a standard deviation of 0.02 to 0.1: `nn.Embedding` uses
    1.

    When it is wrong: a first layer that is scaled up on purpose (SIREN, random features); a trained network with large
    weights. One such layer alone is reported as info.

    How it is detected: (1) The gain of a linear or convolutional weight is `gain` or more. It is the root mean square
    of its elements times the root of its fan-in. 1 keeps the variance (Xavier), 1.41 does so after a ReLU (He), 0.58 is
    PyTorch's default. If the elements have a mean other than zero, the gain is the mean times the fan-in. Layers right
    before a normalization are left out. A matrix of a custom module counts if the autograd graph shows that the model
    multiplies by it. (2) Embeddings that the graph shows in the role of a matrix have such a gain: the product of both
    deviations times the root of the dimension if rows are multiplied, the deviation times that root for a tied output
    after a normalization. One layer alone makes a warning if it is recurrent, an embedding, or comes with a first loss
    that is a `surprise`; without a chance level, if it has the gain of `layers` in a row. (3) Two matrices in a row are
    each filled with one number, so that all units stay identical (Goodfellow et al. 2016, Deep Learning, sec. 8.4). (4)
    The loss of step 0, for a cross entropy of C classes, is far above log C. That is info, because training corrects it
    within some steps, and a warning above 103.3 nats, where float32 has no probability left for the right class. It
    names a layer on whose scale the loss depends `dominance` times as much as on any other. (5) In a
    model without normalization, hidden layers have gains below `faint`, and the gradient of the median weight is `lost`
    orders of magnitude below the gradient of the output's bias. (6) All matrices are zero, and at most one has a
    gradient, which biases bring. (7) The first outputs of a squared error are `excess` times as large as their
    targets.

    Exceptions to the rules: a first layer may be scaled up on purpose (sinusoidal networks, random features), and a
    trained network may have sharp weights. One such layer alone is reported as info. Weights of zero that open a branch
    are left out, and so are small weights that a normalization or a shortcut makes up for.

    Source: He et al. 2015, sec. 2.2, https://arxiv.org/abs/1502.01852; Glorot & Bengio 2010, sec. 4.2.1,
    https://proceedings.mlr.press/v9/glorot10a.html; pytorch/pytorch#3121 on embeddings,
    https://github.com/pytorch/pytorch/issues/3121.

    Args:
        every: Steps between two calls. 10: only the first call has a step 0 to inspect.
        gain: Gain at which a layer counts as too large. 4: healthy runs had 1.45 at most, the gain of He
            initialization, trained networks included (`scripts/studies/false_alarms.py`); a standard normal weight of
            16 or more inputs has 4.
        surprise: Loss of step 0, in units of log C, at which to report. 10: healthy fresh networks had 1.5 at most. A
            trained network that meets new labels is as sure of its old ones as its loss was low, which is a few units.
        faint: Gain below which a hidden layer counts as too small. 0.1: a sixth of PyTorch's default. The 0.02 of GPT-2
            is a gain of 0.14 at a width of 48, and is followed by a normalization.
        lost: Powers of ten by which the median weight's gradient is below that of the output's bias. 2.5: in healthy
            networks it is 1.8 above it to 1 below it (`scripts/studies/false_alarms.py`).
        layers: Number of such layers that makes a warning. 2: gains multiply. One embedding is enough, because its
            output is the prediction.
        dominance: Norm of a layer's weight times the norm of its gradient, in units of the next largest product, from
            which (4) names the layer. 5: layers in a row that only multiply have similar products.
        excess: Root mean square of the first outputs, in units of that of their targets, for (7). 100: with standard
            initializations and scaled data, outputs are no larger than a few units.
        size: Root mean square from which outputs are too large, for (7). 30: targets of small numbers are no fault of
            the weights.
    """

    code: ClassVar[str] = "GW203"
    kind: ClassVar[str] = "poor-initialization"
    every: int = 10
    gain: float = 4.0
    surprise: float = 10.0
    faint: float = 0.1
    lost: float = 2.5
    layers: int = 2
    dominance: float = 5.0
    excess: float = 100.0
    size: float = 30.0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module with badly scaled weights at step 0."""
        # step 0 alone shows the initialization; a resumed run has no step 0
        if history.step >= self.every or history.param.steps()[0] != 0:
            return
        # causes first: the high first loss is reported only if no layer explains it
        yield from find_equal_units(self, history)
        yield from find_zero_weights(self, history, layers=self.layers)
        yield from find_small_weights(self, history, faint=self.faint, lost=self.lost, layers=self.layers)
        yield from find_large_weights(self, history, gain=self.gain, layers=self.layers, surprise=self.surprise)
        yield from find_high_first_loss(self, history, surprise=self.surprise, dominance=self.dominance)
        yield from find_large_outputs(self, history, excess=self.excess, size=self.size)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example(
            "two layers are initialized from N(0, 1)", _drawn(8.0, (3, 4)), ("layers.3.weight", "layers.4.weight")
        )
        yield Example("all layers are initialized from N(0, 1)", _drawn(8.0, None), ("layers.0.weight",))
        yield Example("weights so small that the signal is lost", *_faint(gain=0.01, lost=4))
        yield Example("small weights, and a gradient that comes through", _faint(gain=0.05, lost=1)[0])
        yield Example("a first loss far above log C", _guessed(loss=40.0), (None,))
        yield Example("a first loss that float32 has no probability for", _guessed(loss=2e3), (None,))
        exponent = with_statistic(_guessed(loss=2e3), "grad.l2", 1e5, layers=(3,))
        yield Example("a first loss that is the exponential of one layer's output", exponent, ("layers.3.weight",))
        yield Example("a trained network meets new labels", _guessed(loss=12.0))
        yield Example("outputs of 3,000 for targets of 1", _sized(outputs=3e3, targets=1.0), (None,))
        yield Example("outputs of 1 for targets of 0.001", _sized(outputs=1.0, targets=1e-3))
        yield Example("outputs of 50 for targets of 5", _sized(outputs=50.0, targets=5.0))
        yield Example("weights initialized from 0 to 1 in a custom layer", *_one_sided())
        yield Example(
            "both weights of one custom layer, initialized from 0 to 1",
            _one_sided(is_one=True)[0],
            ("layers.3",),
        )
        yield Example("factors of a matrix, initialized from 0 to 1", _one_sided(inputs=4)[0])
        yield Example("all parameters are zero", _zeros(*range(12)), (None,))
        yield Example("all parameters but the biases are zero", _zeros(*range(12), reached=11), (None,))
        yield Example("branches of zeros", _zeros(3, 5, 11))
        yield Example("the last layer of a policy has a gain of 100", _drawn(100.0, (11,)), ("layers.11.weight",))
        yield Example(
            "the first layer of a policy has a gain of 100, as random features do: for information",
            _drawn(100.0, (0,)),
            ("layers.0.weight",),
        )
        yield Example("a healthy run", Synthetic(steps=20).history())
        yield Example("He initialization, and a little more", _drawn(2.0, None))
        yield Example("embeddings from N(0, 1) that are multiplied", *_multiplied(1.0, 1.0))
        copies = Synthetic(steps=20).add_event(WEIGHTS_ALIKE, layer="layers.3", text="all weights are equal")
        yield Example("deviations of random weights, as the argument of a softplus", _deviations())
        yield Example("units that are copies of each other", copies.history(), ("layers.3",))
        yield Example("embeddings that are multiplied, initialized for it", _multiplied(0.1, 0.1)[0])
        yield Example("embeddings from N(0, 1) that are looked up only", _multiplied(1.0, 1.0, is_noted=False)[0])
        grown = Synthetic(steps=60)
        grown.weight_l2_TL *= np.exp(0.05 * grown.t_T)[:, None]
        yield Example("weights that grow later", grown.history())


def _faint(*, gain: float, lost: float) -> tuple[History, tuple[str, ...]]:
    """Return a run in which ten layers start so small that their gradients are `lost` decades too small."""
    made = Synthetic(steps=20)
    bias = replace(made.info.layers[-1], name="layers.10.bias", module="layers.10", shape=(64,))
    made.info = replace(made.info, layers=(*made.info.layers[:-1], bias))
    made.grad_l2_TL[:, :-1] = made.grad_l2_TL[:, -1:] * 10**-lost
    return with_statistic(made.history(), "weight.l2", gain * math.sqrt(64), layers=tuple(range(10))), made.names(
        range(10)
    )


def _sized(*, outputs: float, targets: float) -> History:
    """Return a run of a squared error whose first outputs and targets have given sizes."""
    made = Synthetic(steps=10)
    return made.add_event(FIRST_OUTPUTS, values={"outputs": outputs, "targets": targets}).history()


def _guessed(*, loss: float) -> History:
    made = Synthetic(steps=20)
    made.add_event(CHANCE, values={"classes": 10.0, "nat": 1.0})
    made.loss_T[0] = loss
    return made.history()


def _one_sided(*, inputs: int = 64, is_one: bool = False) -> tuple[History, tuple[str, ...]]:
    """Return a run with two weights of custom modules, or of one module, that are uniform around 0.5."""
    made, weights = Synthetic(steps=20), (3, 4)
    infos = [replace(info, module_type="Dense") for info in made.info.layers]
    infos[4] = replace(infos[4], module=infos[3].module) if is_one else infos[4]
    made.info = replace(made.info, layers=tuple(infos))
    for i in weights:
        made.add_event(WEIGHTS_OFFSET, layer=infos[i].name, values={"place": i, "mean": 0.5})
        made.add_event(MATRIX, layer=infos[i].name, values={"weight": i, "inputs": inputs})
    return with_statistic(made.history(), "weight.l2", 0.577 * 64, layers=weights), made.names(weights)


def _deviations() -> History:
    """Return a run in which two tensors in layers of another library are all near -3, and are not weights."""
    made = Synthetic(steps=20)
    infos = list(made.info.layers)
    for i in (3, 4):
        name = infos[i].name.replace("weight", "rho_weight")
        infos[i] = replace(infos[i], name=name, module_type="LinearReparameterization")
        made.add_event(WEIGHTS_OFFSET, layer=name, values={"place": i, "mean": -3.0})
    made.info = replace(made.info, layers=tuple(infos))
    return with_statistic(made.history(), "weight.l2", 3.0 * 64, layers=(3, 4))


def _zeros(*closed: int, reached: int | None = None) -> History:
    """Return a run in which some matrices start at zero and get no gradient, but for one that may be reached."""
    made = Synthetic(steps=20)
    made.grad_l2_TL[:, [i for i in closed if i != reached]] = 0
    return with_statistic(made.history(), "weight.l2", 0.0, layers=closed)


def _drawn(gain: float, layers: tuple[int, ...] | None) -> History:
    return with_statistic(Synthetic(steps=20).history(), "weight.l2", gain * math.sqrt(64), layers=layers)


def _multiplied(one: float, other: float, *, is_noted: bool = True) -> tuple[History, tuple[str, ...]]:
    """Return a run that multiplies the rows, of 64 dimensions, of two embeddings with given deviations."""
    made = Synthetic(steps=20, layers=2)
    infos = tuple(replace(info, module_type="Embedding") for info in made.info.layers)
    made.info = replace(made.info, layers=infos)
    if is_noted:
        made.add_event(EMBEDDING_PRODUCT, values={"first": 0.0, "second": 1.0, "dimension": 64.0})
    return with_statistic(made.history(), "weight.l2", [[64 * one, 64 * other]]), made.names()
