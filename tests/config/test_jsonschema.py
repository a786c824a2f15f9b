"""The JSON schema: as committed, and in agreement with what loading a config says."""

import json
from functools import cache
from pathlib import Path

import pytest

from gradwatch.config import jsonschema
from gradwatch.config.names import registry

COMMITTED = Path(jsonschema.__file__).with_name("schema.json")


@pytest.fixture(scope="module")
def text():
    return jsonschema.render_schema()


@pytest.fixture(scope="module")
def made(text):
    return json.loads(text)


@cache
def schema_of_package():
    """Return the schema while `package` stands for gradwatch, the same in each test."""
    return jsonschema.make_schema()


def options(schema, section, name):
    """Return the settings that an editor offers beside a name."""
    (then,) = [
        rule["then"] for rule in schema["$defs"][section]["allOf"] if name in rule["if"]["properties"]["name"]["enum"]
    ]
    return then


def own(schema):
    """Return the part of a schema that does not depend on the versions of torch and torchvision."""
    plugins = {s for v in (registry.MODELS, registry.DATA) for e in v.own() for s in v.spellings(e)}
    rules = [
        rule["then"]["properties"]
        for section in ("ModelSection", "DataSection")
        for rule in schema["$defs"][section]["allOf"]
        if plugins & set(rule["if"]["properties"]["name"]["enum"])
    ]
    plain = {name: d for name, d in schema["$defs"].items() if name.endswith("Section") and "allOf" not in d}
    return rules, plain, schema["properties"], schema["required"]


def test_the_committed_schema_is_up_to_date(made, text):
    committed = json.loads(COMMITTED.read_text())
    advice = "run: gradwatch schema > gradwatch/config/schema.json"

    assert own(committed) == own(made), advice
    if committed["$comment"] == made["$comment"]:  # of the same torch and torchvision, all must be equal
        assert COMMITTED.read_text() == text, advice


def test_an_editor_is_offered_the_settings_of_the_name(package):
    schema = schema_of_package()

    then = options(schema, "ModelSection", "mlp")
    assert {"name", "target", "depth", "width", "activation"} <= then["properties"].keys()
    assert then["additionalProperties"] is False
    assert then["properties"]["depth"] == {"type": "integer", "default": 2, "description": "Number of layers."}
    assert then["properties"]["activation"]["enum"] == ["relu", "tanh"]


def test_a_setting_that_is_needed_is_required(package):
    then = options(schema_of_package(), "DataSection", "csv")

    assert then["required"] == ["file"]
    assert "batch_size" in then["properties"]


def test_groups_take_the_settings_of_their_optimizer(made):
    then = options(made, "OptimSection", "adamw")

    group = then["properties"]["groups"]["items"]
    assert {"match", "lr", "betas"} <= group["properties"].keys()
    assert group["additionalProperties"] is False
    assert "momentum" not in group["properties"]


def test_detectors_and_sinks_are_listed_with_their_settings(package):
    schema = schema_of_package()

    (detect, null) = schema["properties"]["detect"]["anyOf"]
    assert null == {"type": "null"}
    assert detect["properties"]["dead-layer"]["properties"].keys() == {"enabled", "every", "decades"}
    assert schema["properties"]["sinks"]["anyOf"][0]["properties"].keys() == {"tensorboard", "terminal"}


def test_names_are_offered_as_stored_and_as_usually_written(made):
    names = made["$defs"]["LossSection"]["properties"]["name"]["enum"]

    assert {"CrossEntropyLoss", "cross_entropy"} <= set(names)
    assert "CTCLoss" not in names, "it cannot be used"


def test_texts_of_other_projects_are_not_copied_into_the_schema(made):
    library = options(made, "ModelSection", "alexnet")["properties"]

    assert not any("description" in v for v in library.values() if isinstance(v, dict))


def test_the_schema_is_strict_json(text):
    schema = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["type"] == "object"


CONFIG = {
    "model": {"name": "mlp", "depth": 3},
    "data": {"name": "mnist", "root": "x", "augment": ["random_horizontal_flip", {"RandomCrop": {"size": 4}}]},
    "optim": {"name": "adamw", "lr": 0.1, "groups": [{"match": "*.bias", "weight_decay": 0}]},
    "schedule": None,
    "loss": {"name": "cross_entropy"},
    "train": {"steps": 3},
    "detect": {"dead-layer": {"enabled": False}},
}


def test_a_validator_accepts_what_loads(package):
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema_of_package())

    assert [e.message for e in validator.iter_errors(CONFIG)] == []


REFUSED = [
    ("model", {"name": "mlp", "dept": 3}),
    ("model", {"name": "mlp", "depth": "x"}),
    ("model", {"name": "mpl"}),
    ("model", {"name": "mlp", "target": "a:b"}),
    ("model", {}),
    ("data", {"name": "mnist", "augment": ["Foo"]}),
    ("data", {"name": "mnist", "augment": ["RandomCrop"]}),
    ("optim", {"name": "adamw", "momentum": 0.9}),
    ("optim", {"name": "adamw", "groups": [{"match": "a", "momentum": 0.9}]}),
    ("train", {"steps": 1, "epochs": 1}),
    ("train", {"steps": 1, "precision": "fp8"}),
    ("detect", {"dead-lair": {}}),
    ("optimizer", {}),
]


def test_a_validator_refuses_what_does_not_load(package):
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema_of_package())

    assert [(section, change) for section, change in REFUSED if validator.is_valid(CONFIG | {section: change})] == []
