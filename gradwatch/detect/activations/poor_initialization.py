"""GW203: weights and embeddings drawn so large or so small that they drown or lose the signal."""

# L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import CHANCE_EVENT
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import EMBEDDING_PRODUCT_EVENT, events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.scope import affected_modules, module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Finding, LayerInfo, Quantity, Severity

RECURRENT = ("GRU", "LSTM", "RNN")
"""How the names of recurrent modules begin."""

FOLLOWED = 5.0
"""Times that a loss follows the scale of one layer more than that of any other from which on it is that layer's."""

IMPOSSIBLE = 103.3
"""Loss in nats from which the probability of the right class is zero in float32, whose smallest number is 1.4e-45."""


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
    layers add up to it as well, and training mends it within some steps; a warning above 103.3 nats, where float32 has
    no probability left for the right class). Weights that were drawn about a number other than zero add up what their
    inputs have in common: their gain is that number times the fan-in. A matrix of a module of one's own counts where
    the tape says that the model multiplies by it. And the other side, in models without normalisation: hidden layers
    with gains below `faint`, where what the median weight gets of the gradient is `lost` decades below that of the
    output's bias; and nothing but matrices of zeros, of which each keeps the gradient from all others.

    Why it matters: gains multiply. Three layers of 17 make 5,000: logits and losses in the hundreds, saturated units,
    and thousands of steps that only undo it. A product of two embeddings from N(0, 1) over 48 dimensions has a standard
    deviation of 7, whatever is to be predicted.

    When it is wrong: a first layer that is scaled up on purpose (sinusoidal networks, random features), or a trained
    network with sharp weights: one such layer alone is reported as info, unless it is recurrent, and multiplies at
    each step of a sequence, or the first loss is a `surprise` too, or tells nothing, as that of a policy does, and a
    layer behind the first has the gain of `layers` in a row. Weights of zero that open a branch are left
    out, and so are small ones that a normalisation or a shortcut makes up for: the gradient shows it.

    What to do: kaiming_normal_ or kaiming_uniform_ for ReLU, xavier for tanh and sigmoid, or PyTorch's default, in the
    place of normal_ with standard deviation 1. `nn.Embedding` draws from N(0, 1): give those that are multiplied, or
    tied to the output, a standard deviation of 0.02 to 0.1.

    Source: He et al. 2015, sec. 2.2, https://arxiv.org/abs/1502.01852; Glorot & Bengio 2010, sec. 4.2.1,
    https://proceedings.mlr.press/v9/glorot10a.html; pytorch/pytorch#3121 on embeddings,
    https://github.com/pytorch/pytorch/issues/3121.

    Args:
        every: Steps between two looks. 10: only the first has a step 0 to look at.
        gain: Gain at which a layer counts as drawn too large. 4: healthy runs had 1.45 at most, the gain of He
            initialization, trained networks among them (`scripts/studies/false_alarms.py`); a standard normal weight
            of 16 or more inputs has 4.
        surprise: Loss of step 0, in units of log C, at which to report. 10: fresh networks that are fine had 1.5 at
            most, and a trained one that meets new labels is as sure of its old ones as its loss was low, a few units.
        faint: Gain below which a hidden layer was drawn too small. 0.1: a sixth of PyTorch's default; the 0.02 of GPT-2
            comes to 0.14 at a width of 48, and stands behind a normalisation.
        lost: Powers of ten by which the median weight's gradient is below that of the output's bias. 2.5: that gains of
            healthy networks are above it by 1.8 at most, and below it by 1 (`scripts/studies/false_alarms.py`).
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

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say which steps come after the first ones."""
        return ahead.steps_D >= self.every

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module whose weights were drawn too large."""
        if history.step >= self.every or history.param.steps()[0] != 0:
            return
        yield from self._copies(history)
        yield from self._closed(history)
        yield from self._faint(history)
        yield from self._large(history)
        yield from self._surprised(history)

    def _large(self, history: History) -> Iterator[Finding]:
        """Yield what was drawn too large."""
        embedding_L = _embedding_gains(history)
        gain_L = np.fmax(_gains(history), embedding_L)
        large = np.flatnonzero(gain_L >= self.gain)  # nan, for every other tensor, is not
        modules = {history.info.layers[i].module for i in large}
        is_alone = len(large) < self.layers and not any(_is_recurrent(history.info.layers[i]) for i in large)
        is_harmful = not is_alone or bool((embedding_L >= self.gain).any()) or self._surprise(history) >= self.surprise
        is_harmful |= math.isnan(self._surprise(history)) and self._is_worth_several(history, gain_L)
        severity = Severity.WARNING if is_harmful else Severity.INFO
        ill_L = np.array([layer.module in modules for layer in history.info.layers]) & ~(gain_L < self.gain)
        tables = [(history.info.layers[i].name, [int(i)]) for i in np.flatnonzero(embedding_L >= self.gain)]
        ill_L &= np.isnan(embedding_L)  # a table is named as such, also where the model has nothing else
        for layer, group in (*tables, *affected_modules(history, ill_L, kind=self.kind)):
            gain = float(np.fmax.reduce(gain_L[group]))
            most = module_of(history, group[int(np.nanargmax(gain_L[group]))])
            whole = "" if layer else f"the whole model was drawn too large, most of all {most}: "
            yield finding_of(
                self,
                history,
                f"{whole}{layer or most} was drawn with a gain of {gain:.1f} (1 to 1.4 keeps the signal)",
                Quantity(key="gain", value=gain),
                Quantity(key="init.large_layers", label="layers drawn too large", value=float(len(large))),
                Quantity(key="loss.step_0", label="loss at step 0", value=float(history.scalar("loss")[0])),
                layer=layer or most,
                severity=severity,
            )

    def _is_worth_several(self, history: History, gain_L: NDArray[np.float64]) -> bool:
        """Say whether a weight behind the first was drawn as large as `layers` of them in a row make it."""
        behind_M = structure_of(history).matrices.indices_M[1:]
        return bool((gain_L[behind_M] >= self.gain**self.layers).any())

    def _copies(self, history: History) -> Iterator[Finding]:
        """Yield the layers whose units are copies of each other."""
        for event in events_of(history, "weights-alike"):
            yield finding_of(
                self,
                history,
                f"{event.text} (in {event.layer})",
                Quantity(key="weight.std", label="deviation of the weights", value=0.0),
                layer=event.layer,
            )

    def _surprise(self, history: History) -> float:
        """Return the loss of step 0 in units of that of knowing nothing, nan where it has no unit."""
        for event in events_of(history, CHANCE_EVENT):
            return float(history.scalar("loss")[0]) / (event.values["nat"] * math.log(event.values["classes"]))
        return math.nan

    def _surprised(self, history: History) -> Iterator[Finding]:
        """Yield the run where its first loss is far above that of knowing nothing, and no layer is known to be why."""
        units = self._surprise(history)
        if not self.surprise <= units < math.inf or any(f.kind == self.kind for f in history.findings):
            return
        (event, *_) = events_of(history, CHANCE_EVENT)
        layer = _followed(history)
        whose = f", most of all that of {layer}" if layer else ""
        loss, nats = float(history.scalar("loss")[0]), units * math.log(event.values["classes"])
        yield finding_of(
            self,
            history,
            f"the loss of step 0 is {loss:.4g}, {units:.3g} times that of knowing nothing: scales are off{whose}",
            Quantity(key="loss.step_0", label="loss at step 0", value=loss),
            Quantity(
                key="loss.log_classes",
                label="logarithm of the number of classes",
                value=math.log(event.values["classes"]),
            ),
            layer=layer,
            severity=severity_after(history, self.kind) if nats > IMPOSSIBLE else Severity.INFO,
        )

    def _closed(self, history: History) -> Iterator[Finding]:
        """Yield the run where all matrices are zero: each keeps the gradient from all others."""
        structure, infos = structure_of(history), history.info.layers
        weight_M, grad_M = (
            history.param.window(name)[0, structure.matrices.indices_M] for name in ("weight.l2", "grad.l2")
        )
        if len(weight_M) < self.layers or weight_M.any() or grad_M.any() or not all(info.trainable for info in infos):
            return
        yield finding_of(
            self,
            history,
            "all weights begin at zero, and get no gradient: each keeps it from all others",
            Quantity(key="init.zero_matrices", label="matrices of zeros", value=float(len(weight_M))),
        )

    def _faint(self, history: History) -> Iterator[Finding]:
        """Yield the layers drawn so small that neither the signal nor its gradient comes through."""
        infos, structure = history.info.layers, structure_of(history)
        hidden_M = structure.matrices.indices_M[:-1]
        if structure.chain.output_bias is None or any("Norm" in info.module_type for info in infos):
            return
        gain_L = _gains(history)
        faint = [int(i) for i in hidden_M if 0 < gain_L[i] < self.faint]
        l2_L = history.param.newest("grad.l2")
        share = (
            float(median(l2_L[hidden_M]) / l2_L[structure.chain.output_bias]) if len(faint) >= self.layers else math.inf
        )
        if not share <= 10**-self.lost:
            return
        ill_L = np.isin([info.module for info in infos], [infos[i].module for i in faint])
        for layer, group in affected_modules(history, ill_L, kind=self.kind):
            gain = float(np.nanmin(gain_L[group]))
            yield finding_of(
                self,
                history,
                f"{layer or 'the whole model'} was drawn with a gain of {gain:.1g} (1 to 1.4 keeps the signal)",
                Quantity(key="gain", value=gain),
                Quantity(key="init.small_layers", label="layers drawn too small", value=float(len(faint))),
                Quantity(
                    key="init.median_by_output_bias",
                    label="gradient of the median weight by that of the output's bias",
                    value=share,
                ),
                layer=layer,
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("two layers are drawn from N(0, 1)", _drawn(8.0, (3, 4)), ("layers.3.weight", "layers.4.weight"))
        yield Example("the whole model is, evenly", _drawn(8.0, None), ("layers.0.weight",))
        yield Example("weights so small that the signal is lost", *_faint(gain=0.01, lost=4))
        yield Example("small weights, and a gradient that comes through", _faint(gain=0.05, lost=1)[0])
        yield Example("a first loss far above log C", _guessed(loss=40.0), (None,))
        yield Example("a first loss that float32 has no probability for", _guessed(loss=2e3), (None,))
        exponent = with_statistic(_guessed(loss=2e3), "grad.l2", 1e5, layers=(3,))
        yield Example("a first loss that is the exponential of what one layer gives", exponent, ("layers.3.weight",))
        yield Example("a trained network meets new labels", _guessed(loss=12.0))
        yield Example("weights drawn from 0 to 1 in a layer of one's own", *_one_sided(mean=0.5))
        yield Example("both weights of one module are", _one_sided(mean=0.5, is_one=True)[0], ("layers.3",))
        yield Example("factors of a matrix, drawn from 0 to 1", _one_sided(mean=0.5, inputs=4)[0])
        yield Example("all is zero", _zeros(*range(12)), (None,))
        yield Example("branches of zeros", _zeros(3, 5, 11))
        yield Example("the last layer of a policy has a gain of 100", _drawn(100.0, (11,)), ("layers.11.weight",))
        yield Example(
            "the first has, as random features do: for information", _drawn(100.0, (0,)), ("layers.0.weight",)
        )
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
    """Return the gain of each weight at the first step, nan where there is none to speak of.

    Of a weight that was drawn about a number other than zero it is that number times the inputs, for a signal whose
    parts have a sign in common, where that is more.
    """
    infos, l2_L = history.info.layers, history.param.window("weight.l2")[0]
    inputs_L = np.array([_fan_in(info) if _counts(infos, i) else math.nan for i, info in enumerate(infos)])
    for event in events_of(history, "tape-matrix"):
        weight = int(event.values["weight"])
        inputs_L[weight] = math.nan if _is_normalised(infos, weight) else event.values["inputs"]
    mean_L = np.zeros(len(infos))
    for event in events_of(history, "weights-offset"):
        mean_L[int(event.values["place"])] = abs(event.values["mean"])
    rms_L = l2_L / np.array([math.sqrt(max(1, math.prod(info.shape))) for info in infos])
    return np.asarray(np.fmax(rms_L * np.sqrt(inputs_L), mean_L * inputs_L), np.float64)


def _fan_in(info: LayerInfo) -> int:
    """Return how many inputs a weight adds up; of a transposed convolution, which has them first, at least so many."""
    inputs = math.prod(info.shape[1:])
    return max(inputs, info.shape[0]) if info.module_type.startswith("ConvTranspose") else inputs


def _followed(history: History) -> str | None:
    """Return the module whose scale the first loss follows more than that of any other, or None.

    The size of a weight times that of its gradient bounds what the loss changes by as the weight grows by a factor of
    e. Layers in a row that only multiply have about the same; one whose output is an exponent has far more.
    """
    infos = history.info.layers
    size_L = history.param.window("weight.l2")[0] * history.param.window("grad.l2")[0]
    by_module: dict[str, float] = {}
    for info, size in zip(infos, np.nan_to_num(size_L).tolist(), strict=True):
        by_module[info.module] = max(by_module.get(info.module, 0.0), size)
    *_, second, largest = sorted([0.0, 0.0, *by_module.values()])
    return module_of(history, int(np.nanargmax(size_L))) if second > 0 and largest >= FOLLOWED * second else None


def _counts(infos: tuple[LayerInfo, ...], i: int) -> bool:
    """Say whether a tensor is a weight that multiplies the signal, with nothing behind it that divides it again."""
    is_weight = len(infos[i].shape) >= 2 and infos[i].module_type.startswith(("Linear", "Conv", *RECURRENT))
    return is_weight and not _is_normalised(infos, i)


def _is_normalised(infos: tuple[LayerInfo, ...], i: int) -> bool:
    """Say whether the next module with parameters is a normalisation."""
    behind = next((other for other in infos[i + 1 :] if other.module != infos[i].module), None)
    return behind is not None and "Norm" in behind.module_type


def _is_recurrent(info: LayerInfo) -> bool:
    """Say whether a weight multiplies its own result, step after step of a sequence."""
    return info.module_type.startswith(RECURRENT) and "weight_hh" in info.name


def _embedding_gains(history: History) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the gain of each embedding that does a matrix's work at the first step, nan for every other tensor."""
    infos, l2_L = history.info.layers, history.param.window("weight.l2")[0]
    rms_L = np.array([float(l2) / math.sqrt(math.prod(info.shape)) for l2, info in zip(l2_L, infos, strict=True)])
    gain_L = np.full(len(infos), math.nan)
    for event in events_of(history, EMBEDDING_PRODUCT_EVENT):
        pair = [int(event.values["first"]), int(event.values["second"])]
        gain_L[pair] = np.fmax(gain_L[pair], math.prod(rms_L[pair]) * math.sqrt(event.values["dimension"]))
    for event in events_of(history, "tape-tied-embedding"):
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
    return with_statistic(made.history(), "weight.l2", gain * math.sqrt(64), layers=tuple(range(10))), made.names(
        range(10)
    )


def _guessed(*, loss: float) -> History:
    """Return a run over ten classes that begins at a loss."""
    made = Synthetic(steps=20)
    made.note(CHANCE_EVENT, values={"classes": 10.0, "nat": 1.0})
    made.loss_T[0] = loss
    return made.history()


def _one_sided(*, mean: float, inputs: int = 64, is_one: bool = False) -> tuple[History, tuple[str, ...]]:
    """Return a run of two weights of modules of one's own, or of one, drawn uniformly about a mean of 0.5."""
    made, weights = Synthetic(steps=20), (3, 4)
    infos = [replace(info, module_type="Dense") for info in made.info.layers]
    infos[4] = replace(infos[4], module=infos[3].module) if is_one else infos[4]
    made.info = replace(made.info, layers=tuple(infos))
    for i in weights:
        made.note("weights-offset", layer=infos[i].name, values={"place": i, "mean": mean})
        made.note("tape-matrix", layer=infos[i].name, values={"weight": i, "inputs": inputs})
    return with_statistic(made.history(), "weight.l2", 0.577 * 64, layers=weights), made.names(weights)


def _zeros(*closed: int) -> History:
    """Return a run of which some matrices begin at zero and get no gradient."""
    made = Synthetic(steps=20)
    made.grad_l2_TL[:, closed] = 0
    return with_statistic(made.history(), "weight.l2", 0.0, layers=closed)


def _drawn(gain: float, layers: tuple[int, ...] | None) -> History:
    """Return a run whose weights, 64 by 64, are drawn with some gain."""
    return with_statistic(Synthetic(steps=20).history(), "weight.l2", gain * math.sqrt(64), layers=layers)


def _multiplied(one: float, other: float, *, is_noted: bool = True) -> tuple[History, tuple[str, ...]]:
    """Return a run of two embeddings with some deviations, whose rows of 64 dimensions are multiplied."""
    made = Synthetic(steps=20, layers=2)
    infos = tuple(replace(info, module_type="Embedding") for info in made.info.layers)
    made.info = replace(made.info, layers=infos)
    if is_noted:
        made.note(EMBEDDING_PRODUCT_EVENT, values={"first": 0.0, "second": 1.0, "dimension": 64.0})
    return with_statistic(made.history(), "weight.l2", [[64 * one, 64 * other]]), made.names()
