"""`gradwatch schema`: JSON for editors."""

from gradwatch.config import jsonschema


def test_the_schema_is_printed_as_it_is_whatever_the_width(gradwatch, monkeypatch):
    text = '{"$schema": "https://json-schema.org/draft/2020-12/schema",\n "title": "[bold]"}\n'
    monkeypatch.setattr(jsonschema, "render_schema", lambda: text)
    monkeypatch.setenv("COLUMNS", "20")

    result = gradwatch("schema")

    assert (result.code, result.out, result.err) == (0, text, "")
