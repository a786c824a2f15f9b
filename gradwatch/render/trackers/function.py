"""Send a run to a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from gradwatch import plugins
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding
from gradwatch.render.json_document import document, strict
from gradwatch.render.trackers.tracker_sink import TrackerSink


@final
class Function(TrackerSink):
    """Calls a function of yours with a dictionary for each point, each finding and the end of a run.

    Args:
        target: Your function, as package.module:function.
        every: Optimizer steps between two points; 0 for never.
        max_layers: Maximum number of layers with findings whose values a point has.
    """

    sends_all_findings = True

    def __init__(
        self, *, target: str | Callable[[dict[str, Any]], object], every: int = 10, max_layers: int = 8
    ) -> None:
        self._call = plugins.target(target, key="sinks.callable.target") if isinstance(target, str) else target
        super().__init__(every=every, max_layers=max_layers)

    def _describe(self, settings: Mapping[str, Any]) -> None:
        self._call({"event": "start", "settings": dict(settings)})

    def _log(self, step: int, points: Mapping[str, float]) -> None:
        self._call({"event": "step", "step": step, "values": dict(points)})

    def _alert(self, finding: Finding) -> None:
        event = "finding" if finding.withdrawn is None else "withdrawn"
        self._call({"event": event, **finding.to_json()})

    def _end(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        # strict JSON data, as `gradwatch diagnose --format json` prints
        self._call(strict({"event": "end", **document(history, diagnoses)}))
