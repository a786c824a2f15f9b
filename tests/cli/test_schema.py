"""`gradwatch schema`: JSON for editors."""

import json

from gradwatch.config import jsonschema


def test_the_schema_is_printed_as_it_is_committed(gradwatch, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")

    result = gradwatch("schema")

    assert (result.code, result.err) == (0, "")
    assert result.out == jsonschema.render_schema()
    assert json.loads(result.out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
