"""Activations of a whole optimizer step are measured once each, and the model is left as it was."""

import copy
import gc
import io
import math
import warnings
import weakref

import numpy as np
import pytest
import reference
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwatch.attempts import MAX_FAILURES
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device import sync

DEAD, SATURATED, MEAN, STD = range(4)
RELU_DEAD = (-math.inf, 0.0)


class ConvNet(nn.Module):
    """A shared in-place ReLU called with different widths, a GELU after linear layers, a sigmoid."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 10, 3)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Linear(10, 8), nn.GELU(), nn.Linear(8, 4), nn.Sigmoid())

    def body(self, x):
        return self.relu(self.conv2(self.relu(self.conv1(x))))

    def forward(self, x):
        if self.checkpointing == "none":
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x.mean((2, 3)))


def conv_net(**keywords):
    torch.manual_seed(0)
    return ConvNet(**keywords)


def images(count=8):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(5), requires_grad=True)


def train_step(model, batches):
    for batch in batches:
        model(batch).square().sum().backward()


def measure(model, batches, **keywords):
    with ActivationProbe(model, **keywords) as probe:
        probe.arm()
        train_step(model, batches)
        row_SA = probe.read()
    return sync.to_host(row_SA)


def test_modules_are_listed_in_the_order_of_the_model():
    with ActivationProbe(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.ReLU(), nn.Dropout()))) as probe:
        assert [(i.name, i.module_type) for i in probe.infos] == [("1", "Tanh"), ("2.0", "ReLU")], "activations only"


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("size", [3, 6])
def test_statistics_equal_the_obvious_ones(kernel, size):
    model = nn.Sequential(nn.Conv2d(3, 16, size), nn.ReLU())  # maps of 6 x 6 and of 3 x 3
    with torch.no_grad():
        model[0].bias[:5] = -100.0
    batches = [images(4), images(3) * 2]
    outputs = [model(batch) for batch in batches]

    row_S = measure(model, batches, kernel=kernel)[:, 0]

    np.testing.assert_allclose(row_S, reference.activation_statistics(outputs, 1, RELU_DEAD), rtol=1e-5)
    assert row_S[DEAD] == pytest.approx(5 / 16), "five channels were pushed below zero"


def test_a_unit_that_fires_in_one_micro_batch_only_is_alive():
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    silent, firing = -torch.ones(4, 10, requires_grad=True), -torch.ones(4, 10)
    firing[2, 7] = 1.0

    assert measure(model, [silent, silent])[DEAD, 0] == 1, "no unit ever fires"
    assert measure(model, [silent, firing.requires_grad_()])[DEAD, 0] == pytest.approx(0.9), "one of ten fires once"


def test_accumulation_does_not_change_the_statistics():
    batch = images(8)

    whole, parts = measure(conv_net(), [batch]), measure(conv_net(), batch.chunk(4))

    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_activation_checkpointing_counts_nothing_twice(kind):
    batches = images(8).chunk(2)

    np.testing.assert_allclose(
        measure(conv_net(checkpointing=kind), batches), measure(conv_net(), batches), rtol=1e-6, err_msg=kind
    )


def test_a_module_called_with_several_widths_has_units_for_each_call():
    model = conv_net()
    with torch.no_grad():
        model.conv1.bias[:3] = -100.0
        model.conv2.bias[:2] = -100.0

    assert measure(model, [images()])[DEAD, 0] == pytest.approx(5 / 16), "6 + 10 channels, 3 + 2 of them dead"


def test_evaluation_and_unarmed_steps_are_not_seen():
    model = conv_net()
    with ActivationProbe(model) as probe:
        train_step(model, [images()])
        assert probe.read() is None, "not armed"

        probe.arm()
        with torch.no_grad():
            model(images())
        model.eval()
        model(images())
        assert probe.read() is None, "evaluation only"

        model.train()
        probe.arm()
        train_step(model, [images()])
        assert probe.read() is not None, "a training step"
        assert probe.read() is None, "reading disarms"


def test_a_module_that_was_not_called_is_nan():
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Tanh(), nn.Tanh()

        def forward(self, x):
            return self.used(x)

    row_SA = measure(Partial(), [torch.ones(2, 3, requires_grad=True)])

    assert np.isnan(row_SA[MEAN]).tolist() == [False, True], "missing is nan"


def test_hooks_come_off_also_when_the_step_raises():
    model = conv_net()

    def failing_step():
        with ActivationProbe(model) as probe:
            probe.arm()
            model(torch.ones(1, 99, 8, 8))

    with pytest.raises(RuntimeError, match="channels"):
        failing_step()

    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert sum(hooks) == 0, "nothing is left on the model"


class Token:
    """Lives as long as the graph that holds it."""


def test_no_activation_and_no_graph_is_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with ActivationProbe(model) as probe:
        probe.arm()
        output, token = model(torch.ones(2, 4)), Token()
        output.grad_fn.metadata["token"] = token
        graph, memory = weakref.ref(token), weakref.ref(output)
        del output, token
        gc.collect()

        assert graph() is None, "the graph is free as soon as the loop lets go of it"
        assert memory() is None, "and so is the activation"
        assert not probe.read().requires_grad, "statistics carry no graph"


@pytest.mark.parametrize(
    ("shape", "limit", "seen"),
    [((10, 6), 30, np.s_[:5]), ((4, 6, 5, 5), 320, np.s_[:2]), ((4, 3, 9, 9), 60, np.s_[:1, :, :2])],
)
def test_no_more_values_are_read_than_allowed(shape, limit, seen):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = x.detach()[seen].clamp_min(0)

    row_S = measure(nn.Sequential(nn.ReLU()), [x], max_elements=limit)[:, 0]

    assert expected.numel() <= limit, "the expectation keeps to the limit itself"
    np.testing.assert_allclose(row_S[MEAN], expected.mean(), rtol=1e-5, err_msg="leading samples only")


@pytest.mark.parametrize(
    ("before", "shape", "dead"),
    [
        (nn.Conv1d(3, 3, 1), (2, 3, 5), 1 / 3),
        (nn.Linear(5, 5), (2, 3, 5), 1 / 5),
        (nn.LayerNorm(5), (2, 3, 4, 5), 1 / 5),
        (nn.BatchNorm1d(5), (6, 5), 1 / 5),
        (nn.Identity(), (2, 3, 4, 4), 1 / 3),
        (nn.Identity(), (2, 3, 5), 1 / 5),
    ],
)
def test_units_are_channels_after_convolutions_and_features_after_linear_layers(before, shape, dead):
    class Silence(nn.Module):
        """Stands for the layer: it gives ones, but for one silent unit."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.relu = before, nn.ReLU()

        def forward(self, x):
            out = torch.ones(shape)
            out.movedim(1 if isinstance(self.layer, nn.Conv1d) or dead == 1 / 3 else -1, 0)[0] = -1
            return self.relu(out + 0 * x)

    assert measure(Silence(), [torch.ones((), requires_grad=True)])[DEAD, 0] == pytest.approx(dead), "one unit of them"


