"""Check that the plan of a step in an own loop equals what the step needs."""

# N = numbers in the parameters

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.models import gpt
from gradwatch.records import DataSpec


class MasterAdamW(torch.optim.Optimizer):
    """AdamW of bfloat16 weights, with moments and a copy of the weights in float32."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {
                        "master": p.float(),
                        "first": torch.zeros_like(p, dtype=torch.float32),
                        "second": torch.zeros_like(p, dtype=torch.float32),
                    }
                state = self.state[p]
                state["first"].lerp_(p.grad.float(), 0.1)
                state["second"].lerp_(p.grad.float().square(), 0.01)
                state["master"].addcdiv_(state["first"], state["second"].sqrt(), value=-group["lr"])
                p.copy_(state["master"])


def mlp(width=64, device=None):
    return nn.Sequential(
        nn.Linear(width, width, device=device), nn.ReLU(), nn.Linear(width, width, device=device), nn.Tanh()
    )


def decoder(layers, width, *, device):
    spec = DataSpec(input_shape=(2048,), kind="tokens", outputs=32_000)
    with torch.device(device):
        return gpt.build(spec, layers=layers, heads=width // 128, width=width, tied=False).to(torch.bfloat16)


def next_token_loss(model):
    def step(tokens_BT):
        return functional.cross_entropy(model(tokens_BT).flatten(0, 1).float(), tokens_BT.flatten())

    return step


def test_parts_are_those_of_a_linear_layer_by_hand():
    model = nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(32, 100)

    plan = gradwatch.plan(model, lambda x: model(x).square().sum(), inputs, optimizer=optimizer)

    parameters = 100 * 10 + 10
    assert plan.parameters == parameters
    assert plan.parts["weights"] == plan.parts["gradients"] == plan.parts["optimizer"] == 4 * parameters
    # the layer keeps its input, and the square keeps the outputs
    assert plan.parts["activations"] == 4 * (32 * 100 + 32 * 10)
    assert plan.flops == 2 * 2 * 32 * 100 * 10  # forward, and the gradient of the weights; the input needs none
    assert (plan.modules[0].inputs, plan.modules[0].outputs) == (((32, 100),), ((32, 10),))
    assert plan.modules[0].saved_bytes == 4 * 32 * 100
    assert set(plan.to_json()) == {"peak_bytes", "parameters", "parts", "modules"}


def test_a_storage_is_counted_once_however_many_operations_save_it():
    model = nn.Linear(8, 8, bias=False)

    def step(x):
        y = model(x)
        return (y.exp() * y.view(-1, 4, 2).flatten(1).sin()).sum()  # sin saves a view of y; the product its factors

    plan = gradwatch.plan(model, step, torch.randn(16, 8))

    x, y, exp, sin = 4 * 16 * 8, 4 * 16 * 8, 4 * 16 * 8, 4 * 16 * 8
    assert plan.parts["activations"] == x + y + exp + sin


def test_a_graph_that_is_cut_off_is_freed_at_once():
    model = mlp(width=8)

    def step(x):
        with_graph = model(x)
        return with_graph.detach().sum() + model[0](x).sum()  # the first graph is freed at the end of the step

    plan = gradwatch.plan(model, lambda x: [step(x) for _ in range(3)][-1], torch.randn(64, 8))

    # the input, the outputs of the first layer, ReLU and Tanh at one time, and a layer of the step before
    assert plan.parts["activations"] <= 4 * 5 * 64 * 8


def test_a_plan_without_data_equals_a_real_step():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(32, 64)

    def step(x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    def step_with_branch(x):
        loss = step(x)
        return loss if loss.detach().isfinite() else loss * 0

    traced = gradwatch.plan(model, step, inputs, optimizer=optimizer)
    run = gradwatch.plan(model, step_with_branch, inputs, optimizer=optimizer)

    assert traced.is_traced
    assert not run.is_traced
    assert "cannot be traced without data" in run.notes[0]
    assert (traced.peak_bytes, traced.parts) == (run.peak_bytes, run.parts)
    assert all(row.forward_ms > 0 for row in run.modules)
    assert run.modules[0].backward_ms > 0


def test_a_plan_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    parameters, generator = list(model.parameters()), torch.get_rng_state()

    for step in (lambda x: model(x).sum(), lambda x: model(x).sum() if model(x).sum() < 1e9 else None):
        gradwatch.plan(model, step, torch.randn(4, 8, generator=torch.Generator()), optimizer=optimizer)

        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
        assert not optimizer.state
        assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        assert torch.equal(torch.get_rng_state(), generator)


def test_a_step_that_makes_its_own_update_is_not_updated_twice():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))

    def step(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert gradwatch.plan(model, step, torch.randn(4, 8), optimizer=optimizer).is_traced
    assert len(updates) == 2  # two steps, whose gradients count as finite


def test_gradients_are_freed_with_the_graph_and_the_peak_is_below_the_sum_of_the_parts():
    model = mlp(width=256)
    plan = gradwatch.plan(model, lambda x: model(x).sum(), torch.randn(256, 256))

    assert max(plan.parts.values()) < plan.peak_bytes < sum(plan.parts.values())
    assert sum(plan.at_peak.values()) == plan.peak_bytes


def test_bf16_weights_with_masters_take_16_bytes_a_parameter_before_activations():
    model = mlp().to(torch.bfloat16)
    inputs = torch.randn(4, 64, dtype=torch.bfloat16)

    plan = gradwatch.plan(model, lambda x: model(x).sum(), inputs, optimizer=MasterAdamW(model.parameters()))

    state = [plan.parts[part] for part in ("weights", "gradients", "optimizer")]
    assert sum(state) == 16 * plan.parameters == 16 * (2 * 64 * 64 + 2 * 64)
    assert state == [2 * plan.parameters, 2 * plan.parameters, 12 * plan.parameters]


def test_a_decoder_of_7_billion_parameters_is_planned_without_its_memory():
    layers, width = 8, 8192
    model = decoder(layers, width, device="meta")
    tokens = torch.zeros((1, 2048), dtype=torch.long, device="meta")

    plan = gradwatch.plan(model, next_token_loss(model), tokens, optimizer=MasterAdamW(model.parameters()))

    # weights 2, gradients 2, master 4, and two moments of 4 each
    state = {part: plan.parts[part] / plan.parameters for part in ("weights", "gradients", "optimizer")}
    assert plan.parameters > 6.9e9
    assert state == {"weights": 2, "gradients": 2, "optimizer": 12}
    assert plan.peak_bytes > 16 * plan.parameters
    # each weight of a product: 2 operations forward and 4 backward; attention: 2 products forward and 5 backward
    multiplied = plan.parameters - model.token.weight.numel() - model.position.weight.numel()
    assert plan.flops == pytest.approx(6 * 2048 * multiplied + layers * 7 * 2 * 2048**2 * width, rel=0.01)


def test_mistakes_in_the_call_are_named():
    with pytest.raises(GradwatchError, match="plan: model is a function"):
        gradwatch.plan(lambda x: x, nn.Linear(2, 2))
    with pytest.raises(GradwatchError, match="plan: step is a Tensor"):
        gradwatch.plan(nn.Linear(2, 2), torch.zeros(1))
    model = mlp(device="meta")
    with pytest.raises(GradwatchError, match="the model has none"):
        gradwatch.plan(model, lambda x: model(x).sum() if model(x).sum() > 0 else None, torch.zeros(2, 64))


class Deep(nn.Module):
    """Four equal blocks, whose activations are most of the memory of a step."""

    def __init__(self, width=32):
        super().__init__()
        wide = 4 * width
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)) for _ in range(4))
        )

    def forward(self, x):
        return self.blocks(x)


def test_with_a_budget_the_plan_has_the_optimal_modules_to_recompute_beside_the_simple_choices():
    model, inputs = Deep(), torch.zeros(512, 32)
    plain = gradwatch.plan(model, model, inputs)

    found = gradwatch.plan(model, model, inputs, budget=plain.peak_bytes * 3 // 4).recomputations

    by_name = {one.name: one for one in found}
    assert {"optimal", "sqrt", "every"} <= set(by_name)
    assert all(one.peak_bytes + one.saved_bytes == plain.peak_bytes for one in found)
    assert found[0].fits
    assert by_name["optimal"].extra_work == min(one.extra_work for one in found if one.fits)
    assert by_name["every"].extra_work > by_name["sqrt"].extra_work > 0  # three blocks, and two
    assert gradwatch.plan(model, model, inputs, budget="1TB").to_json() == plain.to_json(), "the model is as it was"


def test_a_module_that_is_given_one_tensor_twice_is_not_recomputed_alone():
    # torch computes queries, keys and values in one product if they come from the same tensor
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True)
    model, inputs = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.zeros(8, 16, 16)
    plain = gradwatch.plan(model, model, inputs)

    found = gradwatch.plan(model, model, inputs, budget=plain.peak_bytes * 4 // 5).recomputations

    (optimal,) = [one for one in found if one.name == "optimal"]
    assert optimal.fits
    assert not any(name.endswith("self_attn") for name in optimal.setting["modules"])
