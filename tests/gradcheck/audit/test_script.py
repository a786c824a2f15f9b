"""An unedited script runs until it has made two updates, and their stages are judged."""

import sys

import pytest
import torch
from torch.autograd import graph
from torch.utils.data import dataloader

from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.audit.script import audit_script

LOOP = """
import copy, sys, torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
{prepare}
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(100):
    for i, (x, y) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        loss = nn.functional.cross_entropy(model(x), y){divide}
        loss.backward()
        if (i + 1) % 4 == 0:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            {clear}
    print("epoch", epoch)
    assert epoch < 1, "more than the first updates"
"""
ADVERSARIAL = """
import torch
from torch import nn

real = torch.randn(8, 2)
make, judge = nn.Linear(3, 2), nn.Linear(2, 1)
makers, judges = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())
for step in range(100):
    judges.zero_grad()
    (judge(make(torch.randn(8, 3)).detach()).mean() - judge(real).mean()).backward()
    judges.step()
    makers.zero_grad()
    (-judge(make(torch.randn(8, 3))).mean()).backward()
    makers.step()
    assert step < 2, "more than the first updates"
"""
SCALED = """
import torch
from torch import nn

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(3):
    optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
"""
RIGHT = {"prepare": "", "divide": " / 4", "clear": "optimizer.zero_grad()"}


@pytest.fixture
def audited(tmp_path):
    """Return a function that audits the text of a script."""

    def audit(text, *arguments, allow=()):
        torch.manual_seed(0)
        script = tmp_path / "train.py"
        script.write_text(text)
        return audit_script(script, arguments, allow=allow)

    return audit


def test_a_right_loop_with_accumulation_is_as_meant_and_ends_early(audited, capsys):
    found = audited(LOOP.format(**RIGHT))

    assert found, str(found)
    assert (found.updates, found.passes) == (2, 4)
    assert {s.name for s in found.stages if s.verdict == "not seen"} == {"unscale"}
    assert capsys.readouterr() == ("", "epoch 0\n")


@pytest.mark.parametrize(
    ("change", "kind", "line"),
    [
        ({"divide": ""}, "loss-not-divided", "loss.backward()"),
        ({"clear": "pass"}, "zero-grad-missing", "loss.backward()"),
        ({"clear": "optimizer.zero_grad(); schedule.step()"}, "scheduled-twice", "schedule.step()"),
        ({"prepare": "model = copy.deepcopy(model)"}, "stale-parameters", "optimizer.step()"),
        ({"prepare": "del model; model = nn.Linear(4, 3)"}, "stale-parameters", "optimizer.step()"),
    ],
)
def test_a_planted_mistake_is_named_with_its_line(audited, change, kind, line):
    found = audited(LOOP.format(**RIGHT | change))

    (difference,) = [d for d in found.differences if d.kind == kind]
    assert difference.place.file.endswith("train.py")
    assert line in difference.place.text
    assert audited(LOOP.format(**RIGHT | change), allow=[kind, "clip-of-wrong-parameters"])


def test_each_optimizer_is_judged(audited):
    assert audited(ADVERSARIAL)

    wrong = audited(ADVERSARIAL.replace("    makers.zero_grad()\n", ""))
    assert wrong.first.kind == "zero-grad-missing"


def test_a_scaled_loss_that_is_clipped_too_early_is_named(audited):
    found = audited(SCALED)

    assert (found.first.kind, found.first.ratio) == ("clip-before-unscale", 1 / 64)


def test_the_script_gets_its_arguments_and_may_exit(audited):
    text = SCALED.replace("range(3)", "range(1)") + "import sys\nassert sys.argv[1:] == ['--fast']\nsys.exit(3)\n"

    assert audited(text, "--fast").updates == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('nothing')", "ended without a backward pass for an optimizer of torch"),
        ("{}['k']", r"failed: KeyError: 'k' \(.*train.py, line 1"),
    ],
)
def test_a_script_without_an_update_is_a_mistake(audited, text, message):
    with pytest.raises(GradwatchError, match=message):
        audited(text)


def test_torch_and_python_are_put_back(audited):
    before = (graph._engine_run_backward, dataloader._BaseDataLoaderIter.__next__, sys.argv, [*sys.path], sys.stdout)

    audited(LOOP.format(**RIGHT))

    after = (graph._engine_run_backward, dataloader._BaseDataLoaderIter.__next__, sys.argv, sys.path, sys.stdout)
    assert after == before
