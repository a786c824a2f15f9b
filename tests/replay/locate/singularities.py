"""Modules with one planted singularity each; the guilty line ends with `# here`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ONES = torch.ones(8, 4)
MIXED = torch.tensor([[-1.0, 0.5, 1.0, 2.0]]).repeat(8, 1)
ZEROS = torch.zeros(8, 4)
SPREAD = torch.linspace(0.5, 3.0, 32).reshape(8, 4)


class Log(nn.Module):
    def forward(self, h):
        return h.clamp(min=0).log()  # here


class Standardise(nn.Module):
    def forward(self, h):
        centred = h - h.mean(1, keepdim=True)
        return centred / h.std(1, keepdim=True)  # here


class DivideByDeviation(nn.Module):
    def forward(self, h):
        scale = h.std(0)
        return h / scale  # here


class ExpOverflow(nn.Module):
    def forward(self, h):
        return (200 * h).exp()  # here


class SoftmaxByHand(nn.Module):
    def forward(self, h):
        e = torch.exp(100 * h)  # here
        return e / e.sum(1, keepdim=True)


class EmptyRow(nn.Module):
    def forward(self, h):
        empty = torch.zeros_like(h, dtype=torch.bool)
        empty[3] = True
        scores = h.masked_fill(empty, -math.inf) / 2
        return scores.softmax(1)  # here


class EmptyRowByHand(nn.Module):
    def forward(self, h):
        empty = torch.zeros_like(h, dtype=torch.bool)
        empty[3] = True
        scores = h.masked_fill(empty, -math.inf)
        shifted = scores - scores.amax(1, keepdim=True)  # here
        return shifted.exp() / shifted.exp().sum(1, keepdim=True)


class EmptyRowOfBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        mask = torch.zeros(8, 4)
        mask[5] = -math.inf
        self.register_buffer("mask", mask)

    def forward(self, h):
        scores = h + self.mask
        return functional.softmax(scores, dim=1)  # here


class MaskTimesInfinity(nn.Module):
    def forward(self, h):
        hidden = (h < 0).float() * -math.inf  # here
        return (h + hidden).softmax(1)


class AllMasked(nn.Module):
    def forward(self, h):
        scores = torch.where(h > 0, h, torch.tensor(-math.inf))
        return scores.logsumexp(1)  # here


class PickedMasked(nn.Module):
    def forward(self, h):
        scores = h.masked_fill(h < 0, -math.inf).log_softmax(1)
        return -scores.gather(1, torch.zeros(len(h), 1, dtype=torch.long))  # here


class Log1p(nn.Module):
    def forward(self, h):
        return torch.log1p(-h)  # here


class Acos(nn.Module):
    def forward(self, h):
        return torch.acos(h)  # here


class RootOfZero(nn.Module):
    def forward(self, h):
        return h.sqrt()  # here


class HiddenByWhere(nn.Module):
    def forward(self, h):
        root = torch.sqrt(h)  # here
        return torch.where(h > 0, root, torch.zeros_like(h))


class LogHiddenByWhere(nn.Module):
    def forward(self, h):
        logs = h.log()  # here
        return torch.where(h > 0, logs, 0.0)


class ExpHiddenByWhere(nn.Module):
    def forward(self, h):
        grown = torch.exp(h * 100)  # here
        return torch.where(h < 0, grown, h)


class Cosine(nn.Module):
    def forward(self, h):
        other = torch.ones(4)
        return (h @ other) / (h.norm(dim=1) * other.norm())  # here


class Distance(nn.Module):
    def forward(self, h):
        return (h - 1).square().sum(1).sqrt()  # here


class Power(nn.Module):
    def forward(self, h):
        return h.pow(0.5)  # here


class CrossEntropyByHand(nn.Module):
    def forward(self, h):
        p = torch.sigmoid(20 * h)
        return -(1 - p).log()  # here


class LogOfSoftmax(nn.Module):
    def forward(self, h):
        p = (200 * h).softmax(1)
        return -torch.log(p)  # here


class Share(nn.Module):
    def forward(self, h):
        total = h.sum(1, keepdim=True)
        return h / total  # here


class VarianceOfOne(nn.Module):
    def forward(self, h):
        return h[:1].var(0)  # here


class InfinityMinusInfinity(nn.Module):
    def forward(self, h):
        large = h * 3e38  # here
        return large.sum(1) - large.mean(1)


class Reciprocal(nn.Module):
    def forward(self, h):
        return h.reciprocal()  # here


class ReciprocalRoot(nn.Module):
    def forward(self, h):
        variance = h.var(1, keepdim=True)
        return h * torch.rsqrt(variance)  # here


class Divergence(nn.Module):
    def forward(self, h):
        target = torch.tensor([0.0, 0.0, 0.5, 0.5])
        return (target * (target.log() - h.log_softmax(1))).sum(1)  # here


class LogGamma(nn.Module):
    def forward(self, h):
        return torch.lgamma(h)  # here


class InverseError(nn.Module):
    def forward(self, h):
        return torch.erfinv(h)  # here


class Atanh(nn.Module):
    def forward(self, h):
        return torch.atanh(h)  # here


class NormWithoutEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4, eps=0.0)

    def forward(self, h):
        return self.norm(h)  # here


class UnitLength(nn.Module):
    def forward(self, h):
        return functional.normalize(h, dim=1, eps=0.0)  # here


class BadBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()
        self.norm.running_var[2] = math.nan

    def forward(self, h):
        return self.norm(h)  # here


class BadEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        with torch.no_grad():
            self.table.weight[7] = math.inf

    def forward(self, h):
        return h + self.table(torch.arange(8))  # here


class BadWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight[1, 2] = math.nan

    def forward(self, h):
        return self.linear(h)  # here


class HugeWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.fill_(3e38)

    def forward(self, h):
        return self.linear(h)  # here


class Square(nn.Module):
    def forward(self, h):
        return h.square()  # here


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h):
        return self.linear(h)


class LargeProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, 300.0)

    def forward(self, h):
        return self.linear(300 * h)  # here


class HalfSum(nn.Module):
    def forward(self, h):
        return (h * 9000).half().sum()  # here


class HalfSquare(nn.Module):
    def forward(self, h):
        x = h.half()
        return x.pow(2).mean(1).float()  # here


class HalfEps(nn.Module):
    def forward(self, h):
        x = h.half()
        scale = x.float().std(1, keepdim=True).half() + 1e-8
        return (x - x.mean(1, keepdim=True)) / scale  # here


class HalfGradient(nn.Module):
    def forward(self, h):
        x = h.half() * 60000  # here
        return x.float() * 60000


class Singular(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.abs().clone()

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        return grad * h / h.abs()  # here


class CustomBackward(nn.Module):
    def forward(self, h):
        return Singular.apply(h)


class Inner(nn.Module):
    def forward(self, h):
        return torch.sqrt(h)  # here


class Deep(nn.Module):
    def __init__(self, *, reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner()])
        self.reentrant = reentrant

    def forward(self, h):
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return h


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, h):
        nothing = torch.ones(1, len(h), dtype=torch.bool)
        return self.attend(h[None], h[None], h[None], key_padding_mask=nothing)[0]  # here


class Penalised(nn.Module):
    """A gradient of a gradient: the penalty's own backward pass takes the root of zero."""

    def forward(self, h):
        (grad,) = torch.autograd.grad((h * 0).sum(), h, create_graph=True)
        return h.sum() + (grad + 0 * h).square().sum().sqrt()  # here


