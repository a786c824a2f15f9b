"""Bytes and time by module stand in the report; what is damaged or not a table is left out."""

import json

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.render.report.module_table import FILE, ModuleTable
from gradwatch.render.report.page import page

ROW = {
    "name": "blocks.0.<fc>",
    "type": "Linear",
    "outputs": [[32, 8], [32]],
    "parameters": 12_345,
    "saved_bytes": 2_540_000,
    "flops": 5e9,
    "forward_ms": 1.5,
    "backward_ms": None,
}
TABLE = ModuleTable(step=7, device="cpu", peak_bytes=3_000_000, modules=[ROW])


def test_a_row_has_the_shapes_the_bytes_and_the_times():
    html = TABLE.to_html()

    assert '<th scope="row">blocks.0.&lt;fc&gt;</th><td>Linear</td><td>32x8, 32</td>' in html
    assert '<td class="number">12,345</td><td class="number">2.54 MB</td>' in html
    assert html.endswith('<td class="number">1.50 ms</td><td class="number"></td></tr></tbody></table></div>')


def test_the_table_of_a_run_stands_in_its_report(tmp_path):
    history = Synthetic(layers=1, steps=20).history()
    without = page(history, (), run=tmp_path)
    TABLE.write(tmp_path)

    shown = page(history, (), run=tmp_path)

    assert 'id="modules"' not in without
    assert TABLE.to_html() in shown
    assert '<a href="#modules">Modules</a>' in shown


def test_what_is_no_table_is_left_out(tmp_path):
    whole = json.loads((TABLE.write(tmp_path), (tmp_path / FILE).read_text())[1])
    damaged = [{**whole, "step": "<b>"}, {**whole, "modules": [{**ROW, "saved_bytes": "<b>"}]}, {"step": 1}, []]

    for text in ("", *map(json.dumps, damaged)):
        (tmp_path / FILE).write_text(text)
        assert ModuleTable.read(tmp_path) is None, text
