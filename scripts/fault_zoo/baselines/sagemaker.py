"""Amazon SageMaker Debugger's built-in rules, with the published default parameters.

Sources
  [doc]   "List of Debugger Built-in Rules", awsdocs/amazon-sagemaker-developer-guide,
          doc_source/debugger-built-in-rules.md
          (default values and, in the later edition, one sample configuration per rule)
  [lib]   awslabs/sagemaker-debugger, smdebug/pytorch/hook.py: gradients come from a hook on each parameter (so they are
          those of one backward, before clipping and unscaling), inputs and outputs from module forward hooks, losses
          as scalars; docs/analysis.md: "the rule evaluation ends when the rule evaluation condition is met"
  [cfg]   awslabs/sagemaker-debugger-rulesconfig, rule_config_jsons/ruleConfigs.json

The code of the managed rules is not public; each rule below is written from its description.

Choices
  * A rule fires once per run, at its first step, and then names every tensor that met the condition at that step.
  * [cfg] saves tensors every 500 steps. The zoo's runs have 60 to 600 steps, so tensors are saved at every step
    (`attach`), or every tenth (`attach_every10`, nearer to the published density of saved steps per run).
  * `attach_course` is the set used all over AWS's own course material: VanishingGradient, Overfit, Overtraining,
    PoorWeightInitialization, LossNotDecreasing.
  * `attach_tensor_rules` leaves out those that go by the loss or by the first steps, which fire on nearly every short
    run:
    VanishingGradient, ExplodingTensor, SaturatedActivation, DeadRelu, WeightUpdateRatio, AllZero.
  * Left out, as they need labels, predictions, a second run or XGBoost, or have no default thresholds:
    ClassImbalance, Confusion, SimilarAcrossRuns, StalledTraining, TensorVariance, CheckInputImages, NLPSequenceRatio.
  * Rules have no severity: all findings are "warning".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scripts.fault_zoo.baselines.common import Baseline, finite, units, watch_gradients, watch_modules

VANISHING = 1e-7  # [doc] VanishingGradient.threshold
UPDATE_LARGE, UPDATE_SMALL, UPDATE_EPS = 10.0, 1e-8, 1e-9  # [doc] WeightUpdateRatio
INACTIVE_PERCENT, LAYER_PERCENT = 1.0, 50.0  # [doc] DeadRelu and SaturatedActivation
TANH, SIGMOID = (-9.4999, 9.4999), (-23.0, 16.99999)  # [doc] SaturatedActivation
INIT_RATIO, INIT_RANGE, INIT_PATIENCE, INIT_STEPS = 10.0, 0.001, 5, 10  # [doc] PoorWeightInitialization
LOSS_STEPS, LOSS_PERCENT, LOSS_RISE_PERCENT = 10, 0.1, 5.0  # [doc] LossNotDecreasing
OVERFIT_RATIO, OVERFIT_PATIENCE = 0.1, 1  # [doc] Overfit
TRAIN_PATIENCE, VAL_PATIENCE, OVER_DELTA = 5, 10, 0.01  # [doc] Overtraining (later edition; 0.1 in the first)
UNCHANGED_STEPS, RTOL, ATOL = 3, 1e-5, 1e-8  # [doc] UnchangedTensor
ALL_ZERO_PERCENT = 100.0  # [doc] AllZero.threshold


def percentiles(g: Any) -> Any:
    g = g.flatten()
    if g.numel() > 65536:
        g = g[:: g.numel() // 65536]
    low, high = torch.quantile(g.float(), torch.tensor([0.05, 0.95]))
    return (high - low).item()


class SageMaker(Baseline):
    """Apply the rules; each fires once."""

    RULES = (
        "vanishing",
        "exploding",
        "initialization",
        "saturated",
        "dead_relu",
        "update_ratio",
        "all_zero",
        "unchanged",
        "loss",
        "overfit",
        "overtraining",
    )

    def __init__(self, *args: Any, rules: Any = RULES, every: Any = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rules, self.every, self.fired = rules, every, set[str]()
        watch_gradients(self)
        self.relu_in: dict[str, Tensor] = {}
        self.relu_out: dict[str, Tensor] = {}
        self.squash: dict[str, tuple[nn.Module, Tensor]] = {}
        watch_modules(self, nn.ReLU, self.keep_relu)
        watch_modules(self, (nn.Tanh, nn.Sigmoid), lambda n, m, i, o: self.squash.__setitem__(n, (m, i[0].detach())))
        self.before = self.weights()
        self.losses: list[float] = []
        self.window: list[tuple[float, float]] = []
        self.last_change: dict[str, int] = {}
        self.train_since: list[float] = []
        self.over = 0

    def keep_relu(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module.inplace:
            self.relu_in[name] = inputs[0].detach()
        self.relu_out[name] = output.detach()

    def weights(self) -> Any:
        return {n: p.detach().clone() for n, p in self.parameters.items()}

    def fire(self, rule: Any, kind: str, names: Any) -> None:
        if rule in self.rules and rule not in self.fired and names:
            self.fired.add(rule)
            for name in names:
                self.log.add(kind, name, self.now)

    def due(self, rule: Any) -> Any:
        return rule in self.rules and rule not in self.fired

    def check(self, loss: float, val_loss: float | None) -> None:
        self.losses.append(loss)
        self.train_since.append(loss)
        if val_loss is not None:
            self.validate(val_loss)
        if self.now % self.every:
            return
        grads = self.grads
        if self.due("vanishing"):
            self.fire("vanishing", "vanishing-gradient", [n for n, g in grads.items() if g.abs().mean() < VANISHING])
        if self.due("exploding"):
            bad: list[str | None] = [n for n, g in grads.items() if not torch.isfinite(g).all()]
            bad += [n for n, p in self.parameters.items() if not torch.isfinite(p).all()] + (
                [] if finite(loss) else [None]
            )
            self.fire("exploding", "non-finite", bad)
        if self.due("all_zero"):
            share = ALL_ZERO_PERCENT / 100
            self.fire("all_zero", "dead-layer", [n for n, g in grads.items() if (g == 0).float().mean() >= share])
        if self.due("initialization") and self.now < INIT_STEPS:
            self.initialization(grads)
        if self.due("dead_relu"):
            dead = [
                n
                for n, o in self.relu_out.items()
                if 100 * (100 * (units(o) > 0).float().mean(0) < INACTIVE_PERCENT).float().mean() > LAYER_PERCENT
            ]
            self.fire("dead_relu", "dead-relu", dead)
        if self.due("saturated"):
            flat = []
            for n, (m, x) in self.squash.items():
                low, high = TANH if isinstance(m, nn.Tanh) else SIGMOID
                x = units(x)
                active = 100 * ((x > low) & (x < high)).float().mean(0)
                if 100 * (active < INACTIVE_PERCENT).float().mean() > LAYER_PERCENT:
                    flat.append(n)
            self.fire("saturated", "saturated-activation", flat)
        if self.due("update_ratio") or self.due("unchanged"):
            self.updates()
        if self.due("loss") and len(self.losses) > LOSS_STEPS and self.now % LOSS_STEPS == 0:
            before = self.losses[-1 - LOSS_STEPS]
            if finite(before, loss) and before != 0:
                percent = 100 * (before - loss) / abs(before)
                if 0 <= percent < LOSS_PERCENT or percent < -LOSS_RISE_PERCENT:
                    self.fire("loss", "loss-plateau", [None])
        self.grads = {}
        self.relu_in, self.relu_out, self.squash = {}, {}, {}

    def initialization(self, grads: dict[str, Tensor]) -> None:
        variance = {n: x.float().var().item() for n, x in self.relu_in.items() if x.numel() > 1}
        if variance and max(variance.values()) > INIT_RATIO * max(min(variance.values()), 1e-30):
            self.fire(
                "initialization",
                "poor-initialization",
                [max(variance, key=lambda n: variance[n]), min(variance, key=lambda n: variance[n])],
            )
            return
        narrow = [n for n, g in grads.items() if g.numel() > 1 and percentiles(g) < INIT_RANGE]
        if narrow:
            self.fire("initialization", "poor-initialization", narrow)
        elif len(self.losses) > INIT_PATIENCE and min(self.losses[-INIT_PATIENCE:]) >= min(
            self.losses[:-INIT_PATIENCE]
        ):
            self.fire("initialization", "poor-initialization", [None])

    def updates(self) -> None:
        after = self.weights()
        fast, slow, still = [], [], []
        for n, w in after.items():
            move = (w - self.before[n]).abs()
            if "weight" in n:  # [lib] the weights collection
                ratio = (move.mean() / (self.before[n].abs().mean() + UPDATE_EPS)).item()
                fast += [n] if ratio > UPDATE_LARGE else []
                slow += [n] if ratio < UPDATE_SMALL else []
                same = bool((move <= ATOL + RTOL * self.before[n].abs()).all())
                self.last_change[n] = self.last_change.get(n, 1) + 1 if same else 1
                still += [n] if self.last_change[n] >= UNCHANGED_STEPS else []
        self.before = after
        self.fire("update_ratio", "learning-rate-too-high", fast)
        self.fire("update_ratio", "learning-rate-too-low", slow)
        self.fire("unchanged", "not-optimized", still)
        recent = self.losses[-UNCHANGED_STEPS:]
        if len(recent) == UNCHANGED_STEPS and all(abs(a - recent[-1]) <= ATOL + RTOL * abs(recent[-1]) for a in recent):
            self.fire("unchanged", "loss-plateau", [None])

    def validate(self, val_loss: float) -> None:
        train = sum(self.train_since) / len(self.train_since)
        self.train_since = []
        if finite(train, val_loss) and train != 0:
            self.over = self.over + 1 if (val_loss - train) / abs(train) > OVERFIT_RATIO else 0
            if self.over >= OVERFIT_PATIENCE:
                self.fire("overfit", "overfitting", [None])
        self.window.append((train, val_loss))
        trains, vals = [t for t, _ in self.window], [v for _, v in self.window]

        def stuck(xs: list[float], patience: int) -> bool:
            return len(xs) > patience and min(xs[-patience:]) > min(xs[:-patience]) - OVER_DELTA

        if stuck(trains, TRAIN_PATIENCE) and stuck(vals, VAL_PATIENCE):
            self.fire("overtraining", "overfitting", [None])


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> SageMaker:
    """Attach the tool to a script."""
    return SageMaker(model, optimizer, **options)


def attach_every10(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> SageMaker:
    return SageMaker(model, optimizer, every=10, **options)


def attach_course(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> SageMaker:
    return SageMaker(
        model, optimizer, rules=("vanishing", "overfit", "overtraining", "initialization", "loss"), **options
    )


def attach_tensor_rules(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> SageMaker:
    return SageMaker(
        model,
        optimizer,
        rules=("vanishing", "exploding", "saturated", "dead_relu", "update_ratio", "all_zero"),
        **options,
    )
