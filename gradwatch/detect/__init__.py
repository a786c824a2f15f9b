"""Define the Detector interface and load all detectors, which read a history at its newest step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gradwatch import plugins
from gradwatch.history.store import History, Rows
from gradwatch.records import Finding

FAMILIES = ("numerics", "gradients", "activations", "updates", "optimizer", "data_and_loss", "ranks", "memory")
"""Sub-packages that hold detectors, in the order of the detector codes."""


LATE_STEP = 1024
"""Step from which detectors run less often. By then the loss and the gradients change slowly."""

LATE_FACTOR = 4
"""How many times less often detectors run from `LATE_STEP`. They are most of the overhead of a step of 0.3 ms."""


@dataclass(frozen=True, slots=True)
class Example:
    """A made-up history and the expected findings: both a test and a picture for the manual page.

    Args:
        name: Phrase that says what the history shows.
        history: Built by `gradwatch.history.synthetic.builder`.
        layers: Layers that must be named, in any order. None stands for the whole run. Empty means no finding.
    """

    name: str
    history: History
    layers: tuple[str | None, ...] = ()


@runtime_checkable
class Detector(Protocol):
    """One symptom: a final frozen dataclass without state, which reads everything from the history.

    The docstring of a detector is its manual page. Its fields are its thresholds, which YAML and `--set
    detect.<kind>.<field>` can change. The pipeline calls `detect` every `every` steps, and less often from
    `LATE_STEP`. A detector may yield the same finding again: the pipeline keeps the first open finding of each
    (kind, layer), and a later one only if it is more severe.
    """

    code: ClassVar[str]
    kind: ClassVar[str]
    every: int

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each faulty layer at the newest step of the history."""
        ...

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, histories that stay quiet, and near misses."""
        ...


@runtime_checkable
class TriggeredDetector(Detector, Protocol):
    """A detector that runs after the steps it selects, instead of every `every` steps."""

    def triggers_T(self, rows: Rows, history: History) -> NDArray[np.bool_]:
        """Return at which rows the detector must run, of shape (T,). The history does not hold these rows yet."""
        ...


def interval(every: int, step: int) -> int:
    """Return the number of steps between two checks of a detector at a step."""
    return every if step < LATE_STEP else LATE_FACTOR * every


def due_T(every: int, steps_T: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return at which steps a detector is due, of shape (T,): at the multiples of its interval."""
    return np.asarray(steps_T % np.where(steps_T < LATE_STEP, every, LATE_FACTOR * every) == 0)


class Recovery(NamedTuple):
    """The end of a symptom.

    Attributes:
        step: First step without the symptom.
        reason: What ended it, as a clause in the past tense, such as `it got a gradient`.
    """

    step: int
    reason: str


@runtime_checkable
class WithdrawingDetector(Detector, Protocol):
    """A detector of a lasting state, which withdraws its findings when the state is over.

    Findings about an event that happened, such as a spike, are never withdrawn.
    """

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the end of an open finding of this kind, or None if it may still hold at the newest step.

        The pipeline calls it before `detect`, for each open finding of an earlier step.
        """
        ...


@runtime_checkable
class RankDetector(Detector, Protocol):
    """A detector of differences between the ranks of a distributed training, which runs once more at the end.

    Other ranks write their last steps after rank 0 has finished its own.
    """

    patience: int


@runtime_checkable
class EndDetector(Detector, Protocol):
    """A detector that runs once more at the end: what it looks for may happen after the last step, or end the run."""

    runs_at_end: ClassVar[bool]


@runtime_checkable
class WaitingDetector(Detector, Protocol):
    """A detector that cannot judge a run before some time has passed."""

    def can_judge(self, history: History) -> bool:
        """Return whether the detector could report by now, also if the run has nothing for it to judge."""
        ...


def waiting(history: History, among: Iterable[Detector]) -> tuple[str, ...]:
    """Return the kinds of the detectors that cannot judge a run yet."""
    # before Python 3.12, `isinstance` with a protocol takes 0.1 ms
    asked = (d for d in among if hasattr(d, "can_judge") and isinstance(d, WaitingDetector))
    return tuple(d.kind for d in asked if not d.can_judge(history))


def detectors(settings: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Detector, ...]:
    """Return all detectors of this package and of the entry points `gradwatch.detectors`, sorted by code.

    Args:
        settings: Thresholds by kind, such as `{"dead-layer": {"decades": 4.0}}`; `enabled: False` leaves a kind out.
    """
    settings = settings or {}
    made = []
    for detector in detector_classes():
        # a copy, because `enabled` is not a field of the detector and is removed here
        options = dict(settings.get(detector.kind, {}))
        if options.pop("enabled", True):
            made.append(detector(**options))
    return tuple(sorted(made, key=lambda d: d.code))


def detector_classes() -> Iterator[type[Detector]]:
    """Yield the classes of all detectors: the public modules of each family, then the entry points."""
    yield from _own_classes()
    yield from plugins.entry_points("gradwatch.detectors")


@functools.cache  # listing the folders takes 2 ms, which each `watch` and each summary of a run would repeat
def _own_classes() -> tuple[type[Detector], ...]:
    found: list[type[Detector]] = []
    for family in FAMILIES:
        package = f"{__name__}.{family}"
        for name in plugins.names(package):
            members = vars(plugins.load(package, name)).values()
            # a module also holds the detectors that it imports: keep the classes that it defines
            found += (m for m in members if isinstance(m, type) and "code" in vars(m) and m.__module__.endswith(name))
    return tuple(found)
