"""No rule about the graph of a loss raises, whatever the graph is made of."""

import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gradwatch.attempts import Attempts
from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.parameters import list_parameters

QUICK = settings(max_examples=60)

DIVISORS = {
    "a number": lambda: 0.5,
    "a tensor without gradient": lambda: torch.tensor(0.5),
    "a parameter": lambda: nn.Parameter(torch.tensor(0.5)),
    "a product with a parameter": lambda: nn.Parameter(torch.tensor(0.5)).exp() * 2,
    "another division": lambda: nn.Parameter(torch.tensor(0.5)) / 2,
}
LABELS = torch.arange(8) % 4

LOSSES = {
    "cross entropy": lambda z: F.cross_entropy(z, LABELS),
    "cross entropy by hand": lambda z: -(z.softmax(1) / z.softmax(1).sum(1, keepdim=True)).log().mean(),
    "cross entropy of positions": lambda z: F.cross_entropy(z.view(2, 4, 4).transpose(1, 2), LABELS.view(2, 4)),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, torch.ones(8, 4)),
    "binary of probabilities": lambda z: F.binary_cross_entropy(z.sigmoid(), torch.ones(8, 4)),
    "divergence": lambda z: F.kl_div(z.log_softmax(1), torch.full((8, 4), 0.25), reduction="batchmean"),
    "divergence of probabilities": lambda z: F.kl_div(z, torch.full((8, 4), 0.25)),
    "divergence of two": lambda z: F.kl_div(z.log_softmax(1), (z / 2).softmax(1), reduction="batchmean"),
    "policy": lambda z: -torch.distributions.Categorical(logits=z).log_prob(LABELS).mean(),
    "policy of probabilities": lambda z: torch.distributions.Categorical(probs=z.softmax(1)).entropy().mean(),
    "likelihood": lambda z: F.nll_loss(z, LABELS),
    "logsumexp": lambda z: z.logsumexp(1).mean(),
    "ranking": lambda z: -F.logsigmoid(z[:4] - z[4:]).mean(),
    "contrast": lambda z: F.cross_entropy(F.normalize(z) @ F.normalize(z).T / 0.1, torch.arange(8)),
    "a single class": lambda z: F.cross_entropy(z[:, :1], torch.zeros(8, dtype=torch.long)),
    "squares": lambda z: F.mse_loss(z, torch.zeros(8, 4)),
    "squares of a column": lambda z: (z[:, :1] - torch.zeros(8)).square().mean(),
    "complex": lambda z: torch.fft.fft(z).abs().mean(),
    "zero": lambda z: z.sum() * 0,
}


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def problems(model, loss):
    """Return the parts that raise, or warn, when a graph is read."""
    reported = []
    attempts = Attempts(reported.append, warned={"left-out"})
    reader = LossGraphReader(model, *list_parameters(model), attempts=attempts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (0, 1, 8):
            reader.read(loss, step=step, is_non_finite=True)
    attempts.end()
    return [observation.text for observation in reported]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_scores_may_be_divided_by_anything(loss, divisor):
    model = classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = LOSSES[loss](model(torch.randn(8, 6)) / DIVISORS[divisor]())

    assert problems(model, value) == []


UNARY = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda z: z.softmax(-1),
    "first softmax": lambda z: z.softmax(0),
    "log_softmax": lambda z: z.log_softmax(-1),
    "logsumexp": lambda z: z.logsumexp(0) if z.ndim else z,
    "reciprocal": lambda z: 1 / z,
    "one more": lambda z: z + 1,
    "one less": lambda z: 1 - z,
    "half": lambda z: z / 2,
    "square": torch.square,
    "power": lambda z: z**0.5,
    "constant power": lambda z: 2.0**z,
    "normalize": lambda z: F.normalize(z, dim=-1) if z.ndim else z,
    "share": lambda z: z / z.sum(),
    "share of a constant": lambda z: z / z.detach().sum(),
    "constant share": lambda z: z.detach() / z.sum(),
    "clamp": lambda z: z.clamp(min=0.1),
    "mean": lambda z: z.mean(-1, keepdim=True) if z.ndim else z.mean(),
    "sum": lambda z: z.sum(0) if z.ndim else z.sum(),
    "std": lambda z: z.std() if z.numel() > 1 else z,
    "view": lambda z: z.reshape(-1),
    "torn view": lambda z: z.reshape(z.shape[::-1]),
    "turn": lambda z: z.T if z.ndim == 2 else z,
    "permute": lambda z: z.permute(*reversed(range(z.ndim))) if z.ndim else z,
    "last first": lambda z: z.movedim(-1, 0) if z.ndim else z,
    "transpose": lambda z: z.transpose(0, -1) if z.ndim else z,
    "unsqueeze": lambda z: z.unsqueeze(0),
    "rows": lambda z: z[torch.zeros(3, dtype=torch.long)] if z.ndim and len(z) else z,
    "nothing": lambda z: z[:0] if z.ndim else z,
    "one": lambda z: z.flatten()[0] if z.numel() else z,
    "double": lambda z: z.double(),
    "half precision": lambda z: z.bfloat16(),
    "complex": lambda z: torch.view_as_real(torch.complex(z.float(), z.float())),
    "by itself": lambda z: z * z,
    "with all others": lambda z: z[:, None] - z[None, :] if z.ndim else z,
    "matrix": lambda z: z @ torch.ones(z.shape[-1], 3, dtype=z.dtype) if z.ndim else z,
    "table": lambda z: F.embedding(torch.zeros(2, dtype=torch.long), z) if z.ndim == 2 and len(z) else z,
    "checkpoint": lambda z: torch.utils.checkpoint.checkpoint(torch.sin, z, use_reentrant=False),
    "own function": lambda z: Twice.apply(z),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "stack": lambda a, b: torch.stack(torch.broadcast_tensors(a, b)),
    "where": lambda a, b: torch.where(a > 0, a, b),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return 2 * z

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Tables(nn.Module):
    """Parameters of several numbers of dimensions, some of them frozen."""

    def __init__(self, *, is_frozen):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.bias = nn.Parameter(torch.rand(4), requires_grad=not is_frozen)
        self.weight = nn.Parameter(torch.rand(4, 4), requires_grad=not is_frozen)
        self.table = nn.Embedding(4, 4)
        self.cube = nn.Parameter(torch.rand(4, 4, 4))
        self.empty = nn.Parameter(torch.rand(0, 4))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def values(self):
        ids = torch.arange(4)
        x = torch.rand(4, 4)
        return [
            self.scale,
            self.bias,
            self.weight,
            self.table(ids),
            x @ self.table.weight.T,
            F.embedding(ids, self.cube[0]) @ self.cube[0].T,
            self.cube,
            self.empty,
            *(head(x) for head in self.heads),
            x,
        ]


@st.composite
def recipes(draw):
    """Draw some operations: on one value, or on two of them."""
    number = st.integers(0, 99)
    unary = st.tuples(st.sampled_from(sorted(UNARY)), number)
    binary = st.tuples(st.sampled_from(sorted(BINARY)), number, number)
    return draw(st.lists(unary | binary, min_size=1, max_size=12))


@QUICK
@example(
    recipe=[
        *[("by itself", place) for place in (0, 28, 0, 0)],
        ("constant power", 0),
        *[("by itself", 0)] * 3,
        ("with all others", 23),
    ],
    is_frozen=False,
    loss="mean",
)
@given(recipe=recipes(), is_frozen=st.booleans(), loss=st.sampled_from(["mean", "sum", *LOSSES]))
def test_any_operations_may_make_a_loss(recipe, is_frozen, loss):
    model = Tables(is_frozen=is_frozen)
    values = model.values()
    for name, *places in recipe:
        parts = [values[-1 - place % len(values)] for place in places]
        try:
            values.append((UNARY[name] if len(parts) == 1 else BINARY[name])(*parts))
        except (RuntimeError, IndexError):  # shapes that do not fit
            continue
    scores = values[-1] if values[-1].requires_grad else values[-1] + model.scale
    if loss in LOSSES and scores.numel() >= 32:
        # the cross entropy of probabilities accepts no NaN
        value = LOSSES[loss](scores.float().flatten()[:32].view(8, 4).nan_to_num())
    else:
        value = scores.sum() if loss == "sum" else scores.mean()

    assert problems(model, value) == []


def test_a_table_may_be_a_part_of_a_larger_parameter():
    model, ids = Tables(is_frozen=False), torch.arange(4)

    assert problems(model, (F.embedding(ids, model.cube[0]) @ model.cube[0].T).mean()) == []


def test_views_may_tear_an_axis_more_than_once():
    model = nn.Sequential(nn.Linear(4, 6))
    for sizes in ([(3, 4, 2), (24,), (4, 6)], [(2, 12), (8, 3), (2, 2, 2, 3), (4, 6)], [(24,), (3, 2, 4), (4, 6)]):
        scores = model(torch.ones(4, 4))
        for size in sizes:
            scores = scores.reshape(size)

        assert problems(model, F.cross_entropy(scores, torch.arange(4))) == []


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (1, 1), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_parameters_of_any_shape_and_dtype_may_make_a_loss(shape, dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(shape, dtype=dtype))

    assert problems(model, (model.weight * model.weight).abs().sum()) == []
