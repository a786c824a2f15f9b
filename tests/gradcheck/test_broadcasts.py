"""Shapes that pair every sample with all others are told, and pairs that somebody made on purpose are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch


class Scores(nn.Module):
    """A column of scores, next to numbers of the samples; `combine` is what a case does with the two."""

    def __init__(self, combine):
        super().__init__()
        self.head, self.combine = nn.Linear(6, 1), combine

    def forward(self, x):
        return self.combine(self.head(x), x.mean(1))


UNINTENDED = {
    "product": lambda column, row: column * row,
    "reflected_difference": lambda column, row: row - column,
    "function": lambda column, row: torch.maximum(column, row),
    "after_an_elementwise_operation": lambda column, row: (column + 1).tanh() / row.exp(),
    "kept_axis_of_a_sum": lambda column, row: column.sum(1, keepdim=True) * row,
    "loss": lambda column, row: F.mse_loss(column, row),
}
ON_PURPOSE = {
    "index_of_none": lambda column, row: row[:, None] - row + column,
    "unsqueeze": lambda column, row: column.squeeze(-1).unsqueeze(1) - row,
    "unsqueeze_and_scaled": lambda column, row: (row.unsqueeze(1) * 2) - column.squeeze(-1),
    "outer": lambda column, row: torch.outer(column.squeeze(-1), row),
    "two_columns": lambda column, row: column * column.T,
    "row_made_to_a_row": lambda column, row: column * row.unsqueeze(0),
    "view_of_itself": lambda column, row: row.view(-1, 1) - row + column,
    "mask": lambda column, row: (column[:, None, :] + torch.zeros(1, 3, 1)) * (row[:, None, None] > 0),
    "column_to_column": lambda column, row: column * row.unsqueeze(1),
    "distances": lambda column, row: torch.cdist(column, row.unsqueeze(1)),
}


def told(combine):
    model = Scores(combine)
    found = gradwatch.check(lambda x: model(x).square().mean(), torch.randn(5, 6), model=model)
    return [note for note in found.notes if "every sample meets every other one" in note]


@pytest.mark.parametrize("name", UNINTENDED)
def test_a_column_against_a_row_is_reported_with_its_line(name):
    notes = told(UNINTENDED[name])

    line = UNINTENDED[name].__code__.co_firstlineno
    assert len(notes) == 1
    assert "(5, 1) with (5,) to (5, 5)" in notes[0]
    assert notes[0].endswith(f"(tests/gradcheck/test_broadcasts.py:{line})")


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_pairs_on_purpose_are_not_reported(name):
    assert not told(ON_PURPOSE[name])


def test_the_module_is_named():
    model = nn.Sequential(nn.Linear(6, 6), Scores(UNINTENDED["product"]))

    found = gradwatch.check(lambda x: model(x).square().mean(), torch.randn(5, 6), model=model)

    assert found.notes[0].startswith("`mul` in `1` broadcasts (5, 1) with (5,)")


def test_other_sizes_than_the_batch_may_make_an_outer_product():
    model = nn.ParameterList([torch.randn(4, 1), torch.randn(4)])

    found = gradwatch.check(lambda x: (x * (model[0] * model[1]).sum()).mean(), torch.randn(5, 6), model=model)

    assert not found.notes
