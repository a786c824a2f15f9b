"""The decoder: shapes, causality, tied weights, initial sizes."""

import math

import pytest
import torch
from torch import nn

from gradwatch.errors import GradwatchError
from gradwatch.models import gpt
from gradwatch.records import DataSpec

TEXT = DataSpec(input_shape=(16,), outputs=50, kind="tokens")


def test_logits_have_a_row_for_each_position():
    model = gpt.build(TEXT, layers=2, heads=2, width=32)

    assert model(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 50)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 50), "shorter inputs are taken, too"


def test_a_position_sees_nothing_that_comes_after_it():
    torch.manual_seed(0)
    model = gpt.build(TEXT, layers=2, heads=2, width=32).eval()
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50

    before, after = model(tokens), model(changed)

    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6), "the past does not depend on the future"
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3), "but the changed positions do change"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_parameter(tied):
    model = gpt.build(TEXT, layers=1, heads=2, width=32, tied=tied)

    names = [name for name, _ in model.named_parameters()]
    assert ("head.weight" in names) is not tied
    assert (model.head.weight is model.token.weight) is tied


def test_untrained_it_guesses_evenly():
    torch.manual_seed(0)
    model = gpt.build(TEXT, layers=4, heads=4, width=64)
    tokens, targets = torch.randint(50, (2, 8, 16))

    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    assert loss.item() == pytest.approx(math.log(50), abs=0.2)


def test_weights_into_the_residual_stream_start_smaller_by_the_root_of_their_number():
    torch.manual_seed(0)
    model = gpt.build(TEXT, layers=8, heads=4, width=128)

    assert model.blocks[3].projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert model.blocks[3].attention.projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert model.blocks[3].expand.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_dropout_is_off_in_evaluation():
    model = gpt.build(TEXT, layers=1, heads=2, width=32, dropout=0.5)
    tokens = torch.randint(50, (2, 16))

    assert torch.equal(model.eval()(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (TEXT, {"heads": 3, "width": 32}, r"model\.heads: got 3, expected a divisor of the width 32"),
        (TEXT, {"layers": 0}, r"model\.layers: got 0"),
        (DataSpec(input_shape=(1, 8, 8), outputs=10, kind="classes"), {}, "gpt takes tokens, but the data has classes"),
    ],
)
def test_what_cannot_work_is_refused_by_name(spec, options, message):
    with pytest.raises(GradwatchError, match=message):
        gpt.build(spec, **options)
