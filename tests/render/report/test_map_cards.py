"""Maps of samples on a page: text by token, tables as bars, and what is kept beside a run."""

import re

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.render.report.map_cards import FILE, MapCard, MapCards
from gradwatch.render.report.page import page

TEXT = MapCard(
    title="sample 3",
    verdict="holds",
    headline="the map holds",
    tokens=[("a", 1.0), ("<", -0.25), ("\n", 0.0)],
    evidence=[("score", "1 < 2")],
)
TABLE = MapCard(title="sample 4", verdict="misleads", headline="the map misleads", bars=[("age", -2.0), ("x", 1.0)])


def test_each_token_has_the_color_of_its_value():
    html = MapCards("run", [TEXT]).to_html()

    assert '<span class="raises strength5" title="1.00">a</span>' in html
    # half as strong as the largest: the square root of a quarter
    assert re.search(r'<span class="lowers strength2" title="-0.25\d*">&lt;</span>', html)
    assert "<dt>score</dt><dd>1 &lt; 2</dd>" in html


def test_the_bars_of_a_table_grow_from_the_middle():
    html = MapCards("run", [TABLE]).to_html()

    assert '<rect class="lowers" x="0.0" y="1" width="100.0" height="10"/>' in html
    assert '<rect class="raises" x="100.0" y="1" width="50.0" height="10"/>' in html
    assert "badge warning" in html


def test_the_maps_of_a_run_stand_in_its_report(tmp_path):
    history = Synthetic(layers=1, steps=20).history()
    without = page(history, (), run=tmp_path)
    MapCards("run at step 3", [TEXT, TABLE]).write(tmp_path)

    shown = page(history, (), run=tmp_path)

    assert 'id="maps"' not in without
    assert shown.count('<div class="attribution">') == 2
    assert "run at step 3" in shown


def test_a_damaged_file_of_maps_is_left_out(tmp_path):
    for text in ("", "{}", '{"title": "x", "cards": [{"color": 1}]}'):
        (tmp_path / FILE).write_text(text)

        assert MapCards.read(tmp_path) is None
