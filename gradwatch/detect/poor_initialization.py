"""GW203: weights and embeddings drawn so large or so small that they drown or lose the signal."""

# L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect._depth import depth
from gradwatch.detect._edited import edited
from gradwatch.detect._noted import noted
from gradwatch.detect._robust import median
from gradwatch.detect._scope import scopes
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, LayerInfo, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoorInitialization:
    """Weights, or what they multiply, badly scaled at step 0.

    What it measures: the gain of each linear and convolutional weight before the first update: the root mean square of
    its elements times the root of its fan-in, the factor by which it multiplies a signal of independent parts. 1 keeps
    the variance (Xavier), 1.41 does behind a ReLU (He), 0.58 is PyTorch's default. Layers with a normalisation right
    behind them are left out: it divides the gain away. Embeddings count where the tape says that they do a matrix's
    work: rows of two that are multiplied and summed over d dimensions, with a gain of both deviations times the root of
    d; one that is the output layer too, behind a normalisation, with its deviation times the root of d. And, before the
    first step, whether two matrices in a row are each filled with one number: then all units get the same gradient, and
    stay copies of each other (Goodfellow et al. 2016, Deep Learning, sec. 8.4). Where the tape says that the loss is
    the cross entropy of C classes, the loss of step 0: who knows nothing has log C, and what is above it by far was
    sure of the wrong class before it had seen any, by weights or inputs that are too large (info: shortcuts over many
    layers add up to it as well, and training mends it within some steps). And the other side, in models without
    normalisation: hidden layers with gains below `faint`, where what the median weight gets of the gradient is `lost`
    decades below that of the output's bias.

    Why it matters: gains multiply. Three layers of 17 make 5,000: logits and losses in the hundreds, saturated units,
    and thousands of steps that only undo it. A product of two embeddings from N(0, 1) over 48 dimensions has a standard
    deviation of 7, whatever is to be predicted.

    When it is wrong: a first layer that is scaled up on purpose (sinusoidal networks, random features), or a trained
    network with sharp weights: one such layer alone is reported as info. Weights of zero that open a branch are left
    out, and so are small ones that a normalisation or a shortcut makes up for: the gradient shows it.

    What to do: kaiming_normal_ or kaiming_uniform_ for ReLU, xavier for tanh and sigmoid, or PyTorch's default, in the
    place of normal_ with standard deviation 1. `nn.Embedding` draws from N(0, 1): give those that are multiplied, or
    tied to the output, a standard deviation of 0.02 to 0.1.

    Source: He et al. 2015, sec. 2.2, https://arxiv.org/abs/1502.01852; Glorot & Bengio 2010, sec. 4.2.1,
    https://proceedings.mlr.press/v9/glorot10a.html; pytorch/pytorch#3121 on embeddings,
    https://github.com/pytorch/pytorch/issues/3121.

    Args:
        every: Steps between two looks. 10: only the first has a step 0 to look at.
        gain: Gain at which a layer counts as drawn too large. 4: healthy runs had 1.45 at most, that of He, trained
            networks among them (`scripts/study_healthy.py`); a standard normal weight of 16 inputs and more has 4.
        surprise: Loss of step 0, in units of log C, at which to report. 10: fresh networks that are fine had 1.5 at
            most, and a trained one that meets new labels is as sure of its old ones as its loss was low, a few units.
        faint: Gain below which a hidden layer was drawn too small. 0.1: a sixth of PyTorch's default; the 0.02 of GPT-2
            comes to 0.14 at a width of 48, and stands behind a normalisation.
        lost: Powers of ten by which the median weight's gradient is below that of the output's bias. 2.5: that gains of
            healthy networks are above it by 1.8 at most, and below it by 1 (`scripts/study_healthy.py`).
        layers: How many such layers make a warning. 2: gains multiply. Of embeddings one will do: what they give is
            the prediction.
    """

    code: ClassVar[str] = "GW203"
    kind: ClassVar[str] = "poor-initialization"
    every: int = 10
    gain: float = 4.0
    surprise: float = 10.0
    faint: float = 0.1
    lost: float = 2.5
    layers: int = 2

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module whose weights were drawn too large."""
        if history.step >= self.every or history.param.steps()[0] != 0:
            return
        yield from self._copies(history)
        yield from self._surprised(history)
        yield from self._faint(history)
        embedding_L = _embedding_gains(history)
        gain_L = np.fmax(_gains(history), embedding_L)
        large = np.flatnonzero(gain_L >= self.gain)  # nan, for every other tensor, is not
        modules = {history.info.layers[i].module for i in large}
        is_harmful = len(modules) >= self.layers or bool((embedding_L >= self.gain).any())
        severity = Severity.WARNING if is_harmful else Severity.INFO
        ill_L = np.array([layer.module in modules for layer in history.info.layers])
        tables = [(history.info.layers[i].name, [int(i)]) for i in np.flatnonzero(embedding_L >= self.gain)]
        ill_L &= np.isnan(embedding_L)  # a table is named as such, also where the model has nothing else
        for layer, group in (*tables, *scopes(history, ill_L, kind=self.kind)):
            gain = float(np.fmax.reduce(gain_L[group]))
            yield Finding(
                code=self.code,
                kind=self.kind,
                layer=layer,
                step=history.step,
                severity=severity,
                message=f"{layer or 'the whole model'} was drawn with a gain of {gain:.1f} (1 to 1.4 keeps the signal)",
                evidence=(
                    Quantity(name="gain", value=gain),
                    Quantity(name="layers drawn too large", value=float(len(modules))),
                    Quantity(name="loss at step 0", value=float(history.scalar("loss")[0])),
                ),
            )

    def _copies(self, history: History) -> Iterator[Finding]:
        """Yield the layers whose units are copies of each other."""
        for event in noted(history, "weights-alike"):
            yield Finding(
                code=self.code,
                kind=self.kind,
                layer=event.layer,
                step=history.step,
                severity=Severity.WARNING,
                message=f"{event.text} (in {event.layer})",
                evidence=(Quantity(name="deviation of the weights", value=0.0),),
            )

    def _surprised(self, history: History) -> Iterator[Finding]:
        """Yield the run where its first loss is far above that of knowing nothing."""
        loss = float(history.scalar("loss")[0])
        for event in noted(history, "tape-classes"):
            units = loss / (event.values.get("nat", math.nan) * math.log(event.values["classes"]))
            if not self.surprise <= units < math.inf:  # also where no unit is known
                continue
            yield Finding(
                code=self.code,
                kind=self.kind,
                layer=None,
                step=history.step,
                severity=Severity.INFO,
                message=f"the loss of step 0 is {loss:.4g}, {units:.3g} times that of knowing nothing: scales are off",
                evidence=(
                    Quantity(name="loss at step 0", value=loss),
                    Quantity(name="logarithm of the number of classes", value=math.log(event.values["classes"])),
                ),
            )

    def _faint(self, history: History) -> Iterator[Finding]:
        """Yield the layers drawn so small that neither the signal nor its gradient comes through."""
        infos, shape = history.info.layers, depth(history)
        hidden_M = shape.matrices_M[:-1]
        if shape.output_bias is None or any("Norm" in info.module_type for info in infos):
            return
        gain_L = _gains(history)
        faint = [int(i) for i in hidden_M if 0 < gain_L[i] < self.faint]
        l2_L = history.param.newest("grad.l2")
        share = float(median(l2_L[hidden_M]) / l2_L[shape.output_bias]) if len(faint) >= self.layers else math.inf
        if not share <= 10**-self.lost:
            return
        ill_L = np.isin([info.module for info in infos], [infos[i].module for i in faint])
        for layer, group in scopes(history, ill_L, kind=self.kind):
            gain = float(np.nanmin(gain_L[group]))
            yield Finding(
                code=self.code,
                kind=self.kind,
                layer=layer,
                step=history.step,
                severity=Severity.WARNING,
                message=f"{layer or 'the whole model'} was drawn with a gain of {gain:.1g} (1 to 1.4 keeps the signal)",
                evidence=(
                    Quantity(name="gain", value=gain),
                    Quantity(name="layers drawn too small", value=float(len(faint))),
                    Quantity(name="gradient of the median weight by that of the output's bias", value=share),
                ),
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("two layers are drawn from N(0, 1)", _drawn(8.0, (3, 4)), ("layers.3.weight", "layers.4.weight"))
        yield Example("the whole model is", _drawn(8.0, None), (None,))
        yield Example("weights so small that the signal is lost", *_faint(gain=0.01, lost=4))
        yield Example("small weights, and a gradient that comes through", _faint(gain=0.05, lost=1)[0])
        yield Example("a first loss far above log C", _guessed(loss=40.0), (None,))
        yield Example("a trained network meets new labels", _guessed(loss=12.0))
        yield Example("a healthy run", Synthetic(steps=20).history())
        yield Example("He initialisation, and a little more", _drawn(2.0, None))
        drawn = (1.0, 1.0)
        yield Example("embeddings from N(0, 1) that are multiplied", *_multiplied(*drawn))
        copies = Synthetic(steps=20).note("weights-alike", layer="layers.3", text="all weights are equal")
        yield Example("units that are copies of each other", copies.history(), ("layers.3",))
        yield Example("embeddings that are multiplied, drawn for it", _multiplied(0.1, 0.1)[0])
        yield Example("embeddings from N(0, 1) that are looked up only", _multiplied(*drawn, is_noted=False)[0])
        grown = Synthetic(steps=60)
        grown.weight_l2_TL *= np.exp(0.05 * grown.t_T)[:, None]
        yield Example("weights that grow later are no initialisation", grown.history())


def _gains(history: History) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the gain of each weight at the first step, nan where there is none to speak of."""
    l2_L = history.param.window("weight.l2")[0]
    infos = history.info.layers
    return np.array([_gain(infos[i], float(l2_L[i])) if _counts(infos, i) else math.nan for i in range(len(infos))])


