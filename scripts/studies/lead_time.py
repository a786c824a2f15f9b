"""Drive small GPTs unstable, and count how many steps before divergence each rule raises an alarm.

    python scripts/studies/lead_time.py --seeds 2 --jobs 2

A GPT of 4 blocks learns the characters of CPython's manual with AdamW, in ways that are known to be unstable: at a rate
that is too high, without warm-up, at a rate that rises; with and without a norm on queries and keys. Healthy twins have
the same seeds and usual rates. Divergence is the first step from which the median of 16 losses is half a nat above the
lowest median before it, or a loss is not finite. All rules see the same losses and gradient norms of the same runs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradwatch
from gradwatch.data import text
from gradwatch.models import gpt
from gradwatch.records import Finding, Severity

CONTEXT, BATCH, STEPS = 32, 8, 300
MEDIAN_STEPS, RISE_NATS = 16, 0.5
WORSE_NATS = 0.2  # distance of the last 50 losses from the better healthy twin, at which a rate was too high


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train.

    Args:
        peak: Learning rate after the warm-up.
        warm_up: Steps over which the rate rises to the peak in equal increments.
        growth: Factor on the rate of every step.
        normalized: Whether queries and keys are normalized.
        is_healthy: Whether the way is known to be stable.
    """

    peak: float
    warm_up: int = 0
    growth: float = 1.0
    normalized: bool = False
    is_healthy: bool = False

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.peak * min(1.0, (step + 1) / max(self.warm_up, 1)) * self.growth**step


RISING = 1000 ** (1 / STEPS)  # from 1e-3 to 1
WAYS = {
    "rate of 0.03": Way(peak=3e-2, warm_up=100),
    "rate of 0.03, QK-norm": Way(peak=3e-2, warm_up=100, normalized=True),
    "rate of 0.03, no warm-up": Way(peak=3e-2),
    "rate of 1 after 150 steps": Way(peak=1.0, warm_up=150),
    "rate that rises to 1": Way(peak=1e-3, growth=RISING),
    "rate that rises to 1, QK-norm": Way(peak=1e-3, growth=RISING, normalized=True),
    "healthy, 0.001": Way(peak=1e-3, warm_up=40, is_healthy=True),
    "healthy, 0.001, no warm-up": Way(peak=1e-3, is_healthy=True),
    "healthy, 0.003": Way(peak=3e-3, warm_up=40, is_healthy=True),
    "healthy, 0.003, QK-norm": Way(peak=3e-3, warm_up=40, normalized=True, is_healthy=True),
}


@dataclass(slots=True, kw_only=True)
class Course:
    """What a run showed at each step.

    Args:
        loss, norm: Loss, and total gradient norm.
        residual: Root mean square of the output of the last block, of the median token.
        log_z: Root mean square of log Z of the logits.
        update_rms: RMS of gradient over second moment, of the token embedding (arXiv:2304.13013, sec. 3.4).
        findings: Findings of gradwatch at warning or above.
        max_logit, entropy: Largest attention logit and smallest entropy over the blocks and sampled steps.
    """

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    log_z: list[float] = field(default_factory=list)
    update_rms: list[float] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    max_logit: float = math.nan
    entropy: float = math.nan


class NormalizedAttention(nn.Module):
    """The attention of `gradwatch.models.gpt`, with queries and keys normalized as in arXiv:2302.05442."""

    def __init__(self, attention: gpt.Attention) -> None:
        super().__init__()
        self.qkv, self.projection, self.heads = attention.qkv, attention.projection, attention.heads
        size = attention.projection.in_features // attention.heads
        self.query_norm, self.key_norm = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output of each position over itself and earlier positions."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = self.query_norm(query), self.key_norm(key)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        gathered: Tensor = self.projection(y.transpose(1, 2).flatten(2))
        return gathered


