"""The catalogue of events: every kind is described, checks its values, and reads runs that an older version wrote."""

import pytest

from gradwatch import events
from gradwatch.history.disk.events import EVENTS
from gradwatch.records import Event


@pytest.mark.parametrize("kind", events.KINDS.values(), ids=lambda kind: kind.name)
def test_each_kind_is_described_in_a_sentence_with_a_unit_for_each_value(kind):
    assert kind.meaning.endswith("."), "one sentence"
    assert kind.text
    assert "tape" not in f"{kind.name} {kind.meaning} {kind.text}", "people read: the autograd graph"
    assert all(isinstance(unit, str) for unit in kind.values.values())


def test_the_name_of_each_kind_is_its_own():
    kinds = [kind for kind in vars(events).values() if isinstance(kind, events.EventKind)]

    assert len(events.KINDS) == len(kinds)


def test_an_event_has_the_text_of_its_kind_and_plain_numbers():
    event = events.MIXED_AXES.emit(step=3, layer="head", values={"classes": 7}, outputs=5)

    text = "the softmax runs over 7 values that are not the 5 outputs of one position"
    assert event == Event(kind="graph-mixed", step=3, layer="head", text=text, values={"classes": 7.0})
    assert isinstance(event.values["classes"], float)


def test_a_value_that_the_kind_does_not_declare_is_refused():
    with pytest.raises(AssertionError, match=r"group-empty: got values \['goup'\], expected some of \['group'\]"):
        events.EMPTY_GROUP.observe(values={"goup": 0})


def test_heads_carry_a_value_for_each_parameter():
    observation = events.HEADS.observe(values={"mask.weight": 2, "depth.weight": 4}, heads=2)

    assert observation.values == {"mask.weight": 2.0, "depth.weight": 4.0}
    assert observation.text == "2 heads share the layers before them"


@pytest.mark.parametrize(
    ("old", "new"), [("tape-cut", events.CUT), ("tape-opponent", events.ADVERSARY), ("rewind", events.REWIND)]
)
def test_an_event_of_an_older_run_is_read_under_its_present_name(old, new):
    line = {"kind": old, "step": 4, "layer": "fc", "text": "said then", "values": {"first": 0, "last": 1}}

    event = EVENTS.decode(line)

    assert event == Event(kind=new.name, step=4, layer="fc", text="said then", values={"first": 0.0, "last": 1.0})
