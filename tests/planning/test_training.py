"""Check that the plan of a config follows its settings, and equals what a real step of it needs."""

import itertools
import json

import pytest
import torch

from gradwatch.config.load import load_config
from gradwatch.errors import GradwatchError
from gradwatch.planning.checkpointing import settle
from gradwatch.planning.training import ConfigPlanner
from gradwatch.train.activation_offloading import except_weights
from gradwatch.train.training_state import TrainingState

CONFIG = """\
model: {name: gpt, layers: 2, heads: 2, width: 64}
data: {name: text, context: 64, batch_size: 8}
optim: {name: adamw, lr: 1e-3}
train: {steps: 3, device: cpu, clip: {norm: 1.0}}
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "gpt.yaml"
    path.write_text(CONFIG)
    return lambda changes: load_config(path, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


@pytest.fixture(scope="module")
def planner(load):
    return ConfigPlanner(load)


def allocated_peak(config):
    """Return the peak of two real steps by the profiler of torch, which sees every allocation on the CPU."""
    torch.manual_seed(0)
    training = TrainingState.build(config)
    window = list(itertools.islice(training.batches.epoch(0), config.train.accumulate))
    stepper = training.stepper(lambda: 2.0)
    live = sum(t.nbytes for t in (*training.model.parameters(), *training.model.buffers(), *itertools.chain(*window)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(2):
            stepper.run(window)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return live + max(itertools.accumulate(sizes))


@pytest.mark.parametrize(
    "changes",
    [
        {"train.activation_checkpointing": "sqrt"},
        {"train.precision": "fp16", "train.accumulate": 2, "data.batch_size": 4, "optim.name": "sgd"},
    ],
    ids=str,
)
def test_the_planned_peak_is_within_5_percent_of_what_is_allocated(planner, load, changes):
    plan = planner.plan(changes)

    assert plan.is_traced
    assert plan.peak_bytes == pytest.approx(allocated_peak(load(changes)), rel=0.05)


def test_activations_are_what_the_settings_change(planner):
    plain = planner.plan()
    checkpointed = planner.plan({"train.activation_checkpointing": "sqrt"})
    accumulated = planner.plan({"data.batch_size": 4, "train.accumulate": 2})

    # the tensors of the loss and of the blocks' parameters do not depend on the batch, so a little more than half
    assert 0.5 <= accumulated.parts["activations"] / plain.parts["activations"] < 0.55
    assert accumulated.flops == plain.flops
    assert checkpointed.peak_bytes < plain.peak_bytes
    # the products of the blocks run once more: a third of their passes
    assert plain.flops < checkpointed.flops < 4 / 3 * plain.flops
    assert checkpointed.parts["weights"] == plain.parts["weights"] == 4 * plain.parameters


def test_activations_in_host_memory_are_copied_there_and_back(load):
    # a device that no test machine has: the plan is that of the CPU, with memory of a device
    planner = ConfigPlanner(lambda changes: load({"train.device": "xpu", **changes}))
    saved = []
    training, window = ConfigPlanner(load).real_step()
    stepper = training.stepper(lambda: 1.0)

    def pack(tensor):
        saved.append(tensor.nbytes)
        return (tensor,)

    stepper.saving = lambda: except_weights(training.model, pack, lambda kept: kept[0])
    stepper.run(window)
    plain, offloaded = planner.plan(), planner.plan({"train.activation_offloading": True})

    assert offloaded.host_bytes == 2 * sum(saved)
    assert plain.host_bytes == offloaded.parts["activations"] == 0
    # what is left of the activations are the inputs of one operation, and the logits with their loss
    assert offloaded.peak_bytes < plain.peak_bytes - 0.5 * plain.at_peak["activations"]
    assert offloaded.work > plain.work


@pytest.fixture(scope="module")
def frugal(planner, load):
    """Return the planner of the config with a budget of 70 % of its peak, and the choice for it."""
    budget = int(0.7 * planner.plan().peak_bytes)
    section = {"train.activation_checkpointing": {"budget": f"{budget}B"}}
    other = ConfigPlanner(lambda changes: load({**section, **changes}))
    return other, settle(other), budget


def test_the_choice_for_a_budget_fits_and_recomputes_no_more_than_it_must(frugal, planner):
    other, choice, budget = frugal
    names = choice.setting["modules"]

    assert other.config.train.activation_checkpointing.modules == tuple(names)
    assert choice.peak_bytes <= budget
    for name in names:
        fewer = {"train.activation_checkpointing": {"modules": [other for other in names if other != name] or ["norm"]}}
        assert planner.plan(fewer).peak_bytes > budget


def test_a_budget_that_no_choice_meets_is_a_mistake_with_a_way_out(load):
    section = {"train.activation_checkpointing": {"budget": "1kB"}}

    with pytest.raises(GradwatchError, match=r"budget: got 1kB, but the training takes .* gradwatch plan CONFIG"):
        settle(ConfigPlanner(lambda changes: load({**section, **changes})))


def test_planning_draws_no_random_numbers_and_measuring_gives_times(load):
    before = torch.get_rng_state()

    measured = ConfigPlanner(load).measure()

    assert torch.equal(torch.get_rng_state(), before)
    assert not measured.is_traced
    assert all(row.forward_ms > 0 for row in measured.modules if row.outputs)
