"""Find a layer with a gradient frozen at zero, or at a tiny value, while other layers learn (GW103)."""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import is_ascended, reads_padding
from gradwatch.detect.features.finding import finding_of, findings_of
from gradwatch.detect.features.recovery import start_of_state, tensors_of
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.detect.gradients.dead_layer_rules.annealed import is_annealed
from gradwatch.detect.gradients.dead_layer_rules.cliff import find_cliffs, gap_below_median
from gradwatch.detect.gradients.dead_layer_rules.collapsed_router import (
    UNUSED,
    CollapsedRouter,
    describe_router,
    find_collapsed_routers,
    used_experts_since,
)
from gradwatch.detect.gradients.dead_layer_rules.ended_task import is_ended_task
from gradwatch.detect.gradients.dead_layer_rules.examples import (
    make_annealed,
    make_collapsed_router,
    make_faded,
    make_routed,
    make_zero_input,
)
from gradwatch.detect.gradients.dead_layer_rules.experts import comes_and_goes, live_frac_of_siblings, router_of
from gradwatch.detect.gradients.dead_layer_rules.faded import find_faded
from gradwatch.detect.gradients.dead_layer_rules.frozen import find_frozen
from gradwatch.detect.gradients.dead_layer_rules.unused_latent import NATS, find_unused_latent, newest_read
from gradwatch.detect.gradients.dead_layer_rules.zero_input import find_zero_inputs
from gradwatch.events import ASCENDED, LATENT_UNUSED, LATENT_USED, PARAMETERS_JOINED, SIDE_BY_SIDE
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

ROUTER_SYMPTOMS = frozenset({"saturated-activation"})
"""Symptoms of a collapsed router with a softmax in its tails: they do not explain its dead experts."""


