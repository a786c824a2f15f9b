"""What a history promises to detectors, renderers and people."""

import numpy as np
import pytest

from gradwatch import catalogue
from gradwatch.history.store import Histograms, History
from gradwatch.records import Severity


def test_what_is_left_out_of_the_run_is_nan(recorded):
    history = recorded(2)
    assert history["loss"].tolist() == [0.0, 1.0]
    assert np.isnan(history["val_loss"]).all()


def test_history_rejects_an_unknown_statistic_of_the_run(recorded, append):
    history = recorded(1)
    with pytest.raises(ValueError, match="no statistic of the run is called lose"):
        append(history, 1, lose=1.0)
    assert history.step == 0, "nothing may be recorded of a step that was refused"


def test_statistics_are_found_in_their_tables(recorded):
    history = recorded(25)
    assert history["grad.l2"].shape == (25, 3)
    assert history["act.mean"].shape == (3, 2)
    assert history.steps("act.mean").tolist() == [0, 10, 20]
    assert history.scalar("loss", 2).tolist() == [23.0, 24.0]
    with pytest.raises(KeyError, match=r"no statistic is called 'grad\.l3'"):
        history["grad.l3"]


def test_frame_has_steps_down_and_layers_across(recorded):
    pytest.importorskip("pandas")
    frame = recorded(25).frame("act.mean")
    assert list(frame.columns) == ["a0", "a1"]
    assert list(frame.index) == [0, 10, 20]
    assert list(recorded(3).frame("loss")["loss"]) == [0.0, 1.0, 2.0]


def test_run_and_param_keep_the_same_steps_whatever_their_width(recorded):
    history = recorded(1000, layers=2100, activations=1)
    assert np.array_equal(history.run.rows()[0], history.param.rows()[0])
    assert len(history.run) < 1000, "the test needs a run that was thinned"


def test_validation_is_kept_when_the_steps_around_it_are_thinned(run_info, append, short_segments):
    history = History(run_info())
    for step in range(4000):
        append(history, step, **({"val_loss": 1.0} if step % 333 == 332 else {"val_loss": float("nan")}))
    validated_T = history.steps("val_loss")[np.isfinite(history["val_loss"])]
    assert validated_T.tolist() == list(range(332, 4000, 333))


def test_the_newest_validation_is_known_however_far_back_it_lies(run_info, append, short_segments):
    history = History(run_info())
    assert history.latest_validation("val_loss")[0] == -1
    given = {20: {"val_loss": 0.5, "val_accuracy": 0.7}, 30: {"val_loss": 0.4}}
    for step in range(4000):
        append(history, step, **given.get(step, {}))

    assert history.latest_validation("val_loss") == (30, 0.4)
    assert history.latest_validation("val_accuracy") == (20, 0.7), "what only some validations give"

    copy = History(run_info())
    copy.restore(history.state())
    assert copy.latest_validation("val_loss")[0] == -1, (
        "the rows that a state leaves out are those of the history restored"
    )
    history.restore(history.state())
    assert history.latest_validation("val_loss") == (30, 0.4)
    history.truncate(29)
    assert history.latest_validation("val_loss") == (20, 0.5)


def test_report_takes_in_a_finding_once(recorded, finding):
    history = recorded(9)
    assert history.report(finding(5))
    assert not history.report(finding(8)), "the same again is no news"
    assert history.report(finding(8, layer="l1")), "another layer is news"
    assert [(f.layer, f.step) for f in history.findings] == [("l0", 5), ("l1", 8)]


def test_a_graver_finding_supersedes_and_keeps_the_first_step(recorded, finding):
    history = recorded(9)
    history.report(finding(5))
    assert history.report(finding(8, severity=Severity.CRITICAL))
    assert not history.report(finding(9, severity=Severity.INFO))
    (only,) = history.findings
    assert (only.step, only.severity) == (5, Severity.CRITICAL)


def test_report_knows_what_was_put_into_the_list_itself(recorded, finding):
    history = recorded(9)
    history.findings.append(finding(5))
    assert not history.report(finding(6))


def test_findings_protect_the_rows_around_them(run_info, append, finding, short_segments):
    history = History(run_info())
    for step in range(4000):
        append(history, step)
        if step == 1001:
            history.report(finding(1001))
    steps_T = history.steps("loss")
    assert np.isin(np.arange(1001 - 32, 1001 + 33), steps_T).all()
    assert len(steps_T) < 4000, "the test needs a run that was thinned"


def test_truncate_forgets_rows_findings_and_validations_after_a_step(run_info, append, finding):
    history = History(run_info())
    for step in range(40):
        append(history, step, val_loss=1.0)
    history.report(finding(10))
    history.report(finding(30, layer="l1"))
    history.truncate(20)

    assert (history.step, history.act.last_step) == (20, 20)
    assert [f.step for f in history.findings] == [10]
    assert history.report(finding(25, layer="l1")), "what was forgotten is news again"
    append(history, 21)
    assert history.step == 21


def test_state_restores_windows_and_findings_exactly(recorded, run_info, finding):
    history = recorded(700)
    history.report(finding(650))
    copy = History(run_info())
    copy.restore(history.state())

    for name in ("param", "act", "run"):
        one, two = getattr(history, name), getattr(copy, name)
        assert np.array_equal(one.steps(), two.steps()), name
        assert np.array_equal(one.state()["values"], two.state()["values"], equal_nan=True), name
    assert copy.findings == history.findings


def test_histograms_are_kept_beside_the_tables(recorded):
    history = recorded(4)
    assert (history.histograms, history.histograms_step) == ({}, -1)

    for step, places in ((4, [0, 1]), (5, [1, 2]), (6, [0])):
        counts_KB = np.full((len(places), 2), step)
        seen = Histograms(
            step=step,
            edges_B=np.array([-1.0, 0.0, 1.0]),
            places_K=np.array(places),
            grad_KB=counts_KB,
            weight_KB=2 * counts_KB,
        )
        param_SL = np.zeros((len(catalogue.PARAM), 3), np.float32)
        history.extend(history.row(step, run={"step_ms": 1.0}, param_SL=param_SL, histograms=seen))

    newest = {place: seen.grad_KB[k, 0] for place, (seen, k) in history.histograms.items()}
    assert (newest, history.histograms_step) == ({0: 6, 1: 5, 2: 5}, 6), "of each tensor the newest"

    history.truncate(5)
    assert sorted(history.histograms) == [1, 2], "what came later is taken back"
    assert history.histograms_step == 5


def test_the_time_of_the_steps_leaves_out_the_pauses_between_them(run_info, append):
    history = History(run_info())
    for step in range(100):
        append(history, step, step_ms=60_000.0 if step == 50 else 10.0)

    assert history.trained_s == pytest.approx(1.0, abs=0.02)
