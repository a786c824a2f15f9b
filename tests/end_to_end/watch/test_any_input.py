"""No probe raises, warns or is left out, whatever a model gets and returns."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.nn import functional as F

import gradwatch
from gradwatch import Schedule
from gradwatch.events import LEFT_OUT

EVERY = Schedule(updates=1, activations=1, histograms=1)
STEPS = 12


class Table(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(ids).relu())


class OfMatrices(nn.Module):
    """A layer of a graph network: its inputs are features and a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, matrix, x):
        return self.second(torch.sparse.mm(matrix, self.first(x)).relu())


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, dtype=torch.complex64)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, 6).relu())


def perceptron(*, dtype=None, last=3):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, last), nn.Sigmoid()).to(dtype)


def rows(number, dtype=torch.float32):
    return torch.randn(number, 6).to(dtype)


def matrix(layout):
    return (torch.eye(5) + (torch.rand(5, 5) > 0.5)).to_sparse(layout=layout)


CASES = {
    "a usual batch": (perceptron, lambda: (rows(5),)),
    "two samples": (perceptron, lambda: (rows(2),)),
    "double precision": (lambda: perceptron(dtype=torch.float64), lambda: (rows(5, torch.float64),)),
    "bfloat16": (lambda: perceptron(dtype=torch.bfloat16), lambda: (rows(5, torch.bfloat16),)),
    "constant inputs": (perceptron, lambda: (torch.zeros(8, 6),)),
    "infinite inputs": (perceptron, lambda: (torch.full((8, 6), torch.inf),)),
    "one class": (lambda: perceptron(last=1), lambda: (rows(5),)),
    "no samples": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: (rows(0),)),
    "no features": (lambda: nn.Sequential(nn.Linear(0, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: (torch.ones(5, 0),)),
    "one sample without its dimension": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        lambda: (torch.randn(6),),
    ),
    "a number": (lambda: nn.Sequential(nn.PReLU(), nn.ReLU()), lambda: (torch.randn(()),)),
    "embeddings": (lambda: Table(sparse=False), lambda: (torch.randint(9, (5,)),)),
    "sparse gradients": (lambda: Table(sparse=True), lambda: (torch.randint(9, (5, 2)),)),
    "no tokens": (lambda: Table(sparse=True), lambda: (torch.zeros(0, dtype=torch.long),)),
    "sparse inputs": (lambda: nn.Linear(5, 3), lambda: (matrix(torch.sparse_coo),)),
    "a sparse matrix": (OfMatrices, lambda: (matrix(torch.sparse_coo), rows(5))),
    "compressed rows": (OfMatrices, lambda: (matrix(torch.sparse_csr), rows(5))),
    "complex weights": (Spectral, lambda: (rows(5),)),
    "booleans": (lambda: Table(sparse=False), lambda: ((torch.rand(5) > 0.5).long(),)),
}
LOSSES = {
    "mean": lambda z: z.float().mean(),
    "cross entropy": lambda z: F.cross_entropy(z.reshape(-1, z.shape[-1] if z.ndim else 1).float(), labels(z)),
    "zero": lambda z: (z * 0).sum(),
    "values": lambda z: z.square().mean(),
    "not a number": lambda z: z.float().mean() * torch.nan,
}


def labels(z):
    return torch.zeros(z.numel() // (z.shape[-1] if z.ndim else 1), dtype=torch.long)


def train(model, inputs, loss_of, monitor=None, *, handed=lambda inputs: inputs):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        gradwatch.watch(model, optimizer, schedule=EVERY, on_finding=None)
        if monitor
        else warnings.catch_warnings() as watcher
    ):
        for _ in range(STEPS):
            batch = inputs()
            optimizer.zero_grad()
            loss = loss_of(model(*batch))
            loss.backward()
            optimizer.step()
            if watcher:
                watcher.step(loss, batch=handed(batch))
    return watcher


def left_out(monitor):
    return [event.text for event in monitor.history.events if event.kind == LEFT_OUT.name]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_any_input_is_read(case, loss):
    make, inputs = CASES[case]
    torch.manual_seed(0)
    model = make()
    expected = copy.deepcopy(model)
    train(expected, inputs, LOSSES[loss])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Sparse CSR")
        monitor = train(model, inputs, LOSSES[loss], True)

    assert left_out(monitor) == []
    assert len(monitor.history["loss"]) == STEPS
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def penalty(weights, model, x):
    return functional_call(model, weights, (x,)).square().sum()


TRANSFORMS = {
    "gradients of each sample": lambda w, model, x: vmap(
        grad(lambda w, row: penalty(w, model, row[None])), in_dims=(None, 0)
    )(w, x),
    "a gradient": lambda w, model, x: grad(penalty)(w, model, x),
    "a Jacobian": lambda w, model, x: jacrev(lambda w: functional_call(model, w, (x,)))(w),
    "a Hessian": lambda w, model, x: hessian(lambda w: penalty(w, model, x))(w),
    "an ensemble": lambda w, model, x: vmap(lambda w: functional_call(model, w, (x,)))(
        {name: torch.stack([weight, 2 * weight]) for name, weight in w.items()}
    ),
    "a forward derivative": lambda w, model, x: torch.func.jvp(model, (x,), (x,)),
    "a derivative by the inputs": lambda w, model, x: jacrev(model)(x),
    "a map over the model itself": lambda w, model, x: vmap(model)(x),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_call_leaves_the_usual_ones_watched(name, every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gradwatch.watch(model, optimizer, schedule=EVERY, on_finding=None) as monitor:
            for step in range(STEPS):
                x = rows(8)
                if step % every == 0:
                    weights = {name: weight.detach() for name, weight in model.named_parameters()}
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        TRANSFORMS[name](weights, model, x)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=x)

    assert left_out(monitor) == []
    assert len(monitor.history.steps("act.dead_frac")) == STEPS
    assert not torch.isnan(torch.as_tensor(monitor.history["act.dead_frac"])).any()


NESTS = st.recursive(
    st.sampled_from(
        [
            None,
            1.5,
            "text",
            torch.ones(3),
            torch.ones(0),
            torch.tensor(1.0),
            torch.ones(4, 2, dtype=torch.complex64),
            torch.ones(4, 2, dtype=torch.bool),
            torch.ones(4, 2, dtype=torch.float64, requires_grad=True),
            torch.ones(4, 2, dtype=torch.bfloat16),
            torch.full((4, 2), torch.nan),
            torch.eye(4).to_sparse(),
            torch.zeros(4, 2).expand(4, 2).T,
            torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            object(),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=20)
@given(batch=NESTS, loss=st.sampled_from([None, 0.0, 1, torch.nan, torch.ones(2), torch.tensor(2)]))
def test_any_batch_and_loss_may_be_passed(batch, loss):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gradwatch.watch(model, optimizer, schedule=EVERY, on_finding=None) as monitor:
            for _ in range(STEPS):
                model(rows(5)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss, batch=batch)

    assert left_out(monitor) == []
    assert len(monitor.history["loss"]) == STEPS
