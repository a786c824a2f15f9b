"""Gradients that nothing clears are seen at the first updates and at later ones; loops that clear them are no news."""

import copy

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.probe.device import sync
from gradwatch.probe.gradients import zero_grad


def train(loop, *, updates=12):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer) as monitor:
        for _ in range(updates):
            loop(model, optimizer)
            monitor.step(1.0)
    return model, optimizer, monitor.history


def backward(model):
    model(torch.randn(5, 4)).square().mean().backward()


def forgetful(model, optimizer):
    backward(model)
    optimizer.step()


def clears_first(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def clears_last_with_zeros(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def accumulates(model, optimizer):
    for _ in range(3):
        backward(model)
    optimizer.step()
    model.zero_grad()


def train_rows(clears):
    """Train rows of a sparse table beside a dense layer, of which the layer is cleared, and the table where wanted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    sparse, dense = torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=1e-3)
    with gradwatch.watch(model, [sparse, dense]) as monitor:
        for _ in range(12):
            dense.zero_grad()
            clears(sparse)
            model(torch.randint(0, 9, (5,))).square().mean().backward()
            sparse.step()
            dense.step()
            monitor.step(1.0)
    return monitor.history


def kept(history):
    return [event.step for event in history.events if event.kind == "gradients-kept" and event.layer is None]


def test_a_loop_that_never_clears_is_found_at_its_fourth_step():
    history = train(forgetful)[2]

    assert kept(history) == list(range(1, 9))
    assert [(f.kind, f.step) for f in history.findings if f.kind == "missing-zero-grad"] == [("missing-zero-grad", 5)]


def clears_its_head(model, optimizer):
    model[2].zero_grad()
    backward(model)
    optimizer.step()


def clears_its_body(model, optimizer):
    model[0].zero_grad()
    backward(model)
    optimizer.step()


@pytest.mark.parametrize(("loop", "layer"), [(clears_its_head, "0.weight"), (clears_its_body, None)])
def test_a_loop_that_clears_a_part_of_the_model_is_found(loop, layer):
    found = [f for f in train(loop)[2].findings if f.kind == "missing-zero-grad"]

    assert [(f.layer, f.step) for f in found] == [(layer, 5)]


def test_sparse_gradients_that_nothing_clears_are_found():
    assert kept(train_rows(lambda _: None)) == list(range(1, 9))


@pytest.mark.parametrize("to_none", [True, False])
def test_sparse_gradients_that_are_cleared_are_not(to_none):
    assert not kept(train_rows(lambda sparse: sparse.zero_grad(set_to_none=to_none)))


@pytest.mark.parametrize("loop", [clears_first, clears_last_with_zeros, accumulates])
def test_a_loop_that_clears_is_not_reported(loop):
    assert not kept(train(loop)[2])


def test_a_gradient_that_another_loss_adds_to_before_it_is_cleared_is_none():
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    makes, judges = torch.optim.SGD(maker.parameters(), lr=1e-3), torch.optim.SGD(judge.parameters(), lr=1e-3)
    with gradwatch.watch({"maker": maker, "judge": judge}, [makes, judges]) as monitor:
        for _ in range(10):
            judges.zero_grad()
            judge(maker(torch.randn(3, 2)).detach()).mean().backward()
            judges.step()
            makes.zero_grad()
            judge(maker(torch.randn(3, 2))).mean().backward()  # reaches the judge as well
            makes.step()
            monitor.step(1.0)

    assert not kept(monitor.history)


def losses_of(model):
    out = model(torch.randn(5, 4))
    return [out.square().mean(), (out - 1).abs().mean()]


def grads_of(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def projected(one, other):
    """The first of two gradients without its part against the second, as PCGrad has it."""
    return one - min(float((one * other).sum()), 0.0) / float(other.square().sum() + 1e-12) * other


def assigns(model, optimizer):
    for param, grad in zip(model.parameters(), grads_of(losses_of(model)[0], model), strict=True):
        param.grad = grad
    optimizer.step()


def copies(model, optimizer):
    for param, grad in zip(model.parameters(), grads_of(losses_of(model)[0], model), strict=True):
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        param.grad.copy_(grad)
    optimizer.step()


def projects(model, optimizer):
    ones, others = (grads_of(loss, model) for loss in losses_of(model))
    for param, one, other in zip(model.parameters(), ones, others, strict=True):
        param.grad = projected(one, other) + projected(other, one)
    optimizer.step()


def projects_after_a_backward(model, optimizer):
    """Call backward, too, as for logging, and then write over what it added to."""
    one, other = losses_of(model)
    ones, others = grads_of(one, model), grads_of(other, model)
    (one + other).backward()
    for param, one, other in zip(model.parameters(), ones, others, strict=True):
        param.grad.copy_(projected(one, other))
    optimizer.step()


def adds_a_loss_to_what_it_assigned(model, optimizer):
    one, other = losses_of(model)
    for param, grad in zip(model.parameters(), grads_of(one, model), strict=True):
        param.grad = grad
    other.backward()
    optimizer.step()


def takes_them_from_a_copy(model, optimizer):
    worker = copy.deepcopy(model)
    backward(worker)
    for param, other in zip(model.parameters(), worker.parameters(), strict=True):
        param.grad = other.grad
    optimizer.step()


ASSIGNING = [
    assigns,
    copies,
    projects,
    projects_after_a_backward,
    adds_a_loss_to_what_it_assigned,
    takes_them_from_a_copy,
]


@pytest.mark.parametrize("loop", ASSIGNING)
def test_a_loop_that_writes_its_gradients_itself_is_not_reported(loop):
    history = train(loop, updates=40)[2]

    assert len(kept(history)) < 2, "the order of eight numbers may be the same once"
    assert not [finding for finding in history.findings if finding.kind == "missing-zero-grad"]


def clips(model, optimizer):
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def clips_values(model, optimizer):
    backward(model)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def replaces_them_by_their_mean(model, optimizer):
    backward(model)
    for param in model.parameters():
        param.grad = param.grad / 4
    optimizer.step()


def decays_within_the_step(model, optimizer):
    backward(model)
    optimizer.step()
    for param in model.parameters():
        param.grad.mul_(0.5)  # which is not to clear it


def looks_with_autograd_first(model, optimizer):
    assert grads_of(losses_of(model)[0], model)
    backward(model)
    optimizer.step()


@pytest.mark.parametrize(
    "loop", [clips, clips_values, replaces_them_by_their_mean, decays_within_the_step, looks_with_autograd_first]
)
def test_a_loop_that_scales_what_it_never_clears_is_found(loop):
    found = [f for f in train(loop)[2].findings if f.kind == "missing-zero-grad"]

    assert [(f.layer, f.step) for f in found] == [(None, 5)]


def test_an_optimizer_that_adds_its_decay_to_gradients_that_are_never_cleared_is_found():
    class Decaying(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.grad.add_(param, alpha=0.1)
                param.sub_(param.grad, alpha=1e-3)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = Decaying(model.parameters(), {})
    with gradwatch.watch(model, optimizer) as monitor:
        for _ in range(12):
            forgetful(model, optimizer)
            monitor.step(1.0)

    assert kept(monitor.history) == list(range(1, 9))


def train_long(clears):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer) as monitor:
        for step in range(60):
            clears(model, step)
            backward(model)
            optimizer.step()
            monitor.step(1.0)
    return [(f.layer, f.step) for f in monitor.findings() if f.kind == "missing-zero-grad"]


def clears_until_20(model, step):
    if step < 20:
        model.zero_grad()


def clears_the_head_and_thaws(model, step):
    if step == 20:
        model[0].requires_grad_(True)
    model[2].zero_grad()


def clears_all_but_two(model, step):
    if step not in (31, 32):
        model.zero_grad()


@pytest.mark.parametrize(
    ("clears", "found"),
    [
        (clears_until_20, [(None, 25)]),
        (clears_the_head_and_thaws, [("0.weight", 25)]),
        (clears_all_but_two, []),
    ],
)
def test_a_loop_that_ceases_to_clear_is_found_at_a_later_look(clears, found):
    assert train_long(clears) == found


def watched_hooks(own=False):
    """Per step of a loop that clears: the hooks of both parameters, those of the optimizer, and how often ours ran."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    called = []
    with gradwatch.watch(model, optimizer) as monitor:
        if own:
            model.weight.register_hook(lambda grad: called.append(grad.shape))
        for _ in range(25):
            clears_first(model, optimizer)
            monitor.step(1.0)
            hooks = [None if h is None else len(h) for h in (model.bias._backward_hooks, model.weight._backward_hooks)]
            yield hooks, len(optimizer._optimizer_step_pre_hooks), len(called)


def test_the_hooks_are_gone_between_two_looks_and_so_is_what_calls_them():
    seen = list(watched_hooks())

    assert [seen[step][:2] for step in (0, 19, 20, 23)] == [
        ([3, 1], 4),  # the checks of left gradients and of the order have hooks, too
        ([None, None], 1),
        ([1, 1], 3),
        ([None, None], 1),
    ]


def test_a_hook_of_the_user_stays_when_ours_go():
    seen = list(watched_hooks(own=True))

    assert [seen[step] for step in (0, 19, 20, 23)] == [
        ([3, 2], 4, 1),
        ([None, 1], 1, 20),
        ([1, 2], 3, 21),
        ([None, 1], 1, 24),
    ]


class Late(sync.HostTransfer):
    """A transfer of a device that is some steps late, and fails if it is waited for before the end."""

    is_over = False

    def __init__(self, tensors):
        super().__init__(tensors)
        self._questions = 0

    @property
    def is_ready(self):
        self._questions += 1
        return self._questions > 3

    def values(self):
        assert self._questions > 3 or self.is_over
        return super().values()


@pytest.mark.parametrize("loop", [forgetful, clears_first, clears_last_with_zeros, accumulates])
def test_a_device_that_is_late_gets_the_same_verdict_without_waiting(loop, monkeypatch):
    expected = [(event.kind, event.step, event.layer) for event in train(loop)[2].events]
    monkeypatch.setattr(zero_grad, "HostTransfer", Late)
    monkeypatch.setattr(zero_grad.ZeroGradCheck, "close", ending(zero_grad.ZeroGradCheck.close, monkeypatch))

    events = [(event.kind, event.step, event.layer) for event in train(loop)[2].events]

    assert sorted(events, key=str) == sorted(expected, key=str)


def ending(close, monkeypatch):
    """Return a method that waits for the transfers in flight, as only the end of a run does."""

    def end(check):
        monkeypatch.setattr(Late, "is_over", True)
        close(check)

    return end
