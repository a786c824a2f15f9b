"""A model's parameters are listed once, in order, with what owns and what optimizes them."""

import pytest
import torch
from torch import nn

from gradwatch.errors import GradwatchError
from gradwatch.probe.parameters import list_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_parameters_come_in_the_order_of_the_model_and_tied_ones_once():
    model = Tied()

    params, infos = list_parameters(model)

    names = ["embed.weight", "block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias"]
    assert [i.name for i in infos] == names, "the head's weight is the embedding's"
    assert [id(p) for p in params] == [id(p) for p in model.parameters()], "the very parameters"


def test_each_parameter_knows_its_module_shape_and_dtype():
    _, infos = list_parameters(nn.Sequential(nn.Conv2d(3, 8, 5, bias=False).bfloat16()).requires_grad_(False))

    (info,) = infos
    assert (info.module, info.module_type, info.shape) == ("0", "Conv2d", (8, 3, 5, 5))
    assert (info.dtype, info.trainable, info.group) == ("bfloat16", False, None)


def test_groups_are_counted_over_all_optimizers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    first = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}], lr=0.1)
    second = torch.optim.AdamW([model[1].weight])

    _, infos = list_parameters(model, [first, second])

    assert [i.group for i in infos] == [0, 1, 2, None, None], "None where no optimizer holds it"


def test_several_models_prefix_their_names():
    critic = nn.Sequential(nn.Linear(2, 1, bias=False))

    _, infos = list_parameters({"generator": nn.Linear(2, 2, bias=False), "critic": critic})

    assert [(i.name, i.module) for i in infos] == [("generator.weight", "generator"), ("critic.0.weight", "critic.0")]


def test_wrappers_leave_no_trace_in_the_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    _, infos = list_parameters(torch.compile(model, backend="eager"))

    assert [i.name for i in infos] == ["0.weight", "0.bias"], "no _orig_mod"


def test_a_parameter_without_shape_is_a_mistake_with_a_way_out():
    with pytest.raises(GradwatchError, match=r"'0\.weight' has no shape yet.*run one batch"):
        list_parameters(nn.Sequential(nn.LazyLinear(3)))
