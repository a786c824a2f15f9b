"""Gather the input of the remedies: the findings of a cause, and the numbers, config, layers and events of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from gradwatch.diagnose.run_numbers import RunNumbers, measure_run
from gradwatch.history.store import History
from gradwatch.records import Event, Finding, LayerInfo, RunInfo

SCALE_INVARIANT = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Lion",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    }
)
"""Optimizers with steps that do not depend on the scale of the gradient: https://arxiv.org/abs/1412.6980, sec. 2.1."""


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """The findings that a cause explains, and the run that they are from.

    Args:
        findings: Findings that the cause explains, the leading one first.
        numbers: Learning rates and norms of the run.
        info: Description of the run; its `settings` are None for a user's own training loop.
        events: Events up to the leading finding.
    """

    findings: Sequence[Finding]
    numbers: RunNumbers
    info: RunInfo
    events: Sequence[Event] = ()

    @classmethod
    def of(cls, history: History, findings: Sequence[Finding]) -> Case:
        """Return the case of findings in a history, the leading finding first."""
        step = findings[0].step
        events = tuple(event for event in history.events if event.step <= step)
        return cls(findings=findings, numbers=measure_run(history, until=step), info=history.info, events=events)

    @property
    def is_own_loop(self) -> bool:
        """Whether the loop is the user's own, so that there is no config to change."""
        return self.info.settings is None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the config by dotted key; empty for an own loop."""
        return self.info.settings or {}

    @property
    def step(self) -> int:
        """Step of the leading finding."""
        return self.findings[0].step

    @property
    def layers(self) -> list[str]:
        """Names of the layers of the leading kind."""
        return list(dict.fromkeys(f.layer for f in self.findings if f.kind == self.findings[0].kind and f.layer))

    @property
    def where(self) -> str:
        """The names of the layers of the leading kind for a sentence, at most three."""
        more = f" and {len(self.layers) - 3} more" if len(self.layers) > 3 else ""
        named = [self.variable(name) if self.is_own_loop else name for name in self.layers[:3]]
        return ", ".join(named) + more if named else "the model"

    def variable(self, name: str = "") -> str:
        """Return a Python expression for a module or parameter of the watched model, such as `model.blocks[0].fc`."""
        # several models are watched by name, and the first part of a name is then the model
        parts = name.split(".") if name else []
        whole = "model" if "" in self.info.models or not parts else parts.pop(0)
        return whole + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)

    @cached_property
    def matrices(self) -> list[LayerInfo]:
        """The weights of linear and convolutional layers, in the order of the model."""
        return [la for la in self.info.layers if len(la.shape) >= 2 and "Embedding" not in la.module_type]

    @property
    def ignores_scale(self) -> bool:
        """Whether the steps of every optimizer are independent of the gradient's scale."""
        names = self.info.optimizer.split("+")
        return all(name in SCALE_INVARIANT for name in names)

    def accepts(self, patch: Mapping[str, Any]) -> bool:
        """Return whether the config has all settings of a patch, and differs from it in at least one."""
        known = all(key == "schedule" or self.has(key) for key in patch)
        return known and any(not self._is_so(key, value) for key, value in patch.items())

    def has(self, key: str) -> bool:
        """Return whether the config has a setting."""
        return key in self.settings or bool(self._below(key))

    def _is_so(self, key: str, value: object) -> bool:
        if key == "schedule":
            return self.settings.get("schedule.name") is None and not self.settings.get("schedule.warmup_steps")
        # a section such as `train.clip` counts as set if it is there, whatever its values
        return bool(self._below(key)) if isinstance(value, Mapping) else self.settings.get(key) == value

    def _below(self, key: str) -> list[str]:
        return [known for known in self.settings if known.startswith(f"{key}.")]
