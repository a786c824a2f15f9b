"""What docstrings say, without their markup."""

import pytest

from gradwatch.config.docstrings import arguments, summary


@pytest.mark.parametrize(
    ("docstring", "first"),
    [
        ("Return it.", "Return it."),
        ("Return it. And more.\n\nMuch more.", "Return it."),
        ("Return what\n    is meant. More", "Return what is meant."),
        ("Return e.g. this", "Return e.g. this"),
        (
            "ResNet-18 from `Deep Residual Learning <https://arxiv.org/abs/1>`__.",
            "ResNet-18 from Deep Residual Learning.",
        ),
        ("Uses :class:`~torch.nn.Linear` and ``x``.", "Uses Linear and x."),
        ("", ""),
    ],
)
def test_the_summary_is_the_first_sentence_without_markup(docstring, first):
    assert summary(docstring) == first


def test_arguments_are_read_with_and_without_types_and_over_several_lines():
    docstring = """Do it.

    Args:
        depth: Number of layers,
            counted from one.
        width (int, optional): Units of a layer
        **kwargs: the rest

    Returns:
        out: not an argument
    """

    assert arguments(docstring) == {
        "depth": "Number of layers, counted from one.",
        "width": "Units of a layer",
        "kwargs": "the rest",
    }


def test_a_docstring_without_arguments_has_none():
    assert arguments("Do it.") == {}
