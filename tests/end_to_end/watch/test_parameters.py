"""Several optimizers, several models, and parameters that are odd, shared or come later."""

import warnings

import numpy as np
import pytest
import torch
from end_to_end.watch.loops import EVERY, batches, clear_last, loss_of, make, norms, record
from torch import nn

import gradwatch


def test_a_gan_has_each_optimizers_gradients_as_they_were_before_its_own_update(monitors, watch):
    expected = {}

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            expected.setdefault(self.defaults["lr"], []).append(norms(self.param_groups[0]["params"]))

    generator, critic = make(), make(1)
    opt_g, opt_c = Spy(generator.parameters(), lr=0.1), Spy(critic.parameters(), lr=0.2)
    with watch({"g": generator, "c": critic}, [opt_g, opt_c]) as monitor:
        for x, _ in batches():
            fake = nn.functional.pad(generator(x), (0, 3))
            for _ in range(2):
                opt_c.zero_grad()
                (critic(fake.detach()).mean() - critic(x).mean()).backward()
                monitor.observe()  # the generator's gradients are old, and will be read again
                opt_c.step()
            opt_g.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            opt_g.step()
            monitor.step(loss)
    history = monitor.history

    found = history["grad.l2"]
    assert history.param.layers[0].startswith("g.")
    np.testing.assert_allclose(found[:, :6], expected[0.1], rtol=1e-5)
    np.testing.assert_allclose(found[:, 6:], expected[0.2][1::2], rtol=1e-5)
    assert (history["lr.0"] == 0.1).all()
    assert (history["lr.1"] == 0.2).all()


def test_two_optimizers_of_one_model_share_one_observation():
    def make_two(model):
        return [torch.optim.SGD(model[:3].parameters(), lr=0.1), torch.optim.Adam(model[3:].parameters(), lr=0.01)]

    def update(model, optimizers, monitor, loss):
        model.zero_grad()
        loss.backward()
        monitor.observe()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
        monitor.step(loss)

    history, expected = record(update, make_optimizer=make_two)

    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)
    np.testing.assert_allclose(history["grad_norm.after_clip"], 0.01, rtol=1e-3)


def test_a_parameter_in_two_optimizers_is_read_for_both():
    def make_two(model):
        return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[:4].parameters(), lr=0.01)]

    def update(model, optimizers, monitor, loss):
        loss.backward()
        optimizers[monitor.next_step % 2].step()
        model.zero_grad()
        monitor.step(loss)

    history, expected = record(update, make_optimizer=make_two)

    np.testing.assert_allclose(history["grad.l2"][:, :4], expected[:, :4], rtol=1e-5)
    np.testing.assert_allclose(history["grad.l2"][::2, 4:], expected[::2, 4:], rtol=1e-5)


def test_only_the_generator_is_watched_while_the_critic_trains_through_it():
    generator, critic = make(), make(1)
    opt_g, opt_c = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    expected = []
    with gradwatch.watch(generator, opt_g) as monitor:
        for x, _ in batches():
            fake = nn.functional.pad(generator(x), (0, 3))
            critic(fake).mean().backward(retain_graph=True)  # reaches the generator
            opt_c.step()
            opt_g.zero_grad()
            opt_c.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            expected.append(norms(generator.parameters()))
            opt_g.step()
            monitor.step(loss)

    np.testing.assert_allclose(monitor.history["grad.l2"], expected, rtol=1e-5)


class Odd(nn.Module):
    """Tied, frozen, sparse and complex parameters, a buffer, and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.body = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.body.weight
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.ones(2))
        self.absent = nn.Parameter(torch.empty(3, device="meta"))

    def forward(self, tokens):
        hidden = self.norm(self.frozen(self.tied(self.body(self.table(tokens).mean(1)).relu())))
        return (hidden * self.phase).abs().mean()


def test_odd_parameters_have_their_places():
    model = Odd()
    dense = [p for n, p in model.named_parameters() if n not in ("table.weight", "absent")]
    optimizers = [torch.optim.SparseAdam(model.table.parameters(), lr=0.01), torch.optim.SGD(dense, lr=0.01)]
    requires_grad = [p.requires_grad for p in model.parameters()]
    expected = []
    with gradwatch.watch(model, optimizers, schedule=EVERY) as monitor:
        for step in range(4):
            model.train(step != 2)
            loss = model(torch.arange(6).reshape(3, 2) + step % 2)
            loss.backward()
            expected.append(
                [
                    float("nan") if p.grad is None else torch.linalg.vector_norm(p.grad.to_dense()).item()
                    for p in model.parameters()
                ]
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss, batch={"tokens": [torch.arange(6), None, "text"]}, val_loss=None)
            assert model.training == (step != 2)
    history = monitor.history

    assert list(history.param.layers) == [name for name, _ in model.named_parameters()]
    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)
    assert np.isfinite(history["update.ratio"][:, history.param.layers.index("phase")]).all()
    assert [p.requires_grad for p in model.parameters()] == requires_grad
    assert not monitor.attempts.warned


def test_parameters_that_come_later_are_reported_once_and_left_out():
    def update(model, optimizer, monitor, loss):
        if monitor.next_step in (2, 3):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 1.0})
        clear_last(model, optimizer, monitor, loss)

    with pytest.warns(RuntimeWarning, match="1 parameters came to the optimizer after gradwatch attached") as caught:
        history, expected = record(update)

    assert len([w for w in caught if "after gradwatch" in str(w.message)]) == 1
    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)


def test_a_layer_that_is_unfrozen_later_is_watched():
    model = make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3:].parameters(), lr=0.1)
    with warnings.catch_warnings(), gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        warnings.simplefilter("error")
        for step, (x, y) in enumerate(batches()):
            if step == 3:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters()})
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)

    assert np.isnan(monitor.history["grad.l2"][:3, 0]).all()
    assert np.isfinite(monitor.history["grad.l2"][3:, 0]).all()
