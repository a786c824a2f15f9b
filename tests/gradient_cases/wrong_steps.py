"""Training steps, hooks and modules with a planted mistake outside of any custom Function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gradient_cases.planting import planted
from gradient_cases.wrong_functions import squares


def classifier():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def labelled(n=6):
    return torch.randn(n, 4), torch.randint(0, 3, (n,))


def rate_in_the_gradient(model, batch, lr=0.05):
    x, y = batch
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(lr)  # mistake
    return loss.detach()


@planted("lr_scale", rate_in_the_gradient)
def step_that_scales_by_its_rate():
    return rate_in_the_gradient, classifier(), labelled()


def rate_in_the_loss(model, batch, learning_rate=0.01):
    x, y = batch
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (learning_rate * loss).backward()  # mistake
    return loss


@planted("lr_scale", rate_in_the_loss)
def step_that_differentiates_a_scaled_loss():
    return rate_in_the_loss, classifier(), labelled()


def sum_of_parts(model, batch, parts=4):
    model.zero_grad()
    losses = []
    for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # mistake
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@planted("accumulation", sum_of_parts)
def accumulation_without_its_division():
    return sum_of_parts, classifier(), labelled(8)


def sum_of_grads(model, batch, parts=2):
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    loss = 0.0
    for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        part = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(part, params)
        total = [t + g for t, g in zip(total, grads, strict=True)]
        loss = loss + part.detach() / parts
    for p, t in zip(params, total, strict=True):
        p.grad = t  # mistake
    return loss


@planted("accumulation", sum_of_grads)
def accumulation_by_hand_without_its_division():
    return sum_of_grads, classifier(), labelled(6)


def mean_of_means(model, batch):
    x, y, length = batch
    model.zero_grad()
    total, tokens = 0.0, length.sum()
    for i in range(len(x)):
        n = int(length[i])
        loss = F.cross_entropy(model(x[i, :n]), y[i, :n])
        (loss / len(x)).backward()  # mistake
        total = total + loss.detach() * n
    return total / tokens


@planted("token_mean", mean_of_means)
def sequences_of_unequal_length():
    return mean_of_means, classifier(), (torch.randn(3, 6, 4), torch.randint(0, 3, (3, 6)), torch.tensor([6, 2, 3]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(5, 5, bias=False)
        self.decode = nn.Linear(5, 5, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


def for_each_module(model, batch):
    loss = squares(model(batch))
    layers = [model.encode, model.decode]
    grads = torch.autograd.grad(loss, [layer.weight for layer in layers])
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    for layer, g in zip(layers, grads, strict=True):
        layer.weight.grad += g  # mistake
    return loss.detach()


@planted("double_count", for_each_module, "encode.weight", "decode.weight")
def tied_weight_counted_for_each_layer():
    return for_each_module, Tied(), torch.randn(6, 5)


def halve(grad):
    return grad * 0.5  # mistake


@planted("hook", halve, "0.weight")
def parameter_with_a_halving_hook():
    net = classifier()
    net[0].weight.register_hook(halve)
    return net, (torch.randn(6, 4),), squares


class HookedHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: 3 * g)  # mistake
        return self.second(hidden)


@planted("hook", HookedHidden, "forward", "<lambda>", "first.weight", "first.bias")
def activation_with_a_hook():
    return HookedHidden(), (torch.randn(6, 4),), squares


def damp(module, grad_input, grad_output):
    return tuple(0.1 * g if g is not None else None for g in grad_input)  # mistake


@planted("hook", damp, "0.weight", "0.bias", "1")
def module_with_a_backward_hook():
    net = classifier()
    net[1].register_full_backward_hook(damp)
    return net, (torch.randn(6, 4),), squares


class DetachedScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)

    def forward(self, x):
        hidden = self.first(x)
        scale = hidden.std(-1, keepdim=True).detach()  # mistake
        return hidden / scale


@planted("detach", DetachedScale, "forward", "first.weight", "first.bias")
def norm_with_a_detached_scale():
    return DetachedScale(), (torch.randn(6, 4),), lambda out: out.sin().sum()


class DetachedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).t()
        with torch.no_grad():
            weights = torch.softmax(scores, -1)  # mistake
        return (weights + 0.1 * scores) @ x


@planted("detach", DetachedWeights, "forward", "query.weight", "query.bias", "key.weight", "key.bias")
def attention_with_detached_weights():
    return DetachedWeights(), (torch.randn(6, 4),), squares


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.w2, self.b2 = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2))


def by_hand_with_a_mean(model, batch):
    x, y = batch
    hidden = torch.tanh(x @ model.w1 + model.b1)
    error = hidden @ model.w2 + model.b2 - y
    delta = 2 * error / error.numel()
    back = (delta @ model.w2.t()) * (1 - hidden**2)
    model.w2.grad = hidden.t() @ delta
    model.b2.grad = delta.sum(0)
    model.w1.grad = x.t() @ back
    model.b1.grad = back.mean(0)  # mistake
    return error.pow(2).mean().detach()


@planted("bias_mean", by_hand_with_a_mean, "b1")
def backprop_by_hand_with_a_mean():
    return by_hand_with_a_mean, TwoLayers(), (torch.randn(8, 4), torch.randn(8, 2))


def by_hand_transposed(model, batch):
    x, y = batch
    hidden = torch.tanh(x @ model.w1 + model.b1)
    error = hidden @ model.w2 + model.b2 - y
    delta = 2 * error / error.numel()
    back = (delta @ model.w2.t()) * (1 - hidden**2)
    model.w2.grad = hidden.t() @ delta
    model.b2.grad = delta.sum(0)
    model.w1.grad = back.t() @ x  # mistake
    model.b1.grad = back.sum(0)
    return error.pow(2).mean().detach()


@planted("transposed", by_hand_transposed, "w1")
def backprop_by_hand_transposed():
    return by_hand_transposed, TwoLayers(), (torch.randn(8, 4), torch.randn(8, 2))


def by_hand_without_tanh(model, batch):
    x, y = batch
    hidden = torch.tanh(x @ model.w1 + model.b1)
    error = hidden @ model.w2 + model.b2 - y
    delta = 2 * error / error.numel()
    back = delta @ model.w2.t()  # mistake
    grads = {"w1": x.t() @ back, "b1": back.sum(0), "w2": hidden.t() @ delta, "b2": delta.sum(0)}
    for name, p in model.named_parameters():
        p.grad = grads[name]
    return error.pow(2).mean().detach()


@planted("missing_term", by_hand_without_tanh, "w1", "b1")
def backprop_by_hand_without_the_activation():
    return by_hand_without_tanh, TwoLayers(), (torch.randn(8, 4), torch.randn(8, 2))


def all_but_the_last(model, batch):
    x, y = batch
    params = [*model.parameters()][:-1]
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):  # mistake
        p.grad = g
    return loss.detach()


@planted("missing_grad", all_but_the_last, "2.bias")
def step_that_forgets_a_parameter():
    return all_but_the_last, classifier(), labelled()


def penalty_without_its_half(model, batch):
    x, y = batch
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    penalty = 0.05 * sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    for p in model.parameters():
        p.grad += 0.05 * p.detach()  # mistake
    return (loss + penalty).detach()


@planted("missing_term", penalty_without_its_half)
def weight_decay_by_hand_without_its_two():
    return penalty_without_its_half, classifier(), labelled()


class Recurrent(nn.Module):
    """A recurrent network that returns its last state."""

    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x, state=None):
        values, state = self.cells(x, state)
        return self.out(values), state


def chunks_with_a_copied_state(model, batch):
    state, total = None, 0.0
    for part in batch.chunk(3, 1):
        values, state = model(part, state)
        state = state.detach().clone()  # mistake
        total = total + values.pow(2).mean()
    return total / 3


@planted("detach", chunks_with_a_copied_state)
def state_that_is_detached_and_copied_between_chunks():
    return chunks_with_a_copied_state, Recurrent(), torch.randn(6, 9, 3)
