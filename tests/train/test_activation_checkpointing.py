"""Activations computed again give the same gradients, and nothing is counted twice."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gradwatch.errors import GradwatchError
from gradwatch.train import activation_checkpointing


class Net(nn.Module):
    def __init__(self, blocks=6, container=nn.Sequential):
        super().__init__()
        made = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)) for _ in range(blocks)]
        self.blocks = container(*made) if container is nn.Sequential else container(made)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        if isinstance(self.blocks, nn.Sequential):
            return self.head(self.blocks(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def grads_and_buffers(model, counter=None):
    torch.manual_seed(1)
    loss = model(torch.ones(4, 8) * torch.arange(4)[:, None]).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


CHOICES = {
    "every": lambda model: activation_checkpointing.every_blocks(model, 2),
    "sqrt": activation_checkpointing.sqrt_blocks,
    "modules": lambda model: activation_checkpointing.matching_modules(model, ["blocks.*"]),
    "without matmuls": lambda model: activation_checkpointing.matching_modules(model, ["blocks.*"], save="matmuls"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_and_running_statistics_are_the_very_same(choice):
    torch.manual_seed(0)
    plain = Net()
    saving = copy.deepcopy(plain)
    CHOICES[choice](saving)

    expected, found = grads_and_buffers(plain), grads_and_buffers(saving)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [n for n, _ in saving.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize(
    ("choice", "forwards"),
    # 6 blocks; of segments of 2, the last keeps what its backward pass needs at once
    [("every", 6 + 4), ("sqrt", 6 + 4), ("modules", 6 + 6)],
)
def test_all_but_the_last_segment_are_computed_twice(choice, forwards):
    model = Net()
    CHOICES[choice](model)
    calls = []
    for block in model.blocks:
        block[0].register_forward_hook(lambda *_: calls.append(1))

    grads_and_buffers(model)

    assert len(calls) == forwards


def test_segments_are_as_long_as_asked():
    # segments of 4 and 2 blocks, and three of 3 blocks; the last of each model is not recomputed
    assert activation_checkpointing.every_blocks(Net(blocks=6), 4) == 1
    assert activation_checkpointing.sqrt_blocks(Net(blocks=9)) == 2


def test_one_segment_of_all_blocks_is_a_mistake():
    with pytest.raises(GradwatchError, match=r"every: got 6, but the model has 6 blocks: one segment"):
        activation_checkpointing.every_blocks(Net(blocks=6), 6)


def test_kept_products_are_not_computed_again():
    def products(save):
        model = Net()
        activation_checkpointing.matching_modules(model, ["blocks.*"], save=save)
        with FlopCounterMode(display=False) as counter:
            grads_and_buffers(model)
        return counter.get_total_flops()

    of_blocks = 6 * 2 * 4 * 8 * 8  # the forward products of 4 samples
    assert products("nothing") - products("matmuls") == of_blocks


def test_blocks_in_a_module_list_are_computed_again_one_by_one():
    torch.manual_seed(0)
    plain = Net(container=nn.ModuleList)
    saving = copy.deepcopy(plain)

    assert activation_checkpointing.every_blocks(saving, 1) == 5
    expected, found = grads_and_buffers(plain), grads_and_buffers(saving)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_blocks_in_a_module_list_cannot_be_grouped():
    with pytest.raises(GradwatchError, match=r"nn.ModuleList, which it may call in any order"):
        activation_checkpointing.every_blocks(Net(container=nn.ModuleList), 2)


def test_a_model_without_blocks_and_a_pattern_without_match_say_what_to_do():
    with pytest.raises(GradwatchError, match=r"no nn\.Sequential or nn\.ModuleList"):
        activation_checkpointing.every_blocks(nn.Linear(2, 2), 1)
    with pytest.raises(GradwatchError, match=r"\['layers.\*'\] match no module; the model has blocks, head"):
        activation_checkpointing.matching_modules(Net(), ["layers.*"])


def test_nothing_is_computed_again_in_evaluation():
    model = Net().eval()
    CHOICES["sqrt"](model)
    calls = []
    model.blocks[0][0].register_forward_hook(lambda *_: calls.append(1))

    model(torch.ones(2, 8)).sum().backward()

    assert len(calls) == 1
