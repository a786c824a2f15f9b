"""Layers with a planted mistake in a part of their backward: attention, rotations, gates, a recursion."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function

from gradient_cases.planting import planted


class AttendFn(Function):
    @staticmethod
    def forward(ctx, q, k, v):
        p = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        score = p * (grad @ v.mT)  # mistake
        return score @ k, score.mT @ q, p.mT @ grad


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        return AttendFn.apply(*self.qkv(x).chunk(3, -1))


@planted("inner_product", AttendFn)
def attention_without_its_inner_product():
    return Attend(), (torch.randn(2, 3, 4),), lambda out: out.pow(2).sum()


class TurnFn(Function):
    @staticmethod
    def forward(ctx, x, angle):
        ctx.save_for_backward(angle)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    @staticmethod
    def backward(ctx, grad):
        (angle,) = ctx.saved_tensors
        a, b = grad.chunk(2, -1)
        turned = [a * angle.cos() + b * angle.sin(), a * angle.sin() + b * angle.cos()]  # mistake
        return torch.cat(turned, -1), None


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("angle", torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]))

    def forward(self, x):
        turned = TurnFn.apply(self.inner(x), self.angle)
        return turned @ turned.mT


@planted("sign", TurnFn)
def rotation_with_a_lost_sign():
    return Turn(), (torch.randn(2, 3, 4),), lambda out: out.tanh().sum()


class LeakFn(Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.slope = slope
        ctx.mark_dirty(x)
        x.mul_(torch.where(x > 0, 1.0, slope).to(x.dtype))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, grad, grad * ctx.slope**2), None  # mistake


class Leak(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.outer(LeakFn.apply(self.inner(x), 0.3))


@planted("negative", LeakFn)
def leak_in_place_with_a_squared_slope():
    return Leak(), (torch.randn(4, 4),), lambda out: out.pow(2).mean()


class PathsFn(Function):
    """Sum over all paths through a chain of states, in logarithms."""

    @staticmethod
    def forward(ctx, emitted, moved):
        alpha = [emitted[0]]
        for e in emitted[1:]:
            alpha.append(torch.logsumexp(alpha[-1][:, None] + moved, 0) + e)
        ctx.save_for_backward(emitted, moved, torch.stack(alpha))
        return torch.logsumexp(alpha[-1], 0)

    @staticmethod
    def backward(ctx, grad):
        emitted, moved, alpha = ctx.saved_tensors
        state = torch.softmax(alpha[-1], 0)
        for_emitted = torch.zeros_like(emitted)
        for t in range(len(emitted) - 1, 0, -1):
            for_emitted[t] = state
            joint = torch.softmax(alpha[t - 1][:, None] + moved, 0) * state
            for_moved = joint  # mistake
            state = joint.sum(1)
        for_emitted[0] = state

        return grad * for_emitted, grad * for_moved


class Paths(nn.Module):
    def __init__(self):
        super().__init__()
        self.emitted = nn.Linear(4, 3)
        self.moved = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return PathsFn.apply(self.emitted(x), self.moved)


@planted("missing_term", PathsFn)
def paths_that_count_only_the_first_move():
    return Paths(), (torch.randn(4, 4),), lambda out: out
