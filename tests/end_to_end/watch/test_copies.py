"""Copies, exports and transforms of a watched model work at each step, and leave the recording as it is."""

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.multiprocessing  # lets ForkingPickler send tensors
import warm_python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import gradwatch

pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

LOAD = """
import io, pickle, sys
sys.modules["gradwatch"] = None
import torch

for step, name, data in pickle.load(open(sys.argv[1], "rb")):
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    if name == "model":
        loaded(torch.ones(4, 8)).sum().backward()
print("all loaded")
"""


class Net(nn.Module):
    """Activations as modules and as functions, in blocks that hooks may meet in a trace."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), Last()

    def forward(self, x):
        return self.last(self.block(F.relu(self.first(x))))


class Last(nn.Module):
    """The output, behind a functional activation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x):
        return self.linear(torch.tanh(x))


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def train(model, act, *, steps=22, loss_fn=None, **options):
    """Train a watched model; `act` is called before each forward pass with the model, a batch, and the step."""
    torch.manual_seed(0)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    loss_fn = loss_fn or nn.MSELoss()
    schedule = gradwatch.monitor.Schedule(budget=0.0)
    with gradwatch.watch(model, optimizer, loss_fn=loss_fn, schedule=schedule, on_finding=None, **options) as monitor:
        for step in range(steps):
            x = torch.randn(16, 8)
            act(model, optimizer, x, step)
            loss = loss_fn(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)
            losses.append(loss.item())
    return monitor.history, losses


def mixed():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


