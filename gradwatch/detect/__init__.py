"""The Detector interface, and all detectors there are: read the history at its newest step, yield what is ill now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gradwatch import plugins
from gradwatch.history.store import History, Rows
from gradwatch.records import Finding

FAMILIES = ("numerics", "gradients", "activations", "updates", "optimizer", "data_and_loss")
"""Sub-packages that hold detectors, by what they look at, in the order of their codes."""


@dataclass(frozen=True, slots=True)
class Example:
    """A made-up history and what a detector must say of it: a test, and a picture for the manual page.

    Args:
        name: What it shows, as a phrase.
        history: Built by `gradwatch.history.synthetic.builder`.
        layers: Layers that must be named, in any order; None stands for the whole run; empty means quiet.
    """

    name: str
    history: History
    layers: tuple[str | None, ...] = ()


@runtime_checkable
class Detector(Protocol):
    """One symptom. A final frozen dataclass without state: everything it knows stands in the history.

    Its docstring is its manual page, its fields are its thresholds (YAML and `--set detect.<kind>.<field>` reach
    them). It is asked every `every` steps and may yield the same finding again: the pipeline keeps the first
    of each (kind, layer), and a later one only where it is graver.
    """

    code: ClassVar[str]
    kind: ClassVar[str]
    every: int

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each layer that is ill at the newest step of the history."""
        ...

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        ...


@runtime_checkable
class TriggeredDetector(Detector, Protocol):
    """A detector that runs after the steps it selects, instead of every `every` steps."""

    def triggers_T(self, rows: Rows, history: History) -> NDArray[np.bool_]:
        """Return at which of the rows, before the history holds them, the detector must run: shape (T,)."""
        ...


def detectors(settings: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Detector, ...]:
    """Return every detector of this package and of the entry points `gradwatch.detectors`, in the order of their code.

    Args:
        settings: Thresholds by kind, such as `{"dead-layer": {"decades": 4.0}}`; `enabled: False` leaves a kind out.
    """
    settings = settings or {}
    made = []
    for detector in detector_classes():
        options = dict(settings.get(detector.kind, {}))
        if options.pop("enabled", True):
            made.append(detector(**options))
    return tuple(sorted(made, key=lambda d: d.code))


def detector_classes() -> Iterator[type[Detector]]:
    """Yield the classes of all detectors: the public files of each family, then the entry points."""
    for family in FAMILIES:
        package = f"{__name__}.{family}"
        for name in plugins.names(package):
            members = vars(plugins.load(package, name)).values()
            yield from (m for m in members if isinstance(m, type) and "code" in vars(m) and m.__module__.endswith(name))
    yield from plugins.entry_points("gradwatch.detectors")
