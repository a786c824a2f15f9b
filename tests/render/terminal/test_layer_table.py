"""The table of the layers."""

import re

import pytest

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity
from gradwatch.render.common.sparkline import UNICODE
from gradwatch.render.terminal.layer_table import layer_table


@pytest.fixture
def table(make_console, written):
    def lines(history, width=80):
        console = make_console(width=width)
        console.print(layer_table(history, UNICODE, width=width))
        return written(console).splitlines()

    return lines


def test_large_models_show_the_sick_layers_and_group_the_rest(table, vanishing):
    lines = table(vanishing.history)

    rows = [line for line in lines if re.match(r"✖ layers\.\d+ ", line)]
    shown = [int(row.split()[1].removeprefix("layers.")) for row in rows]
    assert len(shown) == 12
    assert shown == sorted(shown), "in the order of the model"
    assert set(shown) <= set(range(14)), "the sick ones"
    assert all("vanishing-gradient" in row for row in rows)
    assert any(re.match(r"▲ acts\.0 +saturated-activation", line) for line in lines)
    assert "12 more layers" in [line.strip() for line in lines]


def test_the_table_tells_missing_broken_and_dead_gradients(table, broken):
    lines = table(broken.history, width=120)

    row = {line.split()[1]: line for line in lines if re.match(r"[✖▲ ]  layers\.", line) and line[0] != " "}
    assert re.search(r"NaN or Inf .*non-finite, step 100", row["layers.0"])
    assert re.search(r" 0  [▁-█·]+ .* 100 %  dead-layer, step 60", row["layers.3"])
    missing = next(line for line in lines if line.startswith("   layers.2"))
    assert re.search(r"layers\.2 +none ", missing), "no finding names it, so it has no mark"


def test_a_finding_on_a_module_marks_the_rows_of_the_layers_inside(table, make_finding):
    history = Synthetic(layers=12, steps=20).history()
    history.report(make_finding("dead-layer", layer="layers", step=9, severity=Severity.WARNING, code="GW1"))
    marked = [line for line in table(history) if line.startswith("▲")]
    assert len(marked) == 12

    other = Synthetic(layers=12, steps=20).history()
    other.report(make_finding("dead-layer", layer="layers.1", step=9, severity=Severity.WARNING, code="GW1"))
    assert [line.split()[1] for line in table(other) if line.startswith("▲")] == ["layers.1"], "not layers.10"
