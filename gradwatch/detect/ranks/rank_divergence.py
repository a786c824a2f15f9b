"""Find replicas of a model whose weights differ between the ranks (GW601)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of, subject
from gradwatch.detect.features.rank_states import Difference, gradients_differ, has_lasted, weights_differ
from gradwatch.events import RANK_MOMENTS_DIFFER, RANK_RATES_DIFFER, RANK_WEIGHTS_AGREE, RANK_WEIGHTS_DIFFER
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity, Severity

VALUES = {"rank": 1, "parameters": 12, "difference": 0.3}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankDivergence:
    """Replicas of a model whose weights differ between the ranks.

    What it measures: whether the norms of all weights are equal on all ranks, at the sampled steps.

    Why it matters: data parallelism averages gradients on the assumption that all ranks have the same weights. If the
    weights differ, the average is a gradient of no model, and only the weights of rank 0 are saved.

    Example: `dist.all_reduce(p.grad)` in each step, without `dist.broadcast(p.data, 0)` before the first one.

    What to do: broadcast parameters and buffers from rank 0 before the first step. Do not change weights on one rank
    only, as by loading a checkpoint on rank 0 after DDP wrapped the model. Load the state of the optimizer on all
    ranks: DDP does not broadcast it.

    When it is wrong: parameters that each rank has for itself on purpose, such as its experts.

    How it is detected: two norms of equal weights differ by a few rounding errors at most. The finding is reported if
    weights differ by more than 2e-6 at a sampled step and agree at no later sampled step. Weights that change
    between two updates on some ranks only, and a state that their optimizer loads, give the exact step. Weights that
    differ because gradients or learning rates do are reported as unsynchronized-gradient or rank-setting.

    Source: Li et al. 2020, "PyTorch Distributed", VLDB, https://arxiv.org/abs/2006.15704, sec. 3.

    Args:
        every: Steps between two checks. 10: weights are sampled as often.
        patience: Steps for which weights must differ. 20: two samples, so that a periodic average can show.
    """

    code: ClassVar[str] = "GW601"
    kind: ClassVar[str] = "rank-divergence"
    every: int = 10
    patience: int = 20

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the parameters whose weights differ."""
        found = weights_differ(history)
        if found is None or not has_lasted(history, found.since, self.patience):
            return
        gradients = gradients_differ(history)
        rates = [event for event in events_of(history, RANK_RATES_DIFFER) if event.step <= found.since]
        if rates or (gradients and gradients.since <= found.since):
            return
        if moments := next(events_of(history, RANK_MOMENTS_DIFFER), None):
            yield self._moments_finding(history, moments, found)
            return
        who = "the ranks" if found.rank is None else f"rank {found.rank} and the other ranks"
        yield finding_of(
            self,
            history,
            f"the weights of {subject(found.layers)} differ between {who}",
            *found.evidence(),
            layers=found.layers,
            severity=Severity.CRITICAL,
            onset=found.since,
        )

    def _moments_finding(self, history: History, moments: Event, found: Difference) -> Finding:
        # averaged gradients that agree leave equal moments, so another state of an optimizer came from outside
        rank = moments.values["rank"]
        return finding_of(
            self,
            history,
            f"{moments.text}, so equal gradients make different updates, and the weights drift apart",
            *([] if rank < 0 else [Quantity(key="rank", value=rank)]),
            Quantity(key="rank.moments", value=1.0, label="states of optimizers that differ"),
            *(quantity for quantity in found.evidence() if quantity.key != "rank"),
            severity=Severity.CRITICAL,
            onset=min(moments.step, found.since),
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        apart = Synthetic(steps=60).add_event(RANK_WEIGHTS_DIFFER, step=0, values=VALUES)
        yield Example("the initial weights were never broadcast", apart.history(), (None,))
        one = Synthetic(steps=60)
        one.add_event(RANK_WEIGHTS_AGREE, step=0)
        one.add_event(RANK_WEIGHTS_DIFFER, step=30, layer="layers.3.weight", values=VALUES | {"parameters": 1})
        yield Example("one parameter is changed on one rank", one.history(), ("layers.3.weight",))
        yield Example("a healthy run", Synthetic(steps=60).add_event(RANK_WEIGHTS_AGREE).history())
        averaged = Synthetic(steps=60)
        averaged.add_event(RANK_WEIGHTS_DIFFER, step=10, values=VALUES)
        averaged.add_event(RANK_WEIGHTS_AGREE, step=20)
        yield Example("the weights are averaged every 20 steps", averaged.history())
        late = Synthetic(steps=60).add_event(RANK_WEIGHTS_AGREE).add_event(RANK_WEIGHTS_DIFFER, step=50, values=VALUES)
        yield Example("the weights have differed for one sample only", late.history())
        loaded = Synthetic(steps=60).add_event(RANK_WEIGHTS_AGREE)
        loaded.add_event(RANK_MOMENTS_DIFFER, step=21, values={"rank": 1}, text=RANK_MOMENTS_DIFFER.text)
        loaded.add_event(RANK_WEIGHTS_DIFFER, step=22, values=VALUES)
        yield Example("one rank loads a state of its optimizer", loaded.history(), (None,))
        own = Synthetic(steps=60).add_event(RANK_WEIGHTS_AGREE)
        own.add_event(RANK_MOMENTS_DIFFER, step=21, values={"rank": -1}, text=RANK_MOMENTS_DIFFER.text)
        yield Example("the ranks share the state of an optimizer, and the weights agree", own.history())
        different = {"rank": 1, "group": 0, "rate": 1e-4, "usual": 1e-3}
        rates = Synthetic(steps=60).add_event(RANK_RATES_DIFFER, step=5, values=different)
        rates.add_event(RANK_WEIGHTS_DIFFER, step=10, values=VALUES)
        yield Example("learning rates that differ explain it", rates.history())
