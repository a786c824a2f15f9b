"""Sentences of the report: code, links, and nothing that could be read as markup."""

import pytest

from gradwatch.render.report.text import code, prose


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("Run `gradwatch replay`, or `a < b`.", "Run <code>gradwatch replay</code>, or <code>a &lt; b</code>."),
        ("``torch.log(x)`` is one.", "<code>torch.log(x)</code> is one."),
        ("A lone ` stays.", "A lone ` stays."),
        ("See https://a.org/b.", 'See <a href="https://a.org/b" rel="noreferrer">https://a.org/b</a>.'),
        ("`<script>`", "<code>&lt;script&gt;</code>"),
    ],
)
def test_prose_marks_code_and_links_and_escapes_the_rest(text, html):
    assert prose(text) == html


def test_only_code_that_can_be_copied_has_a_button():
    assert "<button" not in code("x: 1")
    assert 'hidden aria-label="Copy the command"' in code("x: 1", copy="the command")