@pytest.mark.parametrize("is_compiling", [False, True], ids=["eager", "with torch.compile"])
def test_copies_of_each_step_load_without_gradwatch(tmp_path, is_compiling):
    if is_compiling:
        torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1))  # loads the compiler, which changes some hooks
    copies, loss_fn = [], nn.MSELoss()

    def act(model, optimizer, x, step):
        copies.extend(
            [
                (step, "model", saved(model)),
                (step, "model", saved(copy.deepcopy(model))),
                (step, "model", saved(pickle.loads(pickle.dumps(model)))),
                (step, "loss", saved(loss_fn)),
                (step, "optimizer", saved(optimizer)),
                (step, "optimizer", saved(copy.deepcopy(optimizer))),
            ]
        )

    train(mixed(), act, loss_fn=loss_fn, run=tmp_path / "run", record=True)
    (tmp_path / "copies").write_bytes(pickle.dumps(copies))

    assert b"gradwatch" not in b"".join(data for _, _, data in copies)
    command = [*warm_python.command(), "-c", LOAD, str(tmp_path / "copies")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "all loaded\n"


def test_copies_of_no_step_are_watched_or_hold_a_probe():
    copies = []
    train(mixed(), lambda model, optimizer, x, step: copies.append(copy.deepcopy(model)))

    parts = [part for twin in copies for part in twin.modules()]
    hooks = [hook for part in parts for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
    assert hooks
    assert {type(hook.__self__) for hook in hooks} == {contextlib.nullcontext}


def shallow_copy(module):
    """Copy a module as MAML does: the copy has tensors that depend on the parameters, and it shares the hooks."""
    twin = type(module).__new__(type(module))
    twin.__dict__ = module.__dict__ | {
        "_parameters": {name: param.clone() for name, param in module._parameters.items()},
        "_modules": {name: shallow_copy(part) for name, part in module._modules.items()},
    }
    return twin


def test_shallow_copies_that_share_the_hooks_are_not_kept():
    torch.manual_seed(0)
    model, copies = Net(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(22):
            x, twin = torch.randn(16, 8), shallow_copy(model)
            loss = (twin(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)
            copies.append(weakref.ref(twin))
        del twin, loss
        gc.collect()

        assert [step for step, twin in enumerate(copies) if twin() is not None] == []


def weights(model):
    return {name: param.detach() for name, param in model.named_parameters()}


def differentiate_by_sample(model, x):
    vmap(grad(lambda w, row: functional_call(model, w, (row[None],)).sum()), in_dims=(None, 0))(weights(model), x)


def run_with_fake_inputs(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


def run_with_fake_weights(model, x):
    mode = FakeTensorMode()
    fake = {name: mode.from_tensor(param) for name, param in model.named_parameters()}
    functional_call(model, fake, (mode.from_tensor(x),))


def run_on_meta(model, x):
    meta = {name: param.to("meta").requires_grad_() for name, param in weights(model).items()}
    functional_call(model, meta, (x.to("meta"),))


def run_in_a_fork(model, x):
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            model(x).sum().backward()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def prepare_onnx(model, x):
    # the package onnx, which only writes the file, need not be installed
    torch.onnx.utils._model_to_graph(model, (x,), training=torch.onnx.TrainingMode.PRESERVE)


def infer(model, x):
    with torch.inference_mode():
        model(x)


@pytest.fixture(scope="module")
def plain():
    """Return the model that each pass gets a copy of, and its history and losses without any pass."""
    torch.manual_seed(1)
    model = Net()
    return model, *train(copy.deepcopy(model), lambda *_: None)


PASSES = {
    "deepcopy": lambda model, x: copy.deepcopy(model)(x),
    "script": lambda model, x: torch.jit.script(model)(x),
    "script of a copy": lambda model, x: torch.jit.script(copy.deepcopy(model))(x),
    "script of a pickle": lambda model, x: torch.jit.script(pickle.loads(pickle.dumps(model)))(x),
    "script of a part": lambda model, x: torch.jit.script(model.block),
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "trace of a part": lambda model, x: torch.jit.trace(model.last, torch.ones(4, 16), check_trace=False),
    "onnx": prepare_onnx,
    "export": lambda model, x: torch.export.export(model, (x,)),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True),
    "torch.fx": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(lambda a: model(a))(x),
    "per-sample gradients": differentiate_by_sample,
    "jvp": lambda model, x: jvp(model, (x,), (x,)),
    "hessian": lambda model, x: hessian(lambda a: model(a).sum())(x[:2]),
    "vectorized jacobian": lambda model, x: torch.autograd.functional.jacobian(model, x, vectorize=True),
    "fake inputs": run_with_fake_inputs,
    "fake weights": run_with_fake_weights,
    "meta": run_on_meta,
    "inference": infer,
    "fork": run_in_a_fork,
    "to another process": lambda model, x: ForkingPickler.dumps(model),
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("steps", [(0, 1, 10), (5, 15)], ids=["sampled", "not sampled"])
def test_an_unusual_pass_works_and_leaves_the_recording_as_it_is(name, steps, plain):
    def act(model, optimizer, x, step):
        if step in steps:
            state = torch.get_rng_state()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                PASSES[name](model, x)
            told = [
                warning for warning in seen if issubclass(warning.category, (RuntimeWarning, torch.jit.TracerWarning))
            ]
            told += [warning for warning in seen if "hook" in str(warning.message)]
            assert [str(warning.message) for warning in told] == []
            torch.set_rng_state(state)

    model, plain_history, plain_losses = plain
    history, losses = train(copy.deepcopy(model), act)

    assert losses == plain_losses
    assert [info.name for info in history.info.activations] == [info.name for info in plain_history.info.activations]
    assert {"first.relu", "block.1"} < {info.name for info in history.info.activations}
    for statistic in ("act.dead_frac", "act.mean", "act.std", "grad.l2"):
        assert np.isfinite(plain_history[statistic]).any()
        np.testing.assert_array_equal(history[statistic], plain_history[statistic])
    assert [(event.kind, event.step) for event in history.events] == [
        (event.kind, event.step) for event in plain_history.events
    ]


def test_the_death_of_units_is_found_after_per_sample_gradients():
    def act(model, optimizer, x, step):
        if step in (0, 10):
            differentiate_by_sample(model, x)
        if step == 25:
            nn.init.constant_(model.block[0].bias, -50.0)

    history, _ = train(Net(), act, steps=60)

    assert {finding.layer for finding in history.findings if finding.kind == "dead-relu"} == {"block.1"}
