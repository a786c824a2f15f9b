"""Show a run in TensorBoard: charts, histograms, pictures of all layers, findings as text, hyperparameters."""

# T = recorded steps, M = layers, K = parameter tensors with histograms, B = their bins

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
from tensorboard.compat.proto import event_pb2

from gradwatch.history.store import Histograms, History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common.heatmap import draw
from gradwatch.render.common.layers import Layer, layers, matrices, norms_over_run, update_ratios_over_run
from gradwatch.render.common.run_stats import worst_severity
from gradwatch.render.tensorboard import charts, markdown
from gradwatch.render.tensorboard.backfill import MAX_POINTS, backfill, points_per_chart
from gradwatch.render.tensorboard.charts import Block
from gradwatch.render.tensorboard.dashboard import layout
from gradwatch.render.tensorboard.event_file import EventFile
from gradwatch.render.tensorboard.excerpt import HistoryExcerpt
from gradwatch.render.tensorboard.histograms import magnitudes
from gradwatch.render.tensorboard.protobuf import FAILURE, SUCCESS, Summaries, dashboard, hparams_end, hparams_start
from gradwatch.render.tensorboard.throttle import Throttle

HISTOGRAM_MEANING = "Sizes of the elements as powers of ten: one unit to the left is ten times smaller."
PICTURE_MEANING = "Gradient norm of every layer over the run, input side on top; triangles mark onsets of findings."
UPDATES_MEANING = (
    "Update norm divided by weight norm of every layer: about 1e-3 is usual; triangles mark onsets of findings."
)
PICTURE_S = 0.04
"""Expected seconds to draw the first 2 pictures, which take 7 to 12 ms each. The value exceeds the grace time of the
throttle, so the first pictures must be earned."""
ONE_BY_ONE = 20
"""New findings that get a separate text at their step. The list contains all findings."""


