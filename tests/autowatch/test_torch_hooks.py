"""Hooks of torch that other code has wrapped are silent once they are removed."""

import types

import torch

from gradwatch.autowatch.torch_hooks import TorchHooks
from gradwatch.probe.policy.backward_calls import BACKWARD_LISTENERS


class PolicyReader:
    def before_backward(self, tensors):
        pass


def test_a_wrapped_hook_that_was_removed_first_is_silent():
    told = []
    listener = types.SimpleNamespace(
        on_optimizer=lambda optimizer: None,
        on_scaler=lambda scaler: None,
        on_backward=lambda tensors, gradients: told.append(tensors),
    )
    function, reader = torch.autograd.backward, PolicyReader()
    hooks = TorchHooks(listener)
    BACKWARD_LISTENERS.add(reader)
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    hooks.remove()
    BACKWARD_LISTENERS.remove(reader)
    try:
        x.sum().backward()
    finally:
        torch.autograd.backward = function

    assert len(told) == 1
