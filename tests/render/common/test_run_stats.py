"""What a run did, in numbers."""

import dataclasses

import numpy as np
import pytest

from gradwatch.events import MEMORY_PLANNED
from gradwatch.history.store import History
from gradwatch.history.synthetic import dynamics
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import RunInfo, Severity
from gradwatch.render.common.run_stats import (
    SHORT_S,
    memory,
    newest,
    run_stats,
    skipped,
    throughput,
    watching,
    worst_severity,
)


def test_facts_of_a_run_follow_from_its_history(healthy):
    seen = run_stats(healthy.history)

    step_ms = healthy.history["step_ms"]
    assert seen.steps == 120
    assert seen.seconds == pytest.approx(step_ms.sum() / 1e3)
    assert seen.watch_frac == pytest.approx(120 * 0.1 / step_ms.sum())
    assert seen.watch_s == pytest.approx(120 * 0.1 / 1e3)
    assert seen.watch_us == pytest.approx(100)
    assert seen.val_accuracy == 0.875
    assert seen.wait_frac == pytest.approx(healthy.history["data_wait_ms"].sum() / step_ms.sum())
    assert seen.peak_memory_bytes == healthy.history["peak_memory_bytes"].max()


def test_the_planned_memory_stands_beside_the_measured():
    history = Synthetic(layers=1, steps=20).history()
    before = run_stats(history)
    assert memory(history, before) == "1 GB of the process"

    history.add_event(MEMORY_PLANNED.emit(step=19, values={"peak_bytes": 3e6}))
    seen = run_stats(history)

    assert np.isnan(before.planned_peak_bytes)
    assert (seen.planned_peak_bytes, seen.peak_memory_bytes) == (3e6, 1e9)
    assert memory(history, seen) == "1 GB of the process; 3 MB planned for the tensors of a step"


def test_what_watching_took_is_reported_per_step_and_as_percent_only_where_the_run_is_long(healthy):
    short, blank = run_stats(healthy.history), run_stats(History(RunInfo(name="", created="", layers=())))
    brief = dataclasses.replace(short, seconds=0.2, watch_us=530.0, watch_frac=0.318)
    usual = dataclasses.replace(short, seconds=SHORT_S, watch_us=1083.0, watch_frac=0.013)

    assert watching(brief) == "530 us per step"
    assert watching(dataclasses.replace(usual, seconds=9.0)) == "1,083 us per step"
    assert watching(usual) == "1,083 us per step (1.3 %)"
    assert watching(blank) == "-", "nothing is known of it"


def test_thinned_steps_are_counted_in_the_time():
    history = Synthetic(layers=1, steps=12000).history()
    assert len(history["loss"]) < 12000, "this run is long enough to be thinned"

    seen = run_stats(history)

    assert seen.seconds == pytest.approx(120, rel=0.02), "10 ms a step"
    assert seen.samples_per_s == pytest.approx(6400, rel=0.02), "64 samples a step"


def test_sampled_steps_of_which_thinning_keeps_more_than_of_others_do_not_make_watching_dearer(monkeypatch):
    usual = dynamics.run_statistics
    watch_ms_T = np.where(np.arange(12000) % 160 == 0, 5.0, 0.1)
    monkeypatch.setattr(dynamics, "run_statistics", lambda **given: usual(**given) | {"watch_ms": watch_ms_T})
    history = Synthetic(layers=1, steps=12000).history()
    assert history["watch_ms"].mean() > 1.1 * watch_ms_T.mean(), "a multiple of 160 is one of 8, too"

    seen = run_stats(history)

    assert seen.watch_frac == pytest.approx(watch_ms_T.mean() / 10, rel=0.05)
    assert seen.watch_s == pytest.approx(watch_ms_T.sum() / 1e3, rel=0.05)
    assert seen.watch_us == pytest.approx(100), "the usual step, not the mean with the sampled ones"


def test_nothing_is_known_of_a_run_without_steps():
    history = History(RunInfo(name="", created="", layers=()))

    seen = run_stats(history)

    assert seen.steps == 0
    assert np.isnan([seen.seconds, seen.samples_per_s, seen.watch_frac, seen.watch_s, seen.loss, seen.val_loss]).all()
    assert np.isnan(newest(history, "loss"))
    assert np.isnan(throughput(history)).all()


def test_skipped_updates_are_counted(broken):
    assert skipped(broken.history) == (20, 119)


def test_throughput_is_samples_by_time(healthy):
    samples_per_s, steps_per_s = throughput(healthy.history)

    assert steps_per_s == pytest.approx(1e3 / healthy.history["step_ms"].mean())
    assert samples_per_s == pytest.approx(64 * steps_per_s)


def test_a_run_is_healthy_as_long_as_nothing_is_worse_than_info(make_finding):
    history = Synthetic(layers=1, steps=5).history()
    assert worst_severity(history) is None

    history.report(make_finding("loss-plateau", layer=None, step=3, severity=Severity.INFO, code="GW507"))
    assert worst_severity(history) is None

    history.report(make_finding("dead-layer", layer="layers.0", step=3, severity=Severity.WARNING, code="GW104"))
    assert worst_severity(history) is Severity.WARNING
