"""Watching changes nothing: the same losses, weights and random numbers, no hook left, nothing kept alive."""

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from end_to_end.watch.loops import (
    EVERY,
    LOOPS,
    Nothing,
    batches,
    loss_of,
    make,
)

import gradwatch


def random_state():
    return torch.get_rng_state(), np.random.get_state()[1], random.getstate()


@pytest.mark.parametrize("loop", LOOPS)
def test_watching_changes_neither_losses_nor_weights_nor_random_numbers(loop, watch, monitors):
    random.seed(0)
    np.random.seed(0)
    expected_losses, expected = loop(lambda *args, **options: Nothing())
    expected_state = random_state()
    random.seed(0)
    np.random.seed(0)

    losses, models = loop(watch)

    assert losses == expected_losses
    for found, wanted in zip(models, expected, strict=True):
        for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(a, b), name
    found_state = random_state()
    assert torch.equal(found_state[0], expected_state[0]), "torch's random numbers"
    assert np.array_equal(found_state[1], expected_state[1]), "NumPy's random numbers"
    assert found_state[2] == expected_state[2], "Python's random numbers"
    assert monitors[0].history.step == len(losses) - 1, "one row per optimizer step"
    assert not monitors[0].attempts.warned, "nothing was switched off"


@pytest.mark.parametrize("loop", [*LOOPS, "raises"])
def test_every_hook_is_gone_afterwards(loop, watch):
    seen = []

    def remember(model, optimizer, **options):
        models = list(model.values()) if isinstance(model, dict) else [model]
        seen.extend([models, optimizer if isinstance(optimizer, list) else [optimizer]])
        return watch(model, optimizer, **options)

    if loop == "raises":
        model = make()
        with pytest.raises(ZeroDivisionError), remember(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
            1 / 0  # noqa: B018
        assert monitor.history.step == -1
    else:
        loop(remember)

    models, optimizers = seen
    for model in models:
        for name, module in model.named_modules():
            assert not module._forward_hooks, name
            assert not module._forward_pre_hooks, name
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    for optimizer in optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


class Mark:
    """Something that can be looked for."""


def test_neither_graph_nor_batch_is_kept():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive = []
    with gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        for x, y in batches():
            x = x.clone()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            graph = loss.grad_fn.metadata["mark"] = Mark()  # lives as long as the graph
            alive += [weakref.ref(t) for t in (x, loss, graph, model[0].weight.grad)]
            monitor.step(loss, batch=[x], val_loss=loss, grad_norm=loss)
            optimizer.zero_grad()
            del x, loss, graph
        gc.disable()  # nothing may wait for the collector of cycles
        try:
            assert not [r() for r in alive if r() is not None]
        finally:
            gc.enable()
