"""Define the contract between a training script of the zoo, the monitor under test, and the scorer.

A case is a plain PyTorch training loop with at most one planted fault. It knows nothing about monitors: it receives a
factory, calls the factory once the model and the optimizer exist, and then reports the end of every optimizer step.

    @case(fault="exploding-gradient", layers=("blocks.3",), onset=40, source="...")
    def residual_blowup(attach: Attach) -> None:
        '''Describe the fault in one line.'''
        torch.manual_seed(0)
        model = ...
        optimizer = ...
        monitor = attach(model, optimizer)  # scaler=, accumulate=, loss_fn= if the loop has them
        for step in range(300):
            loss = ...
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)  # once per optimizer step, after it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FAULTS = {
    "exploding-gradient": "gradient norms grow exponentially, or are far too large from the start",
    "vanishing-gradient": "gradient norms shrink geometrically towards the input; early layers barely learn",
    "dead-layer": "the gradient of one layer stays at zero or at a tiny value while other layers learn",
    "rising-sparsity": "the fraction of zeros in the gradient of a layer rises for good: units die one by one",
    "dead-relu": "units whose ReLU never fires, from the start or suddenly",
    "saturated-activation": "sigmoid, tanh or softmax units sit in their flat tails",
    "oscillating-gradient": "norms bounce between updates; the optimizer works against itself",
    "gradient-spike": "single updates whose norm is about 100x the usual one",
    "non-finite": "NaN or Inf in loss, gradients, activations or parameters",
    "no-gradient": "parameters whose grad is always None or exactly zero: detached, unused, or cut from the graph",
    "not-optimized": "parameters that get gradients but are in no optimizer group, or never move",
    "layer-imbalance": "the gradient or update-to-weight ratio of one layer is about 1000x that of the other layers",
    "fp16-underflow": "half precision flushes gradients to zero",
    "loss-scale-collapse": "the GradScaler skips update after update; its scale falls towards zero",
    "missing-zero-grad": "gradients accumulate across updates because they are never zeroed",
    "constant-batch": "the same batch arrives at every step",
    "learning-rate-too-high": "updates are too large relative to the weights; the loss rises or bounces",
    "learning-rate-too-low": "updates are negligible relative to the weights; the loss hardly moves",
    "poor-initialization": "weights or activations are badly scaled at step 0",
    "probabilities-into-loss": "softmax or sigmoid outputs are passed to a loss that expects logits",
    "train-eval-mismatch": "the mode of BatchNorm or Dropout is wrong for the phase, or their statistics disagree",
    "overfitting": "the training loss falls while the validation loss rises",
    "loss-plateau": "the loss does not decrease and no other kind explains it",
    "attention-collapse": "attention logits so large that heads look at single keys",
    "majority-class": "a classifier that predicts nothing but the majority class",
    "target-leakage": "a language model that sees the token that it is to predict",
    "policy-divergence": "a policy that has moved far from the one that drew its samples",
    "unstable-formula": "a formula of the loss overflows, cancels or has an infinite gradient somewhere",
    "graph-leak": "the autograd graphs of past steps stay in memory",
    "evaluation-with-graph": "an evaluation builds autograd graphs that nothing uses",
    "failed-load": "a state is loaded and changes nothing",
    "memory-growth": "the memory in use grows from step to step",
    "memory-fragmentation": "much of the reserved memory is in pieces that are too small to use",
    "out-of-memory": "an allocation fails",
}

SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True)
class Finding:
    """A fault that a monitor reports.

    Attributes:
        kind: A key of `FAULTS`.
        layer: Name of a module or parameter; None for the whole run.
        step: Optimizer step of the first report, counted from 0.
        severity: One of `SEVERITIES`.
    """

    kind: str
    layer: str | None
    step: int
    severity: str


class Monitor(Protocol):
    """A monitor under test."""

    def step(self, loss: Any, **context: Any) -> None:
        """Receive the end of one optimizer step.

        Args:
            loss: The loss of the step, as a tensor or a float.
            context: `batch`, the input tensor of the step, and `val_loss`, a validation loss measured now, if a real
                script would have them at hand.
        """

    def findings(self) -> Sequence[Finding]:
        """Return the findings of the run."""


Attach = Callable[..., Monitor]


@dataclass(frozen=True)
class Case:
    """A training script and the facts by which findings are judged.

    Attributes:
        name: Name of the function, unique in the zoo.
        run: The script.
        fault: The planted fault, a key of `FAULTS`; None for a healthy script.
        also: Other kinds that are right, too.
        layers: Prefixes of module names that locate the fault; empty if any layer will do.
        onset: First optimizer step at which the fault can be seen.
        tolerate: Kinds that count neither for nor against a monitor: true, but secondary.
        source: Where the fault or the recipe comes from.
        tags: Words by which cases can be grouped.
    """

    name: str
    run: Callable[[Attach], None]
    fault: str | None
    also: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    onset: int = 0
    tolerate: tuple[str, ...] = ()
    source: str = ""
    tags: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Return the name of the module that defines the script."""
        return self.run.__module__


REGISTRY: list[Case] = []


def case(
    *,
    fault: str | None = None,
    also: tuple[str, ...] = (),
    layers: tuple[str, ...] = (),
    onset: int = 0,
    tolerate: tuple[str, ...] = (),
    source: str = "",
    tags: tuple[str, ...] = (),
) -> Callable[[Callable[[Attach], None]], Callable[[Attach], None]]:
    """Register a function as a case. The arguments are the attributes of `Case`."""
    unknown = {*(() if fault is None else (fault,)), *also, *tolerate} - FAULTS.keys()
    assert not unknown, f"no such fault: {unknown}"

    def register(run: Callable[[Attach], None]) -> Callable[[Attach], None]:
        REGISTRY.append(Case(run.__name__, run, fault, also, layers, onset, tolerate, source, tags))
        return run

    return register