def test_nan_outputs_are_not_dead():
    assert measure(nn.Sequential(nn.ReLU()), [torch.full((2, 3), math.nan, requires_grad=True)])[DEAD, 0] == 0


def test_softmax_saturates_where_one_class_takes_all():
    x = torch.zeros(4, 3, 5)
    x[0, :, 0] = 20.0

    row_S = measure(nn.Sequential(nn.Softmax(dim=-1)), [x.requires_grad_()])[:, 0]

    assert row_S[SATURATED] == pytest.approx(1 / 4), "three rows of twelve are certain"
    assert row_S[MEAN] == pytest.approx(1 / 5), "probabilities sum to one"


@pytest.mark.parametrize("module", [nn.LeakyReLU(), nn.PReLU()])
def test_leaky_functions_neither_die_nor_saturate(module):
    row_S = measure(nn.Sequential(module), [-torch.ones(2, 3, requires_grad=True)])[:, 0]

    assert np.isnan(row_S[[DEAD, SATURATED]]).all(), "the notions do not apply"


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_deviation_holds_where_the_mean_is_large_beside_it(kernel):
    x = 0.5 + 1e-4 * torch.randn(300, 50, generator=torch.Generator().manual_seed(2))

    row_S = measure(nn.Sequential(nn.ReLU()), [part.requires_grad_() for part in x.chunk(3)], kernel=kernel)[:, 0]

    assert row_S[STD] == pytest.approx(float(x.double().std(correction=0)), rel=1e-3), "not lost to rounding"


