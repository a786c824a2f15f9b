"""GW301: parameters that get gradients but are in no optimizer group, or never move."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import WINDOW, Floats, History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

UNREGISTERED = "parameters-unregistered"
"""Event of tensors that the model computes with and does not register."""

MOVED = "weights-moved"
"""Event of weights that change though no watched optimizer holds them."""

USUAL = 1e-5
"""Update/weight ratio that some tensor must have: where none has, the learning rate is too low for all."""

SMALL = 256
"""Elements of a tensor whose norm an update of any direction changes."""

ROUND = 1e-4
"""Distance from a number of one digit, in units of that digit, up to which it is that number: one in 5,000 is."""

VISIBLE = 2e-6
"""Update/weight ratio, by the root of the number of elements, that changes a norm by 30 roundings of float32."""

SEVERAL = 2
"""Such tensors that must agree."""

NEGLIGIBLE = 1e-4
"""Size of a gradient element, in units of the largest tensor's, below which it need not move anything.

The gradient of a bias that a normalisation cancels is rounding error, 7 decades below the others; where gradients
vanish over depth, an update that is lost in rounding is what follows, and not the illness.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotOptimized:
    """Parameters that get gradients and never move.

    What it measures: (1) trainable tensors with a gradient that no optimizer held when the monitor attached, unless
    they move: their update is measured and is not zero, or their sum or norm is another at step 1, 8, 10 and so on than
    it was at step 0 (another optimizer moves them, a master copy, or the loop by hand); so also those that were frozen
    then and get gradients now; (2) tensors that an optimizer holds, with a gradient and a learning rate, whose measured
    updates are exactly zero, one after the other, and whose norm stays what it was, while others' are not; (3)
    parameters on the tape of the loss that the model holds in a plain list, tuple or dict, or as a tensor that is no
    nn.Parameter, where `parameters()` does not see them, and that nothing has moved from step 0 to step 8; (4) updates
    that something takes back: between `samples` + 1 measurements the norms of all small tensors change by less than
    `kept` of a single update, though ten lie between two of them, or that of a tensor by nothing at all; (5) a group of
    which the rate is zero, while others move.

    Why it matters: the gradient is computed, shown and clipped like any other, and then thrown away.

    When it is wrong: a backbone left out on purpose without freezing it. Where what is left out, or has a rate of zero,
    comes first in the model and everything behind it is optimized, that is how fine-tuning a head looks: info, with the
    advice to freeze; but for a group that holds no parameter, which nobody makes on purpose, and where more than that
    is frozen: who freezes what is not to move has forgotten the rest. Weights that are clipped after each step, as
    those of a critic are, may all come to the bound, and are left out where that is a round number.

    What to do: build the optimizer after the last change to the model (a replaced head is the usual reason); compare
    the parameters of the groups with the model's; make sure that every tensor matches one rule of a grouping by name;
    keep layers in nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList.
    Look at what is done between two steps: a target network or an average that is copied the wrong way round.
    Updates that are lost in rounding need float32 master weights, or stochastic rounding.

    Source: pytorch/pytorch documentation of torch.optim ("construct the optimizer after moving or changing the
    model"), https://pytorch.org/docs/stable/optim.html; minGPT, `configure_optimizers`, which asserts it.

    Args:
        every: Steps between two looks. 10: updates are measured that often. What no optimizer holds is judged at the
            second look.
        samples: Measured updates in a row that must be zero for (2), or taken back for (4). 3: no accident.
        kept: Change of a norm between two measurements, in units of an update, for (4). 0.02: an update that points
            anywhere changes the norm of n numbers by one divided by the root of n of itself, 0.06 for 256.
    """

    code: ClassVar[str] = "GW301"
    kind: ClassVar[str] = "not-optimized"
    every: int = 10
    samples: int = 3
    kept: float = 0.02

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps no update was measured."""
        is_noted = any(event.kind == UNREGISTERED for event in ahead.history.events)
        if is_noted or structure_of(ahead.history).unowned:
            return np.zeros(len(ahead), np.bool_)
        ratio_DL = ahead.newest("update.ratio")
        return np.asarray(~((ratio_DL > USUAL) | (ratio_DL == 0)).any(axis=1), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that is not optimized."""
        yield from self._unregistered(history)
        shape = structure_of(history)
        ratio_L = history.param.newest("update.ratio")
        if (ratio_L > USUAL).any():
            measured = _measured(history, self.samples + 1)
            yield from self._taken_back(history, *measured)
            yield from self._put_back(history, *measured)
        yield from self._thawed(history, ratio_L)
        if not shape.unowned and np.count_nonzero(ratio_L > 0) >= shape.num_trainable:
            return
        if shape.unowned and history.step - history.param.steps()[0] >= self.every:  # by then it may have moved
            yield from self._left_out(history, ratio_L)
        if (ratio_L == 0).any():
            yield from self._stuck(history)

    def _unregistered(self, history: History) -> Iterator[Finding]:
        """Yield what the model computes with and does not know."""
        for event in events_of(history, UNREGISTERED):
            yield finding_of(
                self,
                history,
                f"{event.text}: nothing updates them",
                Quantity(key="tensors", value=event.values["tensors"]),
                layer=event.layer,
            )

    def _left_out(self, history: History, ratio_L: NDArray[np.floating]) -> Iterator[Finding]:
        moved_L = _moved_by_others(history)
        left = [i for i in structure_of(history).unowned if not moved_L[i]]
        left_L = np.zeros(len(ratio_L), np.bool_)
        left_L[left] = True
        left_L &= (history.param.newest("grad.l2") > 0) & ~(ratio_L > 0)
        held = [i for i, layer in enumerate(history.info.layers) if layer.group is not None or moved_L[i]]
        if not left:
            return
        if not held:
            severity, why = Severity.CRITICAL, "no optimizer holds any parameter of the model"
        elif empty := [event.text for event in history.events if event.kind == "group-empty"]:
            severity, why = Severity.WARNING, empty[0]
        elif _is_probe(history, left, held):
            severity, why = Severity.INFO, "everything behind it is: freeze it if that is meant"
        else:
            severity, why = Severity.WARNING, "no optimizer holds it"
        yield from self._findings(history, left_L, severity, f"gets gradients but is not optimized: {why}")

    def _thawed(self, history: History, ratio_L: NDArray[np.floating]) -> Iterator[Finding]:
        """Yield what is no longer frozen, and still held by no optimizer."""
        frozen = list(structure_of(history).frozen)
        if not frozen:
            return
        thawed_L = np.zeros(len(ratio_L), np.bool_)
        l2_TL = history.param.window("grad.l2", 2)[:, frozen]
        is_stale_L = (l2_TL == l2_TL[0]).all(axis=0)  # left from before it was frozen
        thawed_L[frozen] = (l2_TL[-1] > 0) & ~is_stale_L & (ratio_L[frozen] == 0)
        thawed_L &= _has_size(history) & ~_moved_by_others(history)
        why = "it was frozen when the optimizer was built, and has not been added since"
        told = f"gets gradients but is not optimized: {why}"
        yield from self._findings(history, thawed_L, Severity.WARNING, told, thawed=True)

    def _stuck(self, history: History) -> Iterator[Finding]:
        """Yield what an optimizer holds and does not move."""
        ratio_TL, norm_TL = _measured(history, self.samples)
        matrices_M = structure_of(history).matrices.indices_M
        usual_TM = ratio_TL[:, matrices_M] if len(matrices_M) else ratio_TL  # what began at zero moves by any rate
        if len(ratio_TL) < self.samples or not (usual_TM > USUAL).any(axis=1).all():
            return
        rate_G = np.array([np.fmax.reduce(history.scalar(f"lr.{g}")) for g in range(history.groups)])
        group_L = np.array([history.groups if la.group is None else la.group for la in history.info.layers])
        rate_L = np.append(rate_G, np.nan)[group_L]
        stuck_L = (ratio_TL == 0).all(axis=0) & (norm_TL == norm_TL[0]).all(axis=0)
        stuck_L &= _has_size(history) & ~_is_at_bounds(history)
        yield from self._findings(
            history,
            stuck_L & (rate_L > 0),
            severity_after(history, self.kind),
            "has a gradient and a learning rate but never moves",
        )
        is_first = not stuck_L.any() or np.flatnonzero(rate_L == 0).max(initial=-1) < np.argmax(rate_L > 0)
        severity = Severity.INFO if is_first else Severity.WARNING
        yield from self._findings(history, stuck_L & (rate_L == 0), severity, "gets gradients at a learning rate of 0")

    def _taken_back(self, history: History, ratio_TL: Floats, norm_TL: Floats) -> Iterator[Finding]:
        """Yield the run where updates are made and nothing comes of them."""
        small_L = structure_of(history).is_trainable_L & (structure_of(history).rms_scale_L <= SMALL**0.5)
        ratio_TL, norm_TL = ratio_TL[:, small_L], norm_TL[:, small_L]
        moved_L = (ratio_TL > USUAL).all(axis=0)
        if len(ratio_TL) <= self.samples or np.count_nonzero(moved_L) < SEVERAL:
            return
        change_TL = np.abs(np.diff(norm_TL[:, moved_L], axis=0)) / (ratio_TL * norm_TL)[:-1, moved_L]
        if not (change_TL < self.kept).all():
            return
        yield finding_of(
            self,
            history,
            "the weights are back after each update to what they were before: something overwrites them",
            Quantity(
                key="weight.l2.change_by_updates",
                label="largest change of a norm within ten steps, in updates",
                value=float(change_TL.max()),
            ),
            Quantity(key="update.ratio.median", label="update.ratio, median", value=float(np.nanmedian(ratio_TL[-1]))),
        )

    def _put_back(self, history: History, ratio_TL: Floats, norm_TL: Floats) -> Iterator[Finding]:
        """Yield what is before each update exactly as large as it was before all others, though each moves it."""
        back_L = (norm_TL == norm_TL[0]).all(axis=0)
        if len(ratio_TL) <= self.samples or not back_L.any():
            return
        back_L &= (ratio_TL > USUAL).all(axis=0)
        back_L &= ratio_TL.min(axis=0) > VISIBLE * structure_of(history).rms_scale_L
        if back_L.any():
            ill_L = back_L & ~_is_normed(history)
            yield from self._findings(
                history, ill_L, Severity.WARNING, "is back after each update to what it was before"
            )

    def _findings(
        self, history: History, ill_L: NDArray[np.bool_], severity: Severity, what: str, *, thawed: bool = False
    ) -> Iterator[Finding]:
        for layer, group in affected_modules(history, ill_L, kind=self.kind, thawed=thawed):
            yield finding_of(
                self,
                history,
                f"{layer or 'the whole model'} {what}",
                Quantity(key="tensors", value=float(len(group))),
                Quantity(
                    key="grad.l2.largest",
                    label="largest grad.l2",
                    value=float(history.param.newest("grad.l2")[group].max()),
                ),
                Quantity(
                    key="update.ratio", value=float(np.nan_to_num(history.param.newest("update.ratio")[group]).max())
                ),
                layer=layer,
                severity=severity,
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("a new head is in no group", _left_out(11, moves=False), ("layers.11.weight",))
        yield Example("what comes first was given as a generator that was used up", _used_up(), ("layers.0.weight",))
        yield Example("no parameter is", _left_out(*range(12), moves=False), (None,))
        yield Example("an update is lost in rounding", _stuck(4), ("layers.4.weight",))
        text = "the loss reaches 8 tensors in `convs`, a plain container that parameters() does not see"
        hidden = Synthetic(steps=20).note(UNREGISTERED, layer="convs", text=text, values={"tensors": 8.0})
        yield Example("layers are kept in a plain list", hidden.history(), ("convs",))
        yield Example("weights stop in the middle of a run", _stopped(at=0.123), ("layers.4.weight",))
        yield Example("all weights of a critic have come to the bound that they are clipped at", _stopped(at=0.01))
        yield Example("another model is copied over the trained one", _taken_back(kept=0.0), (None,))
        yield Example("so is an average that hardly follows it", _taken_back(kept=1e-4), (None,))
        yield Example("weights that move by what is updated", _taken_back(kept=0.2))
        yield Example("a pretrained layer is copied back after each step", _put_back(size=0.123), ("layers.4.weight",))
        yield Example("rows are put back on the unit sphere", _put_back(size=0.125))
        yield Example("a group in the middle has a rate of 0", _at_zero(6), ("layers.6.weight",))
        yield Example("the first layer has, as frozen ones do: for information", _at_zero(0), ("layers.0.weight",))
        yield Example("the model's own parameter is, which comes before all its layers", _own(), ("log_vars",))
        yield Example(
            "an adapter between frozen layers and the head is left out", _frozen(0, 1, 2), ("layers.3.weight",)
        )
        yield Example("a backbone is thawed and not added to the optimizer", _thawed(moves=False), ("layers.0.weight",))
        yield Example("it is added, too", _thawed(moves=True))
        yield Example("what was trained before it was frozen has its last gradient still", _stale())
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("somebody else moves it", _left_out(5, moves=True))
        yield Example("a loop moves all by hand, between two steps", _moved(0, 11))
        yield Example("so is what an optimizer holds, and does not move", _stuck(4, moves=True))
        yield Example("one of two is moved so, and the other never", _moved(11, 11, 5, 11), ("layers.5.weight",))
        skipped = Synthetic(steps=40, precision="fp16")
        skipped.skipped_T[:] = 1
        yield Example("updates that are skipped move nothing", skipped.history())


def _moved_by_others(history: History) -> NDArray[np.bool_]:
    """Say which tensors were seen to move though no watched optimizer holds them."""
    moved_L = np.zeros(len(history.info.layers), np.bool_)
    for event in history.events:
        if event.kind == MOVED:
            moved_L[int(event.values["first"]) : int(event.values["last"]) + 1] = True
    return moved_L


def _measured(history: History, count: int) -> tuple[Floats, Floats]:
    """Return `update.ratio` and `weight.l2` at the newest steps that measured them, at most so many: (T, L) each."""
    ratio_TL = history.param.window("update.ratio", min(16 * count, WINDOW))  # which mostly holds them
    known = np.flatnonzero(~np.isnan(ratio_TL).all(axis=1))
    if len(known) < count:
        ratio_TL = history.param.window("update.ratio")
        known = np.flatnonzero(~np.isnan(ratio_TL).all(axis=1))
    newest = known[-count:]
    return ratio_TL[newest], history.param.window("weight.l2", len(ratio_TL))[newest]


def _has_size(history: History) -> NDArray[np.bool_]:
    """Say which tensors have a gradient that is more than rounding error beside the largest."""
    size_L = history.param.newest("grad.l2") / structure_of(history).rms_scale_L
    return np.asarray(size_L > NEGLIGIBLE * np.fmax.reduce(size_L))


def _is_at_bounds(history: History) -> NDArray[np.bool_]:
    """Say which tensors have moved until each of their numbers was at a bound, as those of a clipped critic do.

    Then their root mean square is that bound, which is a round number.
    """
    has_moved_L = (history.param.window("update.ratio") > 0).any(axis=0)
    size_L = history.param.newest("weight.l2").astype(np.float64) / structure_of(history).rms_scale_L
    return np.asarray(has_moved_L & _is_round(size_L))


def _is_normed(history: History) -> NDArray[np.bool_]:
    """Say which tensors, or their rows or columns, have a norm that is a round number, as those kept on a sphere have.

    Then what is left of a norm is rounding error, whatever the weights do.
    """
    shapes = [(*info.shape, 1, 1) for info in history.info.layers]
    parts_3L = np.sqrt(
        [[1.0] * len(shapes), [float(shape[0]) for shape in shapes], [float(shape[1]) for shape in shapes]]
    )
    return np.asarray(_is_round(history.param.newest("weight.l2").astype(np.float64) / parts_3L).any(axis=0))


def _is_round(size: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Say which sizes are a number of one digit, up to `ROUND`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 10 ** np.floor(np.log10(size * (1 + ROUND)))
        return np.asarray(np.abs(size / unit - np.round(size / unit)) < ROUND)


def _is_probe(history: History, left: list[int], held: list[int]) -> bool:
    """Say whether what is left out may be meant to be frozen: it comes first, and nobody has frozen the most part."""
    infos = history.info.layers
    frozen = sum(math.prod(info.shape) for info in infos if not info.trainable)
    is_frozen_otherwise = frozen > sum(math.prod(infos[i].shape) for i in left)
    return max(left) < min(held) and not is_frozen_otherwise and not all(_is_own(history, i, held) for i in left)


def _is_own(history: History, tensor: int, held: list[int]) -> bool:
    """Say whether a tensor stands first for being the own parameter of a module that holds all the others."""
    module = history.info.layers[tensor].module
    return all(history.info.layers[i].module.startswith(f"{module}." if module else "") for i in held)


def _left_out(*layers: int, moves: bool) -> History:
    return _made_without(*layers, moves=moves).history()


def _moved(first: int, last: int, *left: int) -> History:
    """Return a run of which some layers are in no group, and those from the first to the last are seen to move."""
    made = _made_without(*(left or range(first, last + 1)), moves=False)
    return made.note(MOVED, step=1, values={"first": float(first), "last": float(last)}).history()


def _used_up() -> History:
    made = _made_without(0, moves=False)
    return made.note("group-empty", text="group 0 of the optimizer holds no parameter", values={"group": 0.0}).history()


def _made_without(*layers: int, moves: bool) -> Synthetic:
    made = Synthetic(steps=20)
    infos = tuple(replace(info, group=None) if i in layers else info for i, info in enumerate(made.info.layers))
    made.info = replace(made.info, layers=infos)
    made.update_factor_TL[:, layers] = float(moves)
    return made


def _frozen(*layers: int) -> History:
    """Return a run of which some layers are frozen and the next one is left out."""
    made = _made_without(max(layers) + 1, moves=False)
    infos = (replace(la, trainable=False, group=None) if i in layers else la for i, la in enumerate(made.info.layers))
    made.info = replace(made.info, layers=tuple(infos))
    made.grad_l2_TL[:, list(layers)] = np.nan
    return made.history()


def _thawed(*, moves: bool) -> History:
    """Return a run of which the first layer is frozen for half of its steps."""
    made = _made_without(0, moves=moves)
    made.info = replace(made.info, layers=(replace(made.info.layers[0], trainable=False), *made.info.layers[1:]))
    made.grad_l2_TL[:10, 0] = np.nan
    return made.history()


def _stale() -> History:
    """Return a run of which the first layer is frozen, with a gradient that stays as it was."""
    made = _made_without(0, moves=False)
    made.info = replace(made.info, layers=(replace(made.info.layers[0], trainable=False), *made.info.layers[1:]))
    made.grad_l2_TL[:, 0] = 0.125
    return made.history()


def _own() -> History:
    """Return a run in which no optimizer holds a parameter that belongs to the model as a whole."""
    made = _made_without(0, moves=False)
    own = replace(made.info.layers[0], name="log_vars", module="", shape=(2,))
    made.info = replace(made.info, layers=(own, *made.info.layers[1:]))
    return made.history()


def _taken_back(*, kept: float) -> History:
    """Return a run of small weights of whose updates a part is kept."""
    made = Synthetic(steps=60, width=16)
    made.weight_l2_TL = 4 * (1 + 1e-3 * kept * made.t_T[:, None] * np.ones((60, 12)))
    return made.history()


def _put_back(*, size: float) -> History:
    """Return a run in which a layer of 64 by 64 has that root mean square before each update; rows of norm 1: 0.125."""
    made = Synthetic(steps=60)
    made.weight_l2_TL = made.weight_l2_TL * np.exp(1e-3 * made.rng.standard_normal((60, 12)))
    made.weight_l2_TL[:, 4] = size * 64
    return made.history()


def _at_zero(layer: int) -> History:
    made = Synthetic(steps=60).own_rate(layer, factor=0.0)
    return _still(made, layer).history()


def _stopped(*, at: float) -> History:
    """Return a run in which a layer has moved until the root mean square of its weights was so much."""
    made = Synthetic(steps=60)
    made.update_factor_TL[20:, 4] = 0
    made.weight_l2_TL = made.weight_l2_TL * np.ones((60, 12))
    made.weight_l2_TL[20:, 4] = at * math.prod(made.info.layers[4].shape) ** 0.5
    return made.history()


def _stuck(layer: int, *, moves: bool = False) -> History:
    made = Synthetic(steps=60)
    made.update_factor_TL[:, layer] = 0
    return (made if moves else _still(made, layer)).history()


def _still(made: Synthetic, layer: int) -> Synthetic:
    """Leave the weights of a layer what they were."""
    made.weight_l2_TL[:, layer] = made.weight_l2_TL[0, layer]
    return made