def _counts(infos: tuple[LayerInfo, ...], i: int) -> bool:
    """Say whether a tensor is a weight that multiplies the signal, with nothing behind it that divides it again."""
    info = infos[i]
    behind = next((other for other in infos[i + 1 :] if other.module != info.module), None)
    is_normalised = behind is not None and "Norm" in behind.module_type
    return len(info.shape) >= 2 and info.module_type.startswith(("Linear", "Conv")) and not is_normalised


def _gain(info: LayerInfo, l2: float) -> float:
    """Return the root mean square of a weight's elements times the root of its fan-in."""
    return l2 / math.sqrt(math.prod(info.shape)) * math.sqrt(math.prod(info.shape[1:]))


def _embedding_gains(history: History) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the gain of each embedding that does a matrix's work at the first step, nan for every other tensor."""
    infos, l2_L = history.info.layers, history.param.window("weight.l2")[0]
    rms_L = np.array([float(l2) / math.sqrt(math.prod(info.shape)) for l2, info in zip(l2_L, infos, strict=True)])
    gain_L = np.full(len(infos), math.nan)
    for event in noted(history, "tape-embedding-product"):
        pair = [int(event.values["first"]), int(event.values["second"])]
        gain_L[pair] = np.fmax(gain_L[pair], math.prod(rms_L[pair]) * math.sqrt(event.values["dimension"]))
    for event in noted(history, "tape-tied-embedding"):
        if event.values["normalised"]:
            weight = int(event.values["weight"])
            gain_L[weight] = rms_L[weight] * math.sqrt(event.values["dimension"])
    return gain_L