@final
class TensorBoard:
    """Writes a run for TensorBoard: `tensorboard --logdir` on the directory or one above it.

    After the first output of each kind, the sink takes at most about 0.15 % of the steps' time. A point, histogram or
    picture that would take more is left out, so a fast training gets fewer of them. `close` writes the last output of
    each kind, and then all charts again from the history, with up to 1,000 points and all steps around findings.

    Args:
        directory: Directory to write to, usually the run directory. Its name becomes the name of the run.
        every: Optimizer steps between two points of the run's charts; 0 for never.
        layers_every: Optimizer steps between two points of the layers' charts; 0 for never.
        picture_every: Optimizer steps between two pictures of all layers; 0 for never.
        config_text: Text of the config, to show.
        hparams: Values for the HPARAMS tab, by dotted key.
        purge_step: First step of a resumed run. TensorBoard drops the interrupted run's data from this step.

    Raises:
        OSError: The directory cannot be written. Every method may raise it.
    """

    def __init__(
        self,
        *,
        directory: Path,
        every: int = 10,
        layers_every: int = 50,
        picture_every: int = 500,
        config_text: str = "",
        hparams: Mapping[str, Any] | None = None,
        purge_step: int | None = None,
    ) -> None:
        self._file = EventFile(directory, purge_step=purge_step)
        self._directory = directory
        self._name = directory.resolve().name
        self._summaries = Summaries()
        self._config_text = config_text
        self._hparams = dict(hparams or {})
        # the sink must see every multiple of each; gcd ignores zeros
        self.every = math.gcd(every, layers_every, picture_every)
        # the fractions add up to 0.15 % of the steps' time
        self._run = Throttle(every, fraction=0.0005)
        self._layer = Throttle(layers_every, fraction=0.00025)
        # not due at step 0: the picture would show a single step
        self._picture = Throttle(picture_every, fraction=0.0005, first=picture_every, expected_s=PICTURE_S)
        self._histogram = Throttle(1, fraction=0.00025)
        self._next: float = 0
        self._newest = -1
        self._described_at = 0
        self._is_started = False
        # the newest step written of each part; a resumed run has written the steps before `purge_step`
        self._written = dict.fromkeys(("run", "layers", "picture", "validation", "histograms"), (purge_step or 0) - 1)
        self._zeros: set[str] = set()
        self._marked: set[str] = set()
        self._pending: list[Finding] = []
        self._nonfinite = 0
        self._all: tuple[Layer, ...] = ()
        self._matrices: tuple[Layer, ...] = ()

    def write(self, history: History) -> None:
        """Write the outputs that are due at the newest step and within their quotas."""
        step = history.run.last_step  # equal to `history.step`, in half the time
        if step < self._newest:
            self._rewind(history)
        self._newest = step
        has_histograms = history.histograms_step > self._written["histograms"]
        if step < self._next and not self._pending and not has_histograms:  # the fast path of most steps
            return
        if not self._is_started:
            self._start(history)
        elapsed_s = history.trained_s
        parts = ((self._run, self._write_run), (self._layer, self._write_layers), (self._picture, self._write_picture))
        for throttle, part in parts:
            if throttle.grants(step, elapsed_s=elapsed_s):
                _charged(throttle, part, history)
        self._next = min(throttle.next for throttle, _ in parts)
        if has_histograms and self._histogram.grants(step, elapsed_s=elapsed_s):
            _charged(self._histogram, self._write_histograms, history)
        if self._pending:
            self._write_findings(history)

    def report(self, finding: Finding) -> None:
        """Keep a finding until the next `write`, which shows it and the list of all findings."""
        self._pending.append(finding)

    def withdraw(self, finding: Finding) -> None:
        """Keep a finding that no longer holds until the next `write`, which shows its end."""
        self._pending.append(finding)

    def discard(self) -> None:
        """Close the file, and write nothing."""
        self._file.close()

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Write the last output of each kind, the diagnosis and the final status, and then all charts again."""
        try:
            if history.step >= 0:
                if not self._is_started:
                    self._start(history)
                self._end(history, diagnoses)
        finally:
            self._file.close()
        if history.step >= 0:
            onsets = {
                f"problems/{kind}": f"Onset of {f.life}: {f.message}" for kind, f in charts.problems(history).items()
            }
            backfill(self._directory, self._blocks(history), descriptions=charts.DESCRIPTIONS | onsets)

    def _start(self, history: History) -> None:
        self._is_started = True
        self._all, self._matrices = layers(history.info.layers), matrices(history.info.layers)
        if self._written["run"] >= 0:  # a resumed run: count the non-finite steps before the interruption
            self._nonfinite = charts.nonfinite_steps(history, until=self._written["run"])
        self._describe(history)

    def _rewind(self, history: History) -> None:
        """Withdraw the output of the rewound steps, which the run will repeat."""
        step = history.step
        self._file.purge(step)
        for part, written in self._written.items():
            self._written[part] = min(written, step - 1)
        for throttle in (self._run, self._layer, self._picture, self._histogram):
            throttle.rewind(step)
        self._next = step
        self._pending = [finding for finding in self._pending if finding.step <= step]
        self._nonfinite = charts.nonfinite_steps(history, until=step - 1)
        # the purge has withdrawn the description too
        if self._is_started and step <= self._described_at:
            self._describe(history)

    def _describe(self, history: History) -> None:
        """Write the layout of the dashboard, the config and the hyperparameters."""
        step = self._described_at = max(history.step, 0)
        self._file.write(dashboard(layout(history.info), step=step))
        if self._config_text:
            self._file.write(self._summaries.text(step, "4_config", markdown.code(self._config_text, "yaml")))
        if self._hparams:
            for event in hparams_start(self._hparams, charts.METRICS, step=step):
                self._file.write(event)

    def _end(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        parts = {"run": self._run, "layers": self._layer, "picture": self._picture}
        writes = (self._write_run, self._write_layers, self._write_picture)
        for (part, throttle), write in zip(parts.items(), writes, strict=True):
            if throttle.every and history.step > self._written[part]:  # whatever the quota: it is the last output
                write(history)
        self._write_findings(history)
        step, text = history.step, self._summaries.text
        self._file.write(text(step, "1_diagnosis", markdown.diagnosis(history, diagnoses, run=self._name)))
        if self._hparams:
            # TensorBoard's status shows the health of the run
            failed = worst_severity(history) is Severity.CRITICAL
            self._file.write(hparams_end(step=step, status=FAILURE if failed else SUCCESS))

    def _write_run(self, history: History) -> None:
        if validations := charts.validation_block(history, after=self._written["validation"]):
            self._draw(validations)
        self._written["validation"] = history.step
        newest = HistoryExcerpt.newest(history, after=self._written["run"])
        blocks = charts.run_blocks(history, self._matrices, newest, nonfinite=self._nonfinite)
        # a running count, since a thinned history does not keep every step
        self._nonfinite = int(blocks[0].values[charts.NONFINITE][-1])
        self._draw(*blocks)
        self._written["run"] = history.step

    def _write_layers(self, history: History) -> None:
        self._draw(*charts.layer_blocks(HistoryExcerpt.newest(history, after=self._written["layers"]), self._zeros))
        self._written["layers"] = history.step

    def _blocks(self, history: History) -> Iterator[Block]:
        """Yield all charts, from the whole history."""
        if self._run.every:
            blocks = charts.run_blocks(history, self._matrices, HistoryExcerpt.over_run(history, most=MAX_POINTS))
            # exact at the end, although the history does not keep every step
            counts_P = blocks[0].values[charts.NONFINITE]
            counts_P[-1] = max(counts_P[-1], self._nonfinite)
            yield from blocks
            if validations := charts.validation_block(history, after=-1, most=MAX_POINTS):
                yield validations
            yield from charts.problem_marks(history).values()
        if self._layer.every:
            most = points_per_chart(charts.num_layer_charts(history))
            yield from charts.layer_blocks(HistoryExcerpt.over_run(history, most=most), set())

    def _write_picture(self, history: History) -> None:
        if not self._all:  # no layers were monitored
            return
        png, size = draw(*norms_over_run(history, self._all), self._all, findings=history.findings)
        self._file.write(self._summaries.picture(history.step, charts.PICTURE, png, size, PICTURE_MEANING))
        steps_T, ratios_TM = update_ratios_over_run(history, self._all)
        if len(steps_T):  # updates may be sampled rarely, or never
            words = {"title": "update/weight ratio", "absent": "not known"}
            png, size = draw(steps_T, ratios_TM, self._all, findings=history.findings, **words)
            self._file.write(self._summaries.picture(history.step, charts.UPDATE_PICTURE, png, size, UPDATES_MEANING))
        self._written["picture"] = history.step

    def _write_histograms(self, history: History) -> None:
        # layers take turns in being sampled, so one write may have several steps; an event has one step
        fresh: dict[int, tuple[Histograms, list[int]]] = {}
        for seen, k in history.histograms.values():
            if seen.step > self._written["histograms"]:
                fresh.setdefault(seen.step, (seen, []))[1].append(k)
        for step, (seen, ks) in sorted(fresh.items()):
            event = event_pb2.Event(wall_time=time.time(), step=step)
            names = [history.param.layers[place] for place in seen.places_K[ks]]
            tags = [f"{charts.HISTOGRAMS[of]}/{name}" for of in ("grad", "weight") for name in names]
            counts_KB = np.concatenate([seen.grad_KB[ks], seen.weight_KB[ks]])
            for tag, buckets_K3 in zip(tags, magnitudes(seen.edges_B, counts_KB), strict=True):
                if len(buckets_K3):
                    self._summaries.histogram(event, tag, buckets_K3, HISTOGRAM_MEANING)
            self._file.write(event)
        self._written["histograms"] = history.histograms_step

    def _write_findings(self, history: History) -> None:
        # a step may have a finding for each of many layers
        for finding in self._pending[:ONE_BY_ONE]:
            text = markdown.finding(finding, run=self._name)
            self._file.write(self._summaries.text(finding.since, f"3_finding/{finding.kind}", text))
        self._pending.clear()
        self._mark_problems(history)
        text = markdown.findings(history.findings, run=self._name, withdrawn=history.withdrawn)
        self._file.write(self._summaries.text(history.step, "2_findings", text))

    def _mark_problems(self, history: History) -> None:
        """Mark the onset of each new kind of problem."""
        marks = charts.problem_marks(history)
        for tag in marks.keys() - self._marked:
            self._draw(marks[tag])
        self._marked |= marks.keys()

    def _draw(self, *blocks: Block) -> None:
        for block in blocks:
            for step, points in charts.points_of(block):
                if points:
                    self._file.write(self._summaries.scalars(step, points, descriptions=charts.DESCRIPTIONS))


def _charged(throttle: Throttle, part: Callable[[History], None], history: History) -> None:
    began = time.perf_counter()
    part(history)
    throttle.quota.charge(time.perf_counter() - began)
