"""Find attention whose logits have grown until its heads look at single keys (GW204)."""

# T = samples of the activations, A = activation modules

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of, subject
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

LOGIT, ENTROPY = "attention.max_logit", "attention.entropy"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCollapse:
    """Attention logits so large that heads look at single keys.

    What it measures: the largest logit of each attention, and the entropy of its heads, at a few queries.
    `qkv.attention` is the `scaled_dot_product_attention` after `qkv`.

    Why it matters: weights of exactly 0 and 1 have no gradient, so the head cannot change what it looks at. A few more
    steps in the same direction, and the loss rises: large models diverge where logits grow without bound.

    Example: `AdamW(gpt.parameters(), lr=3e-2)`, without a norm on queries and keys.

    What to do: lower the learning rate, or warm it up for longer. Normalize queries and keys before their product
    (QK-norm). Divide the product by the square root of its dimension.

    When it is wrong: a pretrained model whose heads are that sharp on purpose; it is info then.

    When it is withdrawn: logits are below `logit`, or the entropy is above `entropy`, in each of `recovered` samples in
    a row.

    How it is detected: the queries are the last 8 in each of 4 samples. The graph keeps queries and keys for the
    backward pass, so that attention in one kernel stays in one kernel. In successive sampled batches, the largest logit
    is at least `logit`, and the smallest entropy of a head is at most `entropy`. It is info if the logit has not grown
    by `growth` since the run began. Attention in compiled or checkpointed regions, and in kernels of other packages, is
    not seen.

    Source: Zhai et al. 2023 (entropy collapse), https://arxiv.org/abs/2303.06296; Dehghani et al. 2023 (growth of
    attention logits), sec. 2, https://arxiv.org/abs/2302.05442; Wortsman et al. 2023, sec. 3.1,
    https://arxiv.org/abs/2309.14322; the limit of 100: Kimi Team 2025 (QK-Clip), sec. 2.1,
    https://arxiv.org/abs/2507.20534.

    Args:
        every: Steps between two calls. 10: activations are sampled that often.
        logit: Largest logit at which to report. 100: the limit of QK-Clip; next to it, a logit of 0 has a weight of
            4e-44. Healthy small GPTs stay below 20 (`scripts/studies/lead_time.py`).
        entropy: Entropy, 0..1 of an even spread, at which to report. 0.25: large logits without a collapse, such as
            logits with a common offset, do no harm.
        samples: Successive samples that must agree. 2: two batches.
        growth: Factor on the first logit from which it is a warning. 2: a pretrained model keeps its logits.
        recovered: Samples in a row without the symptom that withdraw a finding. 5: a few may lack it by chance.
    """

    code: ClassVar[str] = "GW204"
    kind: ClassVar[str] = "attention-collapse"
    every: int = 10
    logit: float = 100.0
    entropy: float = 0.25
    samples: int = 2
    growth: float = 2.0
    recovered: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield one finding for the attentions whose heads have newly collapsed, the one with the largest logit first.

        Those whose logits have not grown are a finding of their own, for information.
        """
        if not history.info.activations or len(history.act.steps(self.samples)) < self.samples:
            return
        logit_A = history.act.newest(LOGIT)
        # the cheap check first: most models have no attention, whose row is nan
        if not np.fmax.reduce(logit_A) >= self.logit:
            return
        onsets = {a: self._onset(history, a) for a in np.flatnonzero(logit_A >= self.logit).tolist()}
        first_A = first_steps(history, LOGIT, 1)[0]
        for has_grown, severity in ((True, severity_after(history, self.kind)), (False, Severity.INFO)):
            known = {n for f in history.findings if f.kind == self.kind and f.severity >= severity for n in f.names}
            fresh = [
                a
                for a, onset in onsets.items()
                if onset is not None
                and (logit_A[a] >= self.growth * first_A[a]) == has_grown
                and history.info.activations[a].name not in known
            ]
            if fresh:
                fresh.sort(key=lambda a: -logit_A[a])
                onset = min(step for a in fresh if (step := onsets[a]) is not None)
                yield self._finding(history, fresh, onset=onset, first=float(first_A[fresh[0]]), severity=severity)

    def _finding(
        self, history: History, attentions: list[int], *, onset: int, first: float, severity: Severity
    ) -> Finding:
        """Return the finding of some attentions, with the numbers of the first one."""
        logit, entropy = (float(history.act.newest(name)[attentions[0]]) for name in (LOGIT, ENTROPY))
        names = tuple(history.info.activations[a].name for a in attentions)
        place = f" in {names[0]}" if len(names) > 1 else ""
        return finding_of(
            self,
            history,
            f"the heads of {subject(names)} look at single keys: the largest logit is {logit:.0f}{place}, "
            f"and the smallest entropy {100 * entropy:.0f} % of an even spread",
            Quantity(key=LOGIT, value=logit),
            Quantity(key=ENTROPY, value=entropy, unit="0..1"),
            Quantity(key="attention.first_logit", label="largest logit at the first sample", value=first),
            layers=names,
            severity=severity,
            onset=onset,
        )

    def _onset(self, history: History, activation: int) -> int | None:
        is_collapsed_T = self._is_collapsed(history, activation)
        return start_of_state(is_collapsed_T, history.act.steps(), least=self.samples)

    def _is_collapsed(self, history: History, activation: int) -> NDArray[np.bool_]:
        """Return at which samples of the window the heads are collapsed, of shape (T,); nan is not a collapse."""
        logit_T, entropy_T = (history.act.window(name)[:, activation] for name in (LOGIT, ENTROPY))
        return np.asarray((logit_T >= self.logit) & (entropy_T <= self.entropy))

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of `recovered` samples in a row without collapsed heads in any of the layers."""
        numbers = [history.act.layers.index(name) for name in finding.names if name in history.act.layers]
        if not numbers:
            return None
        is_collapsed_T = np.any([self._is_collapsed(history, a) for a in numbers], axis=0)
        end = start_of_state(~is_collapsed_T, history.act.steps(), least=self.recovered)
        return None if end is None else Recovery(end, "its heads looked at several keys again")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("logits grow until the heads collapse", _with(logit=300.0, entropy=0.02), ("acts.1",))
        all_ = Synthetic(steps=100, activations=3)
        for act, logit in enumerate((200.0, 300.0, 250.0)):
            all_.attention(act, logit=logit, entropy=0.02, onset=60)
        yield Example("logits grow in each layer", all_.history(), ("acts.0", "acts.1", "acts.2"))
        yield Example("heads are sharp from the start", _with(logit=120.0, entropy=0.1, onset=0), ("acts.1",))
        yield Example("a healthy run", _with(logit=8.0, entropy=0.7))
        yield Example("logits of a trained model", _with(logit=60.0, entropy=0.15))
        yield Example("large logits with a common offset", _with(logit=300.0, entropy=0.9))
        yield Example("heads that look at single keys, with ordinary logits", _with(logit=30.0, entropy=0.02))
        one = Synthetic(steps=100, activations=3).attention(1, logit=300.0, entropy=0.02, onset=60)
        one.max_logit_TA[70:] = 20.0
        yield Example("a single batch", one.history(until=80))


def _with(*, logit: float, entropy: float, onset: int = 60) -> History:
    made = Synthetic(steps=100, activations=3)
    return made.attention(1, logit=logit, entropy=entropy, onset=onset).history()
