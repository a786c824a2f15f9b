"""Values, types and near names in plain English."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

from gradwatch.config.sections.base import Section
from gradwatch.config.wording import Expected, describe, describe_unknown, list_choices, show, suggest, suggest_choice


class Clip(Section):
    norm: float = 1.0
    value: float = 1.0


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (int | float, "a number"),
        (bool, "true or false"),
        (str, "text"),
        (Path, "a path"),
        (Any, "a value"),
        (PositiveInt, "a whole number of at least 1"),
        (Annotated[int, Field(ge=0)], "a whole number of at least 0"),
        (Annotated[float, Field(gt=0, lt=1)], "a number above 0 and below 1"),
        (Annotated[float, Field(le=2)], "a number at most 2"),
        (Literal["fp32", "bf16"], "one of fp32, bf16"),
        (Literal["none"], "'none'"),
        (int | None, "a whole number, or null"),
        (bool | Clip, "true or false, or a mapping with norm, value"),
        (list[float], "a list, each a number"),
        (tuple[float, float], "a list of 2, each a number"),
        (tuple[int, str], "a list of 2: a whole number, text"),
        (tuple[int, ...], "a list, each a whole number"),
        (dict[str, int], "a mapping"),
        (Annotated[str, Expected("auto or cpu")], "auto or cpu"),
    ],
)
def test_a_type_is_described_in_words(allowed, words):
    assert describe(allowed) == words


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("fp8", "'fp8'"),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (0.0003, "0.0003"),
        ([1, "a", None], "[1, a, null]"),
        ({"norm": 1.0}, "{norm: 1.0}"),
        ("", "''"),
    ],
)
def test_a_value_is_shown_as_yaml(value, shown):
    assert show(value) == shown


def test_a_long_value_is_cut():
    assert show("x" * 500) == "'" + "x" * 56 + "..."


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("learning_rate", ["lr", "betas", "eps"], "lr"),
        ("wd", ["lr", "weight_decay"], "weight_decay"),
        ("num_workers", ["workers", "batch_size"], "workers"),
        ("warmup", ["warmup_steps", "per"], "warmup_steps"),
        ("cosine", ["step", "cosine_annealing"], "cosine_annealing"),
        ("max_steps", ["steps", "epochs"], "steps"),
        ("precison", ["precision", "epochs"], "precision"),
        ("Precison", ["precision", "epochs"], "precision"),
        ("vanishing", ["dead-layer", "vanishing-gradient"], "vanishing-gradient"),
    ],
)
def test_the_name_that_was_probably_meant_is_suggested(name, known, meant):
    assert suggest(name, known) == f"did you mean '{meant}'?"


@pytest.mark.parametrize(
    ("value", "choices", "meant"),
    [
        ("rellu", ["relu", "gelu", "tanh"], "relu"),
        ("fp8", ["fp32", "bf16", "fp16"], "fp16"),
        ("sqr", ["none", "sqrt"], "sqrt"),
        ("BF16", ["fp32", "bf16", "fp16"], "bf16"),
    ],
)
def test_the_choice_that_was_probably_meant_is_suggested(value, choices, meant):
    assert suggest_choice(value, choices) == f"did you mean '{meant}'?"


@pytest.mark.parametrize(("value", "choices"), [("ignore", ["skip", "stop"]), (3, ["skip"]), ("skip", [])])
def test_no_choice_is_suggested_if_none_is_near(value, choices):
    assert suggest_choice(value, choices) == ""


def test_nothing_is_suggested_where_nothing_is_near():
    assert suggest("zebra", ["lr", "betas"]) == ""


def test_an_unknown_key_says_whose_setting_it_is_not_and_what_there_is():
    problem = describe_unknown("learning_rate", owner="AdamW", known=["lr", "betas"])

    assert str(problem) == "learning_rate: unknown setting of AdamW, expected one of lr, betas; did you mean 'lr'?"


def test_few_names_are_listed_without_one_of():
    assert (list_choices(["a"]), list_choices(["a", "b"]), list_choices([])) == ("'a'", "one of a, b", "none")