def train(name: str, seed: int, *, is_default: bool = False) -> Course:
    """Train one way from one seed under `watch`.

    Args:
        name: Key of `WAYS`.
        seed: Of weights and batches.
        is_default: Whether weights begin as torch initializes them, instead of as in GPT-2.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    way, splits, course = WAYS[name], text.build(context=CONTEXT, stride=1), Course()
    model = _default_gpt(splits.spec.outputs) if is_default else gpt.build(splits.spec, layers=4, heads=4, width=64)
    blocks = [block for block in model.modules() if isinstance(block, gpt.Block)]
    for block in blocks if way.normalized else ():
        block.attention = NormalizedAttention(block.attention)  # type: ignore[assignment]  # another class
    optimizer = torch.optim.AdamW(model.parameters(), lr=way.peak, betas=(0.9, 0.95), weight_decay=0.1)
    outputs: list[Tensor] = []
    blocks[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    monitor = gradwatch.watch(
        model, optimizer, on_finding=course.findings.append, schedule=gradwatch.Schedule(budget=0)
    )
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = way.rate(step)
        inputs, targets = splits.train.batch(torch.randint(len(splits.train), (BATCH,)))  # type: ignore[attr-defined, arg-type]  # a dataset of windows
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        course.loss.append(loss.item())
        course.norm.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        course.residual.append(float(outputs.pop().square().mean(-1).sqrt().median()))
        course.log_z.append(_rms(logits.detach().logsumexp(-1)))
        course.update_rms.append(_update_rms(optimizer, model.get_parameter("token.weight"), step))
        optimizer.step()
        monitor.step(loss, batch=inputs)
        if not math.isfinite(course.loss[-1]):
            break
    monitor.close()
    course.findings = [f for f in course.findings if f.severity >= Severity.WARNING]
    course.max_logit = float(np.nanmax(monitor.history["attention.max_logit"]))
    course.entropy = float(np.nanmin(monitor.history["attention.entropy"]))
    return course


def _default_gpt(vocabulary: int) -> nn.Module:
    """Return the same model with the weights that torch draws."""
    blocks = [gpt.Block(64, heads=4, dropout=0.0) for _ in range(4)]
    model = gpt.GPT(blocks, width=64, context=CONTEXT, vocabulary=vocabulary, dropout=0.0)
    model.head.weight = model.token.weight
    return model


def _train(key: tuple[str, int], *, is_default: bool) -> Course:
    return train(*key, is_default=is_default)


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def _update_rms(optimizer: torch.optim.AdamW, param: Tensor, step: int) -> float:
    state = optimizer.state.get(param)
    if not state or param.grad is None:
        return math.nan
    second = state["exp_avg_sq"] / (1 - 0.95**step)
    return _rms(param.grad / second.sqrt().clamp_min(1e-8))


def divergence(course: Course) -> int | None:
    """Return the step of divergence, or None if the run did not diverge."""
    loss_T = np.nan_to_num(course.loss, nan=math.inf)
    if not np.isfinite(loss_T).all():
        return int(np.argmin(np.isfinite(loss_T)))
    median_T = np.median(np.lib.stride_tricks.sliding_window_view(loss_T, MEDIAN_STEPS), axis=1)
    best_T = np.minimum.accumulate(median_T)
    above = np.flatnonzero(median_T[MEDIAN_STEPS:] > best_T[:-MEDIAN_STEPS] + RISE_NATS)
    return int(above[0]) + MEDIAN_STEPS if len(above) else None


def olmo(course: Course) -> int | None:
    """Return the first step that OLMo-core's `SkipStepOptimizer` skips: 6 sigma over 128 losses or gradient norms."""
    for t in range(63, len(course.loss)):
        for values in (course.loss, course.norm):
            past = np.array(values[max(0, t - 128) : t])
            if not abs(values[t] - past.mean()) <= 6 * past.std(ddof=1):
                return t
    return None


def zclip(course: Course) -> int | None:
    """Return the first step that ZClip clips: a norm 2.5 deviations above its moving average, after 25 steps."""
    mean, variance = float(np.mean(course.norm[:25])), float(np.var(course.norm[:25]))
    for t in range(25, len(course.norm)):
        if not (course.norm[t] - mean) / math.sqrt(variance) <= 2.5:
            return t
        mean = 0.97 * mean + 0.03 * course.norm[t]
        variance = 0.97 * variance + 0.03 * (course.norm[t] - mean) ** 2
    return None


def llm_foundry(course: Course) -> int | None:
    """Return the first step at which llm-foundry's `KillLossSpike` would end the run, at its defaults."""
    window: deque[float] = deque(maxlen=100)
    outliers = 0
    for t, loss in enumerate(course.loss):
        if len(window) == 100:
            outliers = outliers + 1 if not loss < 2 * np.mean(window) else 0
            if outliers > 4 or (t >= 200 and sum(value > 10 for value in window) >= 50):
                return t
        window.append(loss)
    return None


def _found(course: Course, kind: str | None = None) -> int | None:
    return min((f.step for f in course.findings if kind in (None, f.kind)), default=None)


