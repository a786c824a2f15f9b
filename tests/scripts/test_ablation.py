"""Switching off one mechanism at a time on kept runs."""

import fnmatch
import importlib

import pytest
import yaml

from gradwatch.history.disk.writer import Writer
from gradwatch.history.synthetic.builder import Synthetic
from scripts.fault_zoo.mechanisms import Mechanism, lines_of_function, mechanisms
from scripts.studies import ablation
from scripts.studies.ablation import Effect, ablate, detect, find_mistakes, format_cases, format_table, sum_effects

VANISHING = "digits_mlp_sigmoid"
"""A case of the set `dev` whose fault is a vanishing gradient."""


@pytest.fixture
def kept(tmp_path):
    """Keep a run in which the gradient vanishes over depth, as the run of a case."""
    history = Synthetic(steps=40).vanishing(decades=8).history()
    writer = Writer(tmp_path / "dev" / VANISHING, history)
    writer.append()
    writer.close("finished")
    return tmp_path


def test_a_mechanism_that_alone_finds_a_fault_loses_it(kept):
    (run,) = ablate(kept)
    effects = {mechanism.name: effect for mechanism, effect in sum_effects([run]).items()}

    case = {f"dev/{VANISHING}"}
    assert run.judgement.is_found
    assert effects["vanishing-gradient"].lost == case
    assert effects["vanishing-gradient: find_fall_over_depth"].lost == case
    assert effects["dead-layer: find_frozen"] == Effect(), "it sees nothing in this run"


def test_an_ablation_ends_with_the_detectors_as_they_were():
    history = Synthetic(steps=40).vanishing(decades=8).history()
    before = detect(history)
    for mechanism in mechanisms():
        detect(history, without=mechanism)

    assert detect(history) == before
    assert [finding.kind for finding in before] == ["vanishing-gradient"]


def test_each_mechanism_is_named_once():
    names = [mechanism.name for mechanism in mechanisms()]

    assert len(names) == len(set(names))
    # a method, a function that marks tensors, a function that ends a finding, an event, a detector
    assert {
        "missing-zero-grad: left",
        "dead-layer: find_cliffs",
        "no-gradient: find_first_gradient",
        "event: graph-adversary",
        "overfitting",
    } <= set(names)


def test_the_lines_of_a_function_include_those_that_only_it_uses(tmp_path, monkeypatch):
    (tmp_path / "two_rules.py").write_text(
        "def find_one():\n    return _only_one() + _both()\n\n"
        "def find_two():\n    return _both()\n\n"
        "def _only_one():\n    return 1\n\n"
        "def _both():\n    return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rules = importlib.import_module("two_rules")

    assert lines_of_function(rules.find_one) == 4, "its own two lines, and those of `_only_one`"
    assert lines_of_function(rules.find_two) == 2


def test_a_mechanism_without_weight_needs_a_reason():
    idle, finder = Mechanism("idle: find_nothing"), Mechanism("dead-layer")
    effects = {idle: Effect(later=frozenset({"dev/a"})), finder: Effect(lost=frozenset({"dev/a"}))}

    assert find_mistakes(effects, {"idle: *": "promised"}) == []
    assert find_mistakes(effects, {}) == ["idle: find_nothing: it carries no weight, and has no reason"]
    assert find_mistakes(effects, {"idle: *": "promised", "dead-*": "promised"}) == [
        "dead-*: nothing without weight has this name"
    ]


def test_the_page_names_the_cases_that_only_a_mechanism_finds_or_raises():
    effects = {
        Mechanism("dead-layer", 12): Effect(
            runs=frozenset({"dev/a", "dev/b"}), lost=frozenset({"dev/a"}), alarms=frozenset({"dev/b"})
        ),
        Mechanism("event: heads"): Effect(),
    }

    assert format_cases(effects) == "- dead-layer: finds dev/a; alarms dev/b"
    assert format_table(effects, {"event: *": "one run has no heads"}).splitlines()[2:] == [
        "| dead-layer | 12 | 2 | 1 |  |  |  | 1 |  |  |",
        "| event: heads |  |  |  |  |  |  |  |  | one run has no heads |",
    ]


def test_the_reasons_name_mechanisms():
    names = [mechanism.name for mechanism in mechanisms()]

    for pattern in yaml.safe_load(ablation.KEPT.read_text()):
        assert fnmatch.filter(names, pattern), pattern
