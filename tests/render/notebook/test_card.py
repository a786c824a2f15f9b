"""A run as a card in a notebook."""

import re
from html.parser import HTMLParser

import pytest
from reference import newest_row

from gradwatch.history.store import History
from gradwatch.records import RunInfo, Severity
from gradwatch.render.notebook.card import card


class _Reader(HTMLParser):
    """Reads text and tags, and complains of what is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def _read(page):
    reader = _Reader()
    reader.feed(page)
    assert not reader.open
    return reader


@pytest.mark.parametrize("name", ["healthy", "vanishing", "broken"])
def test_a_card_is_well_formed_and_begins_with_the_verdict(request, name):
    run = request.getfixturevalue(name)

    reader = _read(card(run.history, run.diagnoses))

    assert reader.text[0].startswith("✔ healthy" if name == "healthy" else "✖ ill: ")
    assert {"script", "link", "img", "style"}.isdisjoint(reader.tags)


def test_findings_come_in_order_of_harm_with_the_smallest_remedy(vanishing):
    text = " ".join(_read(card(vanishing.history, vanishing.diagnoses)).text)

    assert re.search(r"saturating activations in a deep stack\s+87 % sure", text)
    assert "model:\n  activation: relu" in text
    assert "Add normalisation" not in text
    assert text.index("✖ critical") < text.index("7 more"), "eight of fifteen, and how many there are besides"


def test_a_healthy_run_has_its_layers_and_no_list_of_findings(healthy):
    text = _read(card(healthy.history, ())).text

    assert [t for t in text if re.fullmatch(r"layers\.\d", t)] == [f"layers.{i}" for i in range(4)]
    assert "finding" not in text


def test_the_layers_that_matter_are_shown_in_the_order_of_the_model(vanishing):
    text = _read(card(vanishing.history, ())).text

    shown = [int(t.removeprefix("layers.")) for t in text if re.fullmatch(r"layers\.\d+", t)]
    assert shown == sorted(shown)
    assert len(shown) == 10
    assert "14 more layers" in text


def test_broken_and_missing_gradients_are_told(broken):
    text = _read(card(broken.history, ())).text

    assert "NaN or Inf" in text
    assert "none" in text


def test_everything_is_escaped(make_finding, healthy):
    history = History(RunInfo(name="<b>x</b>", created="", layers=healthy.history.info.layers))
    history.report(make_finding("<i>kind", layer='<img src="x">', step=1, severity=Severity.WARNING, code="GW1"))
    history.append(0, run={"loss": 1.0}, param_SL=newest_row(healthy.history.param))

    page = card(history, ())

    assert "<b>x" not in page
    assert "<i>kind" not in page
    assert "<img" not in page


def test_a_run_without_a_step_says_so():
    page = card(History(RunInfo(name="early", created="", layers=())), ())

    assert "nothing was recorded" in page
    assert "healthy" not in page