@pytest.mark.parametrize("kind", ["none", "non-reentrant"])
def test_compiled_models_are_traced_whole_and_give_the_same(kind):
    if kind != "none" and not hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        pytest.skip(f"torch {torch.__version__} compiles no side effects within checkpointing")
    torch._dynamo.reset()
    batches = images(8).chunk(2)
    expected = measure(conv_net(), batches)
    model = conv_net(checkpointing=kind)
    with ActivationProbe(model) as probe:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            probe.arm()
            train_step(compiled, batches)
            row_SA = sync.to_host(probe.read())
            train_step(compiled, batches)

    np.testing.assert_allclose(row_SA, expected, rtol=1e-5, atol=1e-7)


def through_pickle(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


@pytest.mark.parametrize("copy_of", [copy.deepcopy, through_pickle, averaged])
@pytest.mark.parametrize("is_armed", [True, False])
def test_a_copy_of_a_watched_model_works_and_is_not_watched(copy_of, is_armed):
    model, batches = conv_net(), images(8).chunk(2)
    expected = measure(conv_net(), batches)
    with ActivationProbe(model) as probe:
        if is_armed:
            probe.arm()
        twin = copy_of(model)
        probe.arm()
        train_step(twin, [images(4) * 100])
        assert probe.read() is None, "the copy's activations are its own"

        probe.arm()
        train_step(model, batches)
        row_SA = sync.to_host(probe.read())

    np.testing.assert_allclose(row_SA, expected, err_msg="the original goes on being measured")
    torch.testing.assert_close(twin(images()), model(images()), msg="the copy computes the same")


def test_a_copy_of_a_copy_and_a_watched_copy_are_no_trouble():
    model, batches = conv_net(), images(8).chunk(2)
    with ActivationProbe(model):
        twin = copy.deepcopy(copy.deepcopy(model))

    np.testing.assert_allclose(measure(twin, batches), measure(model, batches), err_msg="inert hooks do not count")


@pytest.mark.parametrize("place", ["ActivationAccumulator.add", "_is_in_step"])
@pytest.mark.parametrize("failures", [1, MAX_FAILURES])
def test_a_fault_in_the_statistics_leaves_the_forward_call_alone(place, failures, monkeypatch):
    def fail(*arguments, **keywords):
        raise ValueError("a fault of ours")

    model = conv_net()
    expected = model(images())
    with ActivationProbe(model) as probe:
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(f"gradwatch.probe.activations.probe.{place}", fail)
            for _ in range(failures):
                probe.arm()
                output = model(images())
                assert probe.read() is None, "a part of the sums is missing"

        torch.testing.assert_close(output, expected, msg="the forward call is what it was")
        assert len(caught) == (failures == MAX_FAILURES)
        assert all("the activation probe failed (ValueError: a fault of ours)" in str(it.message) for it in caught)
        assert bool(probe.attempts.left_out) is (failures == MAX_FAILURES)
        probe.arm()
        train_step(model, [images()])
        assert probe.read() is not None, "the next sampled step is read"
