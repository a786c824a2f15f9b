"""Events: bounded in memory, on disk at once, seen again when detectors are."""

import json

from gradwatch.events import CHANCE, MODE_TRAINING
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import MAX_EVENTS, History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.ingest import Ingest
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Event


def event(step=5, **changes):
    return Event(
        **{"kind": "rewind", "step": step, "layer": "l0", "text": "back to step 3", "values": {"to": 3.0}} | changes
    )


def test_a_history_holds_only_so_many_and_the_last_says_that_there_were_more(run_info):
    history = History(run_info())
    kept = [history.add_event(event(step)) for step in range(MAX_EVENTS + 7)]

    assert len(history.events) == MAX_EVENTS
    assert history.events[: MAX_EVENTS - 1] == [event(step) for step in range(MAX_EVENTS - 1)]
    assert history.events[-1].kind == "events-dropped"
    assert kept == [*history.events, *[None] * 7]


def test_truncate_forgets_events_after_a_step(recorded):
    history = recorded(40)
    history.add_event(event(10))
    history.add_event(event(30))
    history.truncate(20)
    assert history.events == [event(10)]


def test_state_restores_events(recorded, run_info):
    history = recorded(9)
    history.add_event(event(5))
    copy = History(run_info())
    copy.restore(json_trip(history.state()))
    assert copy.events == [event(5)]


def json_trip(state):
    return state | {"events": json.loads(json.dumps(state["events"]))}


def test_what_is_noted_is_on_disk_at_once_and_once(tmp_path, run_info, append):
    history = History(run_info())
    with Writer(tmp_path / "run", history) as writer:
        pipeline = Ingest(history, writer=writer)
        pipeline.add_event(event(0))
        append(history, 0)
        writer.append()
        assert read(tmp_path / "run").events == [event(0)]
        for step in range(MAX_EVENTS + 3):
            pipeline.add_event(event(step))

    assert read(tmp_path / "run").events == history.events


def test_a_resumed_run_has_the_events_up_to_its_step(tmp_path, run_info, append):
    history = History(run_info())
    with Writer(tmp_path / "run", history) as writer:
        pipeline = Ingest(history, writer=writer)
        for step in range(8):
            pipeline.add_event(event(step))
            append(history, step)
            writer.append()

    writer, resumed = Writer.resume(tmp_path / "run", 4)
    writer.close()
    assert resumed.events == [event(step) for step in range(5)]
    assert read(tmp_path / "run").events == resumed.events


class Listens:
    """A detector that remembers what it was shown."""

    kind, code, every = "listens", "GW000", 1

    def __init__(self):
        self.seen = []

    def detect(self, history):
        self.seen.append((history.step, [e.step for e in history.events]))
        return iter(())


def test_detectors_that_run_anew_see_each_event_at_its_step():
    stored = (
        Synthetic(steps=6)
        .add_event(CHANCE, step=0)
        .add_event(MODE_TRAINING, step=3, layer="drop", values={"p": 0.5})
        .history()
    )
    stored.add_event(event(99))
    listens = Listens()

    again = redetect(stored, [listens])

    assert listens.seen == [(0, [0]), (1, [0]), (2, [0]), (3, [0, 3]), (4, [0, 3]), (5, [0, 3])]
    assert again.events == stored.events, "one of a later step than the last row is not lost"