def _faint(*, gain: float, lost: float) -> tuple[History, tuple[str, ...]]:
    """Return a run of a network whose first ten layers are drawn so small that their gradients are `lost` decades."""
    made = Synthetic(steps=20)
    bias = replace(made.info.layers[-1], name="layers.10.bias", module="layers.10", shape=(64,))
    made.info = replace(made.info, layers=(*made.info.layers[:-1], bias))
    made.grad_l2_TL[:, :-1] = made.grad_l2_TL[:, -1:] * 10**-lost
    return edited(made.history(), "weight.l2", gain * math.sqrt(64), layers=tuple(range(10))), made.names(range(10))


def _guessed(*, loss: float) -> History:
    """Return a run over ten classes that begins at a loss."""
    made = Synthetic(steps=20)
    made.note("tape-classes", layer=made.names(11)[0], values={"samples": 32.0, "classes": 10.0, "nat": 1.0})
    made.loss_T[0] = loss
    return made.history()


def _drawn(gain: float, layers: tuple[int, ...] | None) -> History:
    """Return a run whose weights, 64 by 64, are drawn with some gain."""
    return edited(Synthetic(steps=20).history(), "weight.l2", gain * math.sqrt(64), layers=layers)


def _multiplied(one: float, other: float, *, is_noted: bool = True) -> tuple[History, tuple[str, ...]]:
    """Return a run of two embeddings with some deviations, whose rows of 64 dimensions are multiplied."""
    made = Synthetic(steps=20, layers=2)
    infos = tuple(replace(info, module_type="Embedding") for info in made.info.layers)
    made.info = replace(made.info, layers=infos)
    if is_noted:
        made.note("tape-embedding-product", values={"first": 0.0, "second": 1.0, "dimension": 64.0})
    return edited(made.history(), "weight.l2", [[64 * one, 64 * other]]), made.names()