def one_bad(value):
    inputs = SPREAD.clone()
    inputs[3, 1] = value
    return inputs


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A singularity and what must be said of it."""

    part: Callable[[], nn.Module]
    inputs: torch.Tensor
    says: str
    module: str = "part"
    phase: str = "forward"
    blame: str = "formula"
    leaf: str = ""
    samples: tuple[int, ...] | None = None
    half: bool = False
    scale: float = 1.0
    compiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


PLANTS = {
    "log of zero": Plant(part=Log, inputs=MIXED, says="log"),
    "log of zero in one sample": Plant(part=Log, inputs=one_bad(-1.0), says="log", samples=(3,)),
    "0/0 in a normalisation": Plant(part=Standardise, inputs=ONES, says="div"),
    "division by zero deviation": Plant(part=DivideByDeviation, inputs=ONES, says="div"),
    "exp overflow": Plant(part=ExpOverflow, inputs=ONES, says="exp"),
    "softmax by hand": Plant(part=SoftmaxByHand, inputs=MIXED, says="exp"),
    "masked softmax with an empty row": Plant(part=EmptyRow, inputs=SPREAD, says="softmax"),
    "masked softmax by hand": Plant(part=EmptyRowByHand, inputs=SPREAD, says="sub"),
    "empty row in a mask that is a buffer": Plant(part=EmptyRowOfBuffer, inputs=SPREAD, says="softmax"),
    "zero times infinity in a mask": Plant(part=MaskTimesInfinity, inputs=MIXED, says="mul"),
    "logsumexp of nothing": Plant(part=AllMasked, inputs=-ONES, says="logsumexp"),
    "a masked class is the target": Plant(part=PickedMasked, inputs=MIXED, says="gather"),
    "log1p of -1": Plant(part=Log1p, inputs=ONES, says="log1p"),
    "acos at 1": Plant(part=Acos, inputs=ONES, says="acos", phase="backward"),
    "sqrt at 0": Plant(part=RootOfZero, inputs=ZEROS, says="sqrt", phase="backward"),
    "where hides sqrt at 0": Plant(part=HiddenByWhere, inputs=ZEROS, says="sqrt", phase="backward"),
    "where hides sqrt below 0": Plant(part=HiddenByWhere, inputs=MIXED, says="sqrt"),
    "where hides log of 0": Plant(part=LogHiddenByWhere, inputs=ZEROS, says="log", phase="backward"),
    "where hides exp overflow": Plant(part=ExpHiddenByWhere, inputs=SPREAD, says="exp"),
    "cosine of a zero vector": Plant(part=Cosine, inputs=ZEROS, says="div"),
    "distance at 0": Plant(part=Distance, inputs=ONES, says="sqrt", phase="backward"),
    "root as a power, at 0": Plant(part=Power, inputs=ZEROS, says="pow", phase="backward"),
    "log(1 - p) at p = 1": Plant(part=CrossEntropyByHand, inputs=ONES, says="log"),
    "log of a softmax that is 0": Plant(part=LogOfSoftmax, inputs=MIXED, says="log"),
    "x / x.sum() at 0": Plant(part=Share, inputs=ZEROS, says="div"),
    "variance of one": Plant(part=VarianceOfOne, inputs=SPREAD, says="var"),
    "inf - inf": Plant(part=InfinityMinusInfinity, inputs=SPREAD + 1, says="mul"),
    "reciprocal of 0": Plant(part=Reciprocal, inputs=ZEROS, says="reciprocal"),
    "rsqrt of 0": Plant(part=ReciprocalRoot, inputs=ONES, says="rsqrt"),
    "divergence with a target of 0": Plant(part=Divergence, inputs=SPREAD, says="log"),
    "lgamma of 0": Plant(part=LogGamma, inputs=ZEROS, says="lgamma"),
    "erfinv of 1": Plant(part=InverseError, inputs=ONES, says="erfinv"),
    "atanh of 1": Plant(part=Atanh, inputs=ONES, says="atanh"),
    "LayerNorm without eps": Plant(part=NormWithoutEps, inputs=ONES, says="native_layer_norm", module="part.norm"),
    "normalize without eps": Plant(part=UnitLength, inputs=ZEROS, says="div"),
    "attention to nothing": Plant(part=Attention, inputs=SPREAD, says="softmax", module="part.attend"),
    "a bad buffer": Plant(
        part=BadBatchNorm,
        inputs=SPREAD,
        says="native_batch_norm",
        module="part.norm",
        blame="weights",
        leaf="part.norm.running_var",
    ),
    "a bad row of an embedding": Plant(
        part=BadEmbedding,
        inputs=SPREAD,
        says="embedding",
        module="part.table",
        blame="weights",
        leaf="part.table.weight",
    ),
    "a bad weight": Plant(
        part=BadWeight, inputs=SPREAD, says="addmm", module="part.linear", blame="weights", leaf="part.linear.weight"
    ),
    "weights out of hand": Plant(part=HugeWeight, inputs=SPREAD, says="addmm", module="part.linear", blame="weights"),
    "a NaN sample": Plant(
        part=Plain,
        inputs=one_bad(math.nan),
        says="addmm",
        module="encoder",
        blame="data",
        leaf="inputs",
        samples=(3,),
    ),
    "a sample of log(0)": Plant(
        part=Plain,
        inputs=one_bad(-math.inf),
        says="addmm",
        module="encoder",
        blame="data",
        leaf="inputs",
        samples=(3,),
    ),
    "a sample that is far too large": Plant(part=Square, inputs=one_bad(1e25), says="pow", blame="data", samples=(3,)),
    "fp16 product overflow": Plant(
        part=LargeProduct, inputs=ONES, says="addmm", module="part.linear", blame="format", half=True
    ),
    "fp16 sum overflow": Plant(part=HalfSum, inputs=ONES, says="sum", blame="format"),
    "fp16 square overflow": Plant(part=HalfSquare, inputs=SPREAD * 200, says="pow", blame="format"),
    "fp16 loses eps": Plant(part=HalfEps, inputs=ONES, says="div", blame="format"),
    "fp16 gradient overflow": Plant(part=HalfGradient, inputs=ONES / 2, says="mul", phase="backward", blame="format"),
    "a backward pass by hand": Plant(part=CustomBackward, inputs=ZEROS, says="div", phase="backward"),
    "inside a deep module": Plant(part=Deep, inputs=ZEROS, says="sqrt", module="part.blocks.1", phase="backward"),
    "under activation checkpointing": Plant(
        part=lambda: Deep(reentrant=False), inputs=ZEROS, says="sqrt", module="part.blocks.1", phase="backward"
    ),
    "under reentrant checkpointing": Plant(
        part=lambda: Deep(reentrant=True), inputs=ZEROS, says="sqrt", module="part.blocks.1", phase="backward"
    ),
    "in a compiled model": Plant(
        part=Deep, inputs=ZEROS, says="sqrt", module="part.blocks.1", phase="backward", compiled=True
    ),
    "in the gradient of a gradient": Plant(part=Penalised, inputs=ONES, says="sqrt", phase="backward"),
}


class Net(nn.Module):
    """An encoder that hands on its input as it is, but has weights, and the part with the singularity."""

    def __init__(self, part):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.part = part
        with torch.no_grad():
            self.encoder.weight.copy_(torch.eye(4))
            self.encoder.bias.zero_()

    def forward(self, x):
        return self.part(self.encoder(x))
