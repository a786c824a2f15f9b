"""Name the monitors that can be scored: gradwatch and the baselines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

import gradwatch
from scripts.fault_zoo.protocol import Attach, Finding

NO_MONITOR = "scripts.fault_zoo.monitors:attach_nothing"

MONITORS = {
    "gradwatch": "scripts.fault_zoo.monitors:attach_gradwatch",
    "seed-rules": "scripts.fault_zoo.baselines.seed_rules:attach",
    "sagemaker": "scripts.fault_zoo.baselines.sagemaker:attach",
    "sagemaker-every-10": "scripts.fault_zoo.baselines.sagemaker:attach_every10",
    "sagemaker-course": "scripts.fault_zoo.baselines.sagemaker:attach_course",
    "sagemaker-tensor-rules": "scripts.fault_zoo.baselines.sagemaker:attach_tensor_rules",
    "autotrainer": "scripts.fault_zoo.baselines.autotrainer:attach",
    "autotrainer-ungated": "scripts.fault_zoo.baselines.autotrainer:attach_ungated",
    "thedeepchecker": "scripts.fault_zoo.baselines.thedeepchecker:attach",
    "torchmortem": "scripts.fault_zoo.baselines.torchmortem:attach",
    "trainpulse": "scripts.fault_zoo.baselines.trainpulse:attach",
    "torchdiag": "scripts.fault_zoo.baselines.torchdiag:attach",
    "non-finite-gradients": "scripts.fault_zoo.baselines.nan_checks:gradients",
    "lightning-nan-check": "scripts.fault_zoo.baselines.nan_checks:lightning",
    "anomaly-mode": "scripts.fault_zoo.baselines.nan_checks:anomaly",
    "transformers-debug": "scripts.fault_zoo.baselines.hf_debug:attach",
}


def find_factory(path: str) -> Attach:
    """Import the factory `MODULE:FACTORY`."""
    module, _, attribute = path.partition(":")
    factory: Attach = getattr(importlib.import_module(module), attribute)
    return factory


class NoMonitor:
    """Do nothing: the losses of this run show how the script trains without a monitor."""

    def step(self, loss: Any, **context: Any) -> None:
        """Ignore the step."""

    def findings(self) -> Sequence[Finding]:
        """Return no findings."""
        return []


def attach_nothing(model: nn.Module, optimizer: Any, **options: Any) -> NoMonitor:
    """Return the monitor that does nothing."""
    return NoMonitor()


class GradwatchMonitor:
    """Pass the steps of a script to `gradwatch.watch` and return its findings."""

    def __init__(self, monitor: gradwatch.Monitor) -> None:
        self._monitor = monitor

    def step(self, loss: Any, **context: Any) -> None:
        """Record the end of one optimizer step."""
        self._monitor.step(loss, batch=context.get("batch"), val_loss=context.get("val_loss"))

    def findings(self) -> Sequence[Finding]:
        """Return the findings, most important first, one for each layer."""
        return [
            Finding(f.kind, layer, f.step, str(f.severity))
            for f in self._monitor.findings()
            for layer in f.names or (None,)
        ]

    def close(self) -> None:
        """Write the rest of the run directory."""
        self._monitor.close()


def attach_gradwatch(model: nn.Module, optimizer: Any, **options: Any) -> GradwatchMonitor:
    """Watch the model of a script. The options are `scaler`, `accumulate`, `loss_fn`, and `run`, a run directory."""
    known = {k: v for k, v in options.items() if k in {"scaler", "accumulate", "loss_fn", "run"}}
    return GradwatchMonitor(gradwatch.watch(model, optimizer, **known))