def _gaps(history: History, group: list[int]) -> Floats:
    """Return how far a group's largest gradient element is below the median matrix, in powers of ten, at each step.

    The gap is infinite if the group has no gradient, and nan if no matrix has one.
    """
    l2_TL = history.param.window("grad.l2")
    top_T = np.fmax.reduce(l2_TL[:, group] / structure_of(history).rms_scale_L[group], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap_T: Floats = np.log10(median(matrix_rms(history, l2_TL).T) / np.nan_to_num(top_T))
    return gap_T


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLayer:
    """One layer that no longer gets a gradient while other layers learn.

    What it measures: the gradient of each layer: exactly zero after it was not, or several orders of magnitude below
    the median layer.

    Why it matters: the layer no longer learns, and its features stay as they are.

    Example: `torch.sigmoid(gate - 20) * branch(x)`, whose gate is closed.

    What to do: check what multiplies the layer: a gate with an extreme bias, a frozen normalization scale of zero, a
    saturated activation, units that died after a large step. For a router, add a load-balancing loss and a router
    z-loss, or a bias on its choice that follows the load; lower its learning rate.

    When it is wrong: a branch whose gate opens late; an expert that is rarely chosen (info). See no-gradient for
    gradients that are None.

    When it is withdrawn: the layer had a gradient, at most `decades` - 1 below the median layer, for 20 steps in a row;
    a router used more experts in each of 5 samples in a row; a latent carried information again.

    How it is detected: (1) Frozen tensors: their gradient was not zero before, and is exactly zero at each of the
    newest `steps` steps. More than half of the others have a gradient. (2) Tiny matrices: their gradient per element
    (root mean square, median over the window) is `decades` below the median of all weight matrices. On one side a cliff
    of `decades` - 1 leads to the next layer. Vanishing gradients are as small, but have a slope and no cliff. (3)
    Layers out of use: the steps at which a layer has a gradient, None or not, get rarer from third to third, and for
    `gone` steps there was none. A rate of stochastic depth that rises to 1 does so. (4) Routers: at all samples of
    `gone` steps or more, with `tokens` tokens per expert, the same experts got no token, more than `unused` of them. A
    router is a product with a matrix whose largest or gathered outputs weight the outputs of other matrices; names play
    no part. Routers in compiled or checkpointed regions are not seen, nor those that weight experts by a mask or
    `einsum`. (5) Zero inputs: at each of the newest `steps` steps, the bias of a layer has a gradient, and its weight
    has none, although it had one before. Nor has most of the model. (6) Latents: all deviations of the latent of a
    variational autoencoder are close to those of the prior, so that it carries at most 0.2 nats about a sample.

    Exceptions to the rules: a branch whose gate starts near zero and opens late. An expert that is hardly ever chosen
    comes and goes (info), until it has been away for longer than chance explains (a share of the error budget). The
    autograd graph may show modules that are built alike side by side, as experts are. A dead one is for information
    until half of them are dead. Then the router has collapsed, however confident its softmax is, and if its choice is
    watched, it is named in one finding with its experts. A gradient that is None from one step to the next is a choice
    of the training loop and does not count here (see no-gradient). A layer that loses its gradient when other
    parameters join the model and its optimizer is a head that waits for its task (info): a penalty on its weights gives
    it zeros. So is a layer whose part of the loss is annealed: its gradient shrinks evenly until it is zero. If all
    layers go to zero together, the loss is zero: a hinge that is satisfied, or a fit without noise.
    A parameter of an optimizer with `maximize=True`, while others minimize, is the multiplier of a constraint: its
    gradient vanishes where the constraint holds.

    Source: Bowman et al. 2016, https://arxiv.org/abs/1511.06349, sec. 3.1, and Lucas et al. 2019,
    https://arxiv.org/abs/1911.02469, on latents that are not used; Huang et al. 2016, https://arxiv.org/abs/1603.09382,
    sec. 3, on rates of stochastic depth; Srivastava et al. 2015, "Highway networks", sec. 2.2 on gate biases,
    https://arxiv.org/abs/1505.00387; He et al. 2015, https://arxiv.org/abs/1502.01852, sec. 2.2 on how much gradients
    differ between healthy layers; Shazeer et al. 2017, https://arxiv.org/abs/1701.06538, sec. 4, on routers that
    converge to the same few experts; Fedus et al. 2021, https://arxiv.org/abs/2101.03961, sec. 2.2, and Zoph et al.
    2022, https://arxiv.org/abs/2202.08906, on losses that balance experts and keep the logits of a router small.

    Args:
        every: Steps between two checks. 10: half of `steps`.
        steps: Newest steps that must all show it. 20: zero-initialized branches have warmed up by then.
        gone: Newest steps without a gradient for (3), and without a token for (4). 40: twice `steps`, as the layer came
            and went before.
        unused: Share of the experts, 0..1, above which a router that sends them no token has collapsed; below it,
            experts without a gradient are for information. 0.5: with half of its experts, a mixture still chooses.
        tokens: Tokens per expert in the samples of (4). 32: an expert with a tenth of an even share is missed in 4 % of
            cases, and half of all experts together in far fewer.
        decades: Gap in powers of ten. 5: healthy layers stayed within 1.6 (`scripts/studies/false_alarms.py`); a
            float32 update 5 orders of magnitude smaller than its neighbors' is negligible.
        matrices: Minimum number of weight matrices for (2). 3: of two, either may be the odd one.
        faded_steps: Minimum number of kept steps up to the last gradient, for (3). 48: 16 for each third.
        faded_first_share: Minimum share of the steps of the first third with a gradient, 0..1, for (3). 0.5: a layer
            that is used less was rare from the start.
        faded_last_ratio: Maximum share of the last third, in units of the share of the first, for (3). 0.5: it is
            used half as often before it is gone.
        annealed: Maximum ratio of the last four gradients to those 16 to 24 steps earlier, of a layer whose part of the
            loss was annealed. 0.3: a linear schedule has 0.12.
        recovered: Samples in a row, with more experts in use, after which a router's finding is withdrawn. 5: a few may
            have them by chance.
        patience: Steps from the start that a latent has to learn something, for (6). 150: latents of digits had begun
            to by then, and stayed at the prior for the first 20 to 60 steps.
    """

    code: ClassVar[str] = "GW103"
    kind: ClassVar[str] = "dead-layer"
    every: int = 10
    steps: int = 20
    gone: int = 40
    unused: float = 0.5
    tokens: int = 32
    decades: float = 5.0
    matrices: int = 3
    faded_steps: int = 48
    faded_first_share: float = 0.5
    faded_last_ratio: float = 0.5
    annealed: float = 0.3
    recovered: int = 5
    patience: int = 150

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that has stopped learning."""
        faded = find_faded(
            history,
            kind=self.kind,
            every=self.every,
            gone=self.gone,
            steps=self.faded_steps,
            first_share=self.faded_first_share,
            last_ratio=self.faded_last_ratio,
        )
        yield from findings_of(self, history, faded)
        yield from findings_of(self, history, find_zero_inputs(history, kind=self.kind, steps=self.steps))
        yield from findings_of(self, history, find_unused_latent(history, patience=self.patience))
        collapsed = find_collapsed_routers(history, steps=self.gone, fraction=self.unused, tokens=self.tokens)
        yield from (self._of_router(history, router) for router in collapsed)
        newest_L = history.param.newest("grad.l2")
        rms_M = matrix_rms(history, newest_L)
        if not len(rms_M) or rms_M.min() > rms_M.max() * 10**-self.decades or not rms_M.any():  # False for nan
            return
        # the window is read only if the newest step looks suspicious
        l2_TL = history.param.window("grad.l2", self.steps)
        if len(l2_TL) < self.steps:
            return
        affected_L = find_cliffs(history, l2_TL, decades=self.decades, matrices=self.matrices)
        affected_L |= find_frozen(history, newest_L, steps=self.steps)
        structure = structure_of(history)
        # a bias alone may lose its gradient; skipped updates have no gradient worth reading
        if not affected_L[structure.matrices.indices_M].any() or (history.scalar("skipped", self.steps) == 1).any():
            return
        usual = float(median(newest_L[structure.is_trainable_L]))
        for layer, group in affected_modules(history, affected_L, kind=self.kind):
            # no layer learns, or a constraint holds: another fault, or success; padding is that of vanishing-gradient
            if layer is None or reads_padding(history, layer) or is_ascended(history, layer):
                continue
            largest = float(np.fmax.reduce(l2_TL[:, group], axis=None))
            severity = self._severity(history, layer, group, is_zero=largest == 0)
            router = router_of(history, layer) if largest == 0 and severity > Severity.INFO else None
            if router is not None:  # the router's fault, not that of each expert
                yield self._of_router(history, describe_router(history, router, steps=self.steps))
                continue
            what = "no longer gets any gradient" if largest == 0 else "gets almost no gradient"
            yield finding_of(
                self,
                history,
                f"{layer} {what} while other layers learn",
                Quantity(key="grad.l2.largest", label=f"largest grad.l2 in {self.steps} steps", value=largest),
                Quantity(key="grad.l2.median", label="median grad.l2 of all tensors", value=usual),
                Quantity(
                    key="dead_layer.gap_decades",
                    label="median gradient / gradient of this layer",
                    value=gap_below_median(history, l2_TL, group),
                    unit="orders of magnitude",
                ),
                layer=layer,
                severity=severity,
                onset=start_of_state(_gaps(history, group) >= self.decades - 1, history.param.steps()),
            )

    def _of_router(self, history: History, found: CollapsedRouter) -> Finding:
        severity, layers = severity_after(history, self.kind, but=ROUTER_SYMPTOMS), (found.router, *found.experts)
        return finding_of(
            self, history, found.message, *found.evidence, layers=layers, severity=severity, onset=found.since
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of `steps` steps in a row with a usual gradient, or of some samples with more experts."""
        if any(quantity.key == UNUSED for quantity in finding.evidence):
            end = used_experts_since(history, finding, least=self.recovered)
            return None if end is None else Recovery(end, "more experts got tokens")
        if any(quantity.key == NATS for quantity in finding.evidence):
            event = newest_read(history)
            is_used = event is not None and event.kind == LATENT_USED.name
            return Recovery(event.step, event.text) if event is not None and is_used else None
        usual_T = _gaps(history, tensors_of(history, finding)) < self.decades - 1
        end = start_of_state(usual_T, history.param.steps(), least=self.steps)
        return None if end is None else Recovery(end, "it got a gradient again")

    def _severity(self, history: History, layer: str, group: list[int], *, is_zero: bool) -> Severity:
        """Return the harm of a dead module: none if its task or part of the loss is over, or if it is not chosen."""
        is_over = is_zero and is_annealed(history, group, ratio=self.annealed, decades=self.decades)
        if is_over or (is_zero and is_ended_task(history, group)):
            return Severity.INFO
        # experts without a gradient say nothing while most of their siblings have one
        live_frac = live_frac_of_siblings(history, layer, history.param.newest("grad.l2"))
        if is_zero and (comes_and_goes(history, group, every=self.every) or (live_frac or 0) > 1 - self.unused):
            return Severity.INFO
        return severity_after(history, self.kind, but=frozenset() if live_frac is None else ROUTER_SYMPTOMS)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        zero = Synthetic(steps=120).dead(5, onset=60)
        yield Example("a layer goes to zero at step 60", zero.history(), zero.names(5))
        tiny = Synthetic(steps=80).dead(5, onset=0, level=1e-9)
        yield Example("a gate lets next to nothing through, from the start", tiny.history(), tiny.names(5))
        tiny.add_event(ASCENDED, layer=tiny.names(5)[0], text="moved up the gradient")
        yield Example("a multiplier has next to no gradient, as its constraint holds", tiny.history())
        faded = make_faded(until=100)
        yield Example("a block is skipped more and more, and then always", faded.history(), faded.names(5))
        yield Example("a block is skipped more and more, but not always", make_faded(until=180).history())
        yield Example("a task with a layer of its own is over", make_faded(until=90, fades=False).history())
        yield Example("a healthy run", Synthetic(steps=120).history())
        yield Example(
            "gradients that vanish towards the input have no cliff", Synthetic(steps=80).vanishing(decades=12).history()
        )
        yield Example(
            "a weak layer, a thousandth of the others", Synthetic(steps=80).dead(5, onset=0, level=1e-4).history()
        )
        expert = Synthetic(steps=120).dead(5, onset=60)
        expert.grad_l2_TL[20:60:7, 5] = 0
        yield Example("an expert that was chosen now and then is no longer chosen", expert.history(), expert.names(5))
        routed = (
            Synthetic(steps=120).dead(5, onset=60).add_event(SIDE_BY_SIDE, layer="layers", values={"modules": 12.0})
        )
        yield Example(
            "one of twelve experts is no longer chosen, from one step to the next", routed.history(), routed.names(5)
        )
        collapsed = make_collapsed_router()
        yield Example("nine of ten experts are no longer chosen", collapsed.history(), collapsed.names(range(2, 11)))
        yield Example("a router sends no token to 40 of 64 experts", make_routed(unused=40).history(), ("gate",))
        yield Example("a router sends no token to ten of 64 experts", make_routed(unused=10).history())
        yield Example(
            "a router sends no token to 40 of 64 experts in the first 30 steps",
            make_routed(unused=40, onset=0, end=30).history(),
        )
        yield Example(
            "a router sends no token to 40 of 64 experts, in batches of 64 tokens",
            make_routed(unused=40, tokens=1).history(),
        )
        values = {"nats": 0.002, "dimensions": 8.0}
        unused = Synthetic(steps=200).add_event(LATENT_UNUSED, step=40, layer="layers.5", values=values, text="it does")
        yield Example("a decoder ignores its latent", unused.history(), ("layers.5",))
        unused.add_event(LATENT_USED, step=120, layer="layers.5", values=values, text="the latent carries 2 nats")
        yield Example("a latent is read late", unused.history())
        task = Synthetic(steps=120).dead(11, onset=57)
        task.add_event(PARAMETERS_JOINED, step=60, values={"tensors": 2, "since": 50})
        yield Example("a head for the next task joins: for information", task.history(), task.names(11))
        over = make_annealed()
        yield Example("the weight of an auxiliary loss falls to 0: for information", over.history(), over.names(11))
        closed = make_zero_input()
        yield Example("dropout that rises to 1, before the last layer", closed.history(), closed.names(10))
        hinge = Synthetic(steps=120)
        hinge.grad_l2_TL[60:] = 0
        yield Example("the loss is zero, and with it every gradient", hinge.history())
        yield Example(
            "a layer without gradient from the start is no-gradient",
            Synthetic(steps=80).no_gradient(5, zero=True).history(),
        )
