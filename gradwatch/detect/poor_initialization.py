"""GW203: weights drawn so large that every layer multiplies the signal."""

# L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect._edited import edited
from gradwatch.detect._scope import scopes
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, LayerInfo, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoorInitialization:
    """Weights drawn too large at step 0.

    What it measures: the gain of each linear and convolutional weight before the first update: the root mean square of
    its elements times the root of its fan-in, the factor by which it multiplies a signal of independent parts. 1 keeps
    the variance (Xavier), 1.41 does behind a ReLU (He), 0.58 is PyTorch's default. Layers with a normalisation right
    behind them are left out: it divides the gain away.

    Why it matters: gains multiply. Three layers of 17 make 5,000: logits and losses in the hundreds, saturated units,
    and thousands of steps that only undo it.

    When it is wrong: a first layer that is scaled up on purpose (sinusoidal networks, random features), or a trained
    network with sharp weights: one such layer alone is reported as info.

    What to do: kaiming_normal_ or kaiming_uniform_ for ReLU, xavier for tanh and sigmoid, or PyTorch's default, in the
    place of normal_ with standard deviation 1.

    Source: He et al. 2015, sec. 2.2, https://arxiv.org/abs/1502.01852; Glorot & Bengio 2010, sec. 4.2.1,
    https://proceedings.mlr.press/v9/glorot10a.html.

    Args:
        every: Steps between two looks. 10: only the first has a step 0 to look at.
        gain: Gain at which a layer counts as drawn too large. 4: the largest of 600 healthy runs was 1.6, trained
            networks among them; a standard normal weight of 16 inputs and more has 4.
        layers: How many such layers make a warning. 2: gains multiply.
    """

    code: ClassVar[str] = "GW203"
    kind: ClassVar[str] = "poor-initialization"
    every: int = 10
    gain: float = 4.0
    layers: int = 2

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module whose weights were drawn too large."""
        if history.step >= self.every or history.param.steps()[0] != 0:
            return
        gain_L = _gains(history)
        large = np.flatnonzero(gain_L >= self.gain)  # nan, for every other tensor, is not
        modules = {history.info.layers[i].module for i in large}
        severity = Severity.WARNING if len(modules) >= self.layers else Severity.INFO
        ill_L = np.array([layer.module in modules for layer in history.info.layers])
        for layer, group in scopes(history, ill_L, kind=self.kind):
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

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("two layers are drawn from N(0, 1)", _drawn(8.0, (3, 4)), ("layers.3.weight", "layers.4.weight"))
        yield Example("the whole model is", _drawn(8.0, None), (None,))
        yield Example("a healthy run", Synthetic(steps=20).history())
        yield Example("He initialisation, and a little more", _drawn(2.0, None))
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


def _drawn(gain: float, layers: tuple[int, ...] | None) -> History:
    """Return a run whose weights, 64 by 64, are drawn with some gain."""
    return edited(Synthetic(steps=20).history(), "weight.l2", gain * math.sqrt(64), layers=layers)
