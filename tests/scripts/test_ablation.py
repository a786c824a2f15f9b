"""Switching off one mechanism at a time on kept runs."""

import pytest

from gradwatch.history.disk.writer import Writer
from gradwatch.history.synthetic.builder import Synthetic
from scripts.studies.ablation import ablate, detect, find_functions

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
    effects = {mechanism.name: effect for mechanism, effect in ablate(kept).items()}

    case = {f"dev/{VANISHING}"}
    assert effects["vanishing-gradient"].lost == case
    assert effects["vanishing-gradient: find_fall_over_depth"].lost == case
    assert effects["vanishing-gradient: find_hidden_softmax"].lost == set(), "it sees nothing in this run"


def test_an_ablation_ends_with_the_detectors_as_they_were():
    history = Synthetic(steps=40).vanishing(decades=8).history()
    before = detect(history)
    for mechanism in find_functions():
        detect(history, without=mechanism)

    assert detect(history) == before
    assert [finding.kind for finding in before] == ["vanishing-gradient"]


def test_each_function_is_named_once():
    names = [mechanism.name for mechanism in find_functions()]

    assert len(names) == len(set(names))
    assert len(names) > 40
