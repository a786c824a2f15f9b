"""Names in all the spellings that people write."""

import pytest

from gradwatch.config.names.signatures import Signature
from gradwatch.config.names.vocabulary import Entry, Vocabulary, fold, snake_case


def entry(name, *aliases, is_own=False, unusable=""):
    signature = Signature(name=name, parameters=(), unusable=unusable)
    return Entry(name=name, read=lambda: signature, aliases=aliases, is_own=is_own)


LOSSES = Vocabulary(
    noun="loss",
    used_in="loss.name",
    plural="losses",
    own=lambda: (entry("focal", is_own=True),),
    library=lambda: (entry("CrossEntropyLoss"), entry("MSELoss"), entry("Focal"), entry("CTCLoss", unusable="...")),
    library_noun="a loss of torch",
    suffix="Loss",
)


@pytest.mark.parametrize(
    "spelling",
    ["CrossEntropyLoss", "crossentropyloss", "cross_entropy_loss", "cross_entropy", "CrossEntropy", "CROSS-ENTROPY"],
)
def test_case_underscores_hyphens_and_the_ending_do_not_matter(spelling):
    found = LOSSES.find(spelling)

    assert found is not None
    assert found.name == "CrossEntropyLoss"


def test_another_name_is_not_found():
    assert LOSSES.find("cross") is None


def test_an_alias_finds_its_entry():
    detectors = Vocabulary(
        noun="detector", plural="detectors", used_in="detect", own=lambda: (entry("dead-layer", "GW103"),)
    )

    assert detectors.find("gw103") is not None
    assert detectors.find("DeadLayer") is not None


def test_own_names_come_before_a_library_s_and_hide_its_equals():
    assert [e.name for e in LOSSES.entries()] == ["focal", "CrossEntropyLoss", "MSELoss", "CTCLoss"]
    assert LOSSES.find("Focal").is_own


def test_the_library_is_not_looked_at_where_an_own_name_is_meant():
    def library():
        raise AssertionError("read")

    vocabulary = Vocabulary(
        noun="model", plural="models", used_in="model.name", own=lambda: (entry("mlp"),), library=library
    )

    assert vocabulary.find("MLP").name == "mlp"


def test_a_message_lists_few_names_without_those_that_cannot_be_used():
    assert LOSSES.expected() == "one of focal, CrossEntropyLoss, MSELoss"


def test_a_message_says_where_to_see_many_names():
    many = tuple(entry(f"resnet{i}") for i in range(31))
    models = Vocabulary(
        noun="model",
        plural="models",
        used_in="model.name",
        own=lambda: (entry("mlp"),),
        library=lambda: many,
        library_noun="a model",
    )

    assert models.expected() == "one of mlp, or a model (`gradwatch list models` shows all)"


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("CrossEntropyLoss", "cross_entropy"),
        ("MSELoss", "mse"),
        ("BCEWithLogitsLoss", "bce_with_logits"),
        ("L1Loss", "l1"),
        ("resnet18", "resnet18"),
    ],
)
def test_snake_case_splits_words_and_keeps_acronyms_whole(name, snake):
    assert snake_case(name, suffix="Loss") == snake


def test_folding_keeps_letters_and_digits():
    assert fold("ResNet-18 v_2") == "resnet18v2"
