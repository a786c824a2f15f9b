"""A step that makes another update than it was meant to is named with its stage and line; a right one is not."""

import copy

import pytest
import torch
from audit_cases import right_steps, wrong_steps
from audit_cases.planting import CASES, batch, net
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.errors import GradwatchError

FILES = (right_steps, wrong_steps)
"""Imported for the cases that they register."""
WRONG = [c for c in CASES if c.stage]
RIGHT = [c for c in CASES if not c.stage]


def audited(build):
    torch.manual_seed(0)
    step, given, model, optimizer = build()
    return gradwatch.audit_step(step, *given, model=model, optimizer=optimizer)


def test_there_are_enough_cases():
    assert len(WRONG) >= 30
    assert len(RIGHT) >= 60


@pytest.mark.parametrize("case", WRONG, ids=lambda c: c.name)
def test_a_planted_mistake_is_named_with_its_stage_and_line(case):
    result = audited(case.build)

    assert not result
    assert (result.first.stage, result.first.kind) == (case.stage, case.kind), str(result)
    assert result.first.place.line in case.marked()
    assert next(s for s in result.stages if s.verdict == "differs").name == case.stage


@pytest.mark.parametrize("case", RIGHT, ids=lambda c: c.name)
def test_a_right_step_differs_in_no_stage(case):
    result = audited(case.build)

    assert result, str(result)
    assert "differs" not in {s.verdict for s in result.stages}


class Loop:
    """A training loop with all kinds of state."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.average = copy.deepcopy(self.model)
        self.given = batch()
        self.losses, self.seen = [], {"steps": 0}

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        self.losses.append(loss.detach())
        self.seen["steps"] += 1

    def state(self):
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        owners = (self.model, self.average, self.optimizer, self.schedule, self.scaler)
        return copy.deepcopy(
            [*(o.state_dict() for o in owners), grads, self.losses, self.seen, torch.get_rng_state()],
        )


def flat(state):
    return [t.tolist() if isinstance(t, torch.Tensor) else t for t in torch.utils._pytree.tree_leaves(state)]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_nothing_changes_by_an_audit(steps):
    audited_one, plain = Loop(), Loop()
    for _ in range(steps):
        plain.step(*plain.given)
    torch.manual_seed(0)
    audited_one = Loop()
    for _ in range(steps):
        audited_one.step(*audited_one.given)
    before = flat(audited_one.state())

    assert gradwatch.audit_step(
        audited_one.step, *audited_one.given, model=audited_one.model, optimizer=audited_one.optimizer
    )

    assert flat(audited_one.state()) == before == flat(plain.state())


def test_everything_is_put_back_after_an_error_of_the_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def step(x, y):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradwatch.audit_step(step, *batch(), model=model, optimizer=optimizer)

    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert model[0].weight.grad is None


def test_the_ratio_says_by_how_much_the_stage_differs():
    by_kind = {c.name: c for c in WRONG}

    undivided = audited(by_kind["accumulation_without_division"].build).first
    scaled = audited(by_kind["scaled_loss_without_the_scaler_step"].build).first

    assert undivided.ratio == 4.0  # micro-batches
    assert scaled.ratio == 1024.0  # the scale


def test_a_kind_on_purpose_is_no_difference():
    build = wrong_steps.mean_of_means_over_unequal_samples
    step, given, model, optimizer = build()

    assert gradwatch.audit_step(step, *given, model=model, optimizer=optimizer, allow=["mean-of-means"])


def test_the_text_is_a_table_of_the_stages():
    lines = str(audited(wrong_steps.clip_before_unscale)).splitlines()

    assert lines[0] == "the step differs in its clip"
    assert [line.split()[0] for line in lines[-8:]] == [
        "loss",
        "gradient",
        "accumulate",
        "unscale",
        "clip",
        "update",
        "write-back",
        "schedule",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 1}, "audit_step: model is a int, expected a torch.nn.Module"),
        ({"optimizer": None}, "audit_step: optimizer is a NoneType, expected a torch.optim.Optimizer"),
        ({"allow": ["mean-of-mean"]}, "there is no kind 'mean-of-mean'; did you mean 'mean-of-means'?"),
        ({"allow": "frozen"}, r"allow is a string, expected a list: allow=\['frozen'\]"),
    ],
)
def test_a_mistake_in_the_call_is_named(change, message):
    model = net()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), **change}

    with pytest.raises(GradwatchError, match=message.replace("?", r"\?")):
        gradwatch.audit_step(lambda: None, **given)