def _above(course: Course, name: str, bound: float) -> int | None:
    """Return the second of two samples in a row, every 10 steps, at or above a bound."""
    return _second([value >= bound for value in getattr(course, name)[::10]])


def _grown(course: Course, factor: float) -> int | None:
    """Return the second of two samples in a row with a residual stream that is a factor above its first sample."""
    return _above(course, "residual", factor * course.residual[0])


def _accelerated(course: Course, factor: float) -> int | None:
    """Return the same for a factor on the sample at half as many steps, from step 80 on."""
    sampled = course.residual[::10]
    return _second([i >= 8 and value >= factor * sampled[i // 2] for i, value in enumerate(sampled)])


def _second(is_high: Sequence[bool]) -> int | None:
    return next((10 * i for i in range(1, len(is_high)) if is_high[i - 1] and is_high[i]), None)


RULES: dict[str, Callable[[Course], int | None]] = {
    "**gradwatch, all kinds**": _found,
    "gradwatch, attention-collapse": partial(_found, kind="attention-collapse"),
    "gradwatch, all other kinds": lambda c: min(
        (f.step for f in c.findings if f.kind != "attention-collapse"), default=None
    ),
    "OLMo-core, 6 sigma over 128 steps": olmo,
    "ZClip, 2.5 deviations": zclip,
    "llm-foundry, twice the mean loss of 100 steps, 5 times": llm_foundry,
    "no finding: residual stream, RMS of 20": partial(_above, name="residual", bound=20.0),
    "no finding: residual stream, 150-fold": partial(_grown, factor=150.0),
    "no finding: residual stream, 1,000-fold": partial(_grown, factor=1000.0),
    "no finding: residual stream, 10-fold since half as many steps": partial(_accelerated, factor=10.0),
    "no finding: update RMS of the embedding, 2.3": partial(_above, name="update_rms", bound=2.3),
    "no finding: log Z, 10": partial(_above, name="log_z", bound=10.0),
}


def table(courses: dict[tuple[str, int], Course]) -> str:
    """Return the table of all rules."""
    end = {key: float(np.mean(course.loss[-50:])) for key, course in courses.items()}
    best = {seed: min(end[k] for k in courses if k[1] == seed and WAYS[k[0]].is_healthy) for _, seed in courses}
    broken = {key: divergence(course) for key, course in courses.items()}
    healthy = [k for k in courses if WAYS[k[0]].is_healthy]
    diverged = {k: step for k, step in broken.items() if step is not None and k not in healthy}
    worse = [k for k in courses if k not in healthy and k not in diverged and end[k] > best[k[1]] + WORSE_NATS]
    lines = [
        f"| rule | alarm before divergence, of {len(diverged)} | median lead, steps | alarm in runs that only learn "
        f"worse, of {len(worse)} | at step, median | healthy runs with an alarm, of {len(healthy)} |",
        "|---|---|---|---|---|---|",
    ]
    for name, rule in RULES.items():
        at = {key: rule(course) for key, course in courses.items()}
        leads = [step - alarm for k, step in diverged.items() if (alarm := at[k]) is not None and alarm < step]
        late = [alarm for k in worse if (alarm := at[k]) is not None]
        false = sum(at[k] is not None for k in healthy)
        lines.append(f"| {name} | {len(leads)} | {_median(leads)} | {len(late)} | {_median(late)} | {false} |")
    return "\n".join(lines)


def _median(values: Sequence[int]) -> str:
    return f"{np.median(values):g}" if values else ""


def _line(key: tuple[str, int], course: Course) -> str:
    kinds = ", ".join(f"{f.kind} {f.step}" for f in course.findings[:4])
    return (
        f"{key[0]:32} {key[1]:3} ends at {np.mean(course.loss[-50:]):6.2f}, diverges at {divergence(course)}, "
        f"logit {course.max_logit:.0f}, entropy {course.entropy:.2f}, residual {max(course.residual):.0f}: {kinds}"
    )


def main() -> None:
    """Train all ways from all seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each way")
    parser.add_argument("--first", type=int, default=10, help="first seed")
    parser.add_argument("--default-weights", action="store_true", help="begin as torch initializes, not as GPT-2 does")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    keys = [(name, seed) for seed in range(args.first, args.first + args.seeds) for name in WAYS]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        courses = {}
        for key, course in zip(keys, pool.imap(partial(_train, is_default=args.default_weights), keys), strict=True):
            courses[key] = course
            print(_line(key, course), flush=True)
    print(table(courses))


if __name__ == "__main__":
    main()
