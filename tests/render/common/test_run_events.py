"""Rewinds, batches left out and incidents are told wherever a run is told, with the command that runs a step again."""

import json
import re

import pytest

from gradwatch.events import LEFT_OUT as LEFT_OUT_CHECK
from gradwatch.events import UNREAD
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event
from gradwatch.render.common.run_events import run_events
from gradwatch.render.json_document import document, dumps
from gradwatch.render.report.page import page
from gradwatch.render.terminal.diagnosis import print_diagnosis
from gradwatch.render.terminal.summary import print_summary

REWIND = Event(
    kind="rewind", step=16, text="step 21: the loss became <inf>; went back to step 16, its batch is left out"
)
LEFT_OUT = Event(kind="batch-left-out", step=30, text="step 30: the loss became nan; its batch is skipped from now on")
SOFTMAX = Event(kind="graph-probabilities", step=0, text="a softmax goes into a loss that applies its own")


def incident(step):
    return Event(kind="incident", step=step, text=f"incidents/step-{step:06d} holds what step {step} began with")


@pytest.fixture
def eventful():
    """Return a healthy history in which something was done about two steps."""
    history = Synthetic(layers=3, steps=60).history()
    for event in (SOFTMAX, incident(21), REWIND, LEFT_OUT):
        history.add_event(event)
    return history


@pytest.fixture
def trained(tmp_path):
    """Return a run directory of `gradwatch train`, as far as that is seen from outside."""
    (tmp_path / "config.yaml").write_text("model: {name: mlp}\n")
    return tmp_path


def test_what_a_run_did_is_reported_in_order_and_observations_of_the_graph_are_not(eventful, trained):
    told = [(event.label, event.command) for event in run_events(eventful, run=trained)]

    assert told == [("rewind", ""), ("skipped", ""), ("incident", f"gradwatch replay {trained} --step 21")]


def test_a_loss_that_came_without_its_graph_is_reported_with_what_to_hand_over(make_console, written):
    history = Synthetic(layers=3, steps=60).history()
    history.add_event(UNREAD.emit(step=1))

    console = make_console(width=80)

    print_summary(console, history, (), run_dir=None)

    told = " ".join(written(console).split())
    assert "not read" in told
    assert "pass the loss tensor itself, before item() and detach()" in told


def test_a_check_that_was_left_out_is_reported_in_summary_diagnosis_and_json(make_console, written):
    history = Synthetic(layers=3, steps=60).history()
    history.add_event(
        LEFT_OUT_CHECK.emit(step=8, part="the output heads", reason="IndexError: list index out of range")
    )
    summary, diagnosis = make_console(width=80), make_console(width=80)

    print_summary(summary, history, (), run_dir=None)
    print_diagnosis(diagnosis, history, ())

    for console in (summary, diagnosis):
        told = " ".join(written(console).split())
        assert "left out the output heads (IndexError: list index out of range)" in told
    (event,) = document(history, ())["events"]
    assert (event["kind"], event["step"]) == ("left-out", 8)


def test_a_step_of_ones_own_loop_is_reported_without_a_command(eventful, tmp_path):
    (*_, last) = run_events(eventful, run=tmp_path)

    assert (last.command, last.text) == ("", incident(21).text)


def test_of_many_the_first_are_shown_one_by_one(trained):
    history = Synthetic(layers=3, steps=60).history()
    for step in range(10, 26):
        history.add_event(incident(step))

    told = list(run_events(history, run=trained))

    assert [event.command[-2:] for event in told] == ["10", "11", "12", "13", "14", ""]
    assert told[-1].text == "and 11 more"


def test_a_summary_without_problems_says_that_the_run_went_back(eventful, trained, make_console, written):
    console = make_console(width=80)

    print_summary(console, eventful, (), run_dir=trained)

    text = written(console)
    assert text.startswith("✔ no problems found")
    told = " ".join(text.split())
    assert f"rewind {REWIND.text} skipped {LEFT_OUT.text} incident gradwatch replay" in told
    command = f"  incident gradwatch replay {trained} --step 21"
    assert command in text.splitlines(), "to be copied whole"


def test_a_diagnosis_says_it_too(eventful, trained, make_console, written):
    console = make_console()

    print_diagnosis(console, eventful, (), run=trained)

    assert f"gradwatch replay {trained} --step 21" in written(console)


def test_programs_get_all_events_and_the_commands(eventful, trained):
    data = json.loads(dumps(eventful, (), run=trained))

    assert [event["kind"] for event in data["events"]] == [SOFTMAX.kind, "incident", "rewind", "batch-left-out"]
    assert data["incidents"] == [{"step": 21, "replay": f"gradwatch replay {trained} --step 21"}]


def test_the_report_has_them_at_the_top(eventful, trained):
    text = page(eventful, (), run=trained)

    told = re.search(r'<dl class="events".*?</dl>', text)
    assert told
    assert "the loss became &lt;inf&gt;; went back" in told[0], "whatever a text holds, it is no markup"
    assert f"<code>gradwatch replay {trained} --step 21</code>" in told[0]
    assert told.start() < text.index('<section id="findings"')
    assert '<dl class="events"' not in page(Synthetic(layers=3, steps=60).history(), ())
