"""A step that a loop of the user's own saved leads to the operation, the line and the sample."""

import copy
from pathlib import Path

import pytest
import torch
from poisoned import STEP, poisoned
from torch import nn

import gradwatch
from gradwatch.cli import main
from gradwatch.errors import GradwatchError, RunError
from gradwatch.incident import StepRecord
from gradwatch.replay.locate.bad_operation import Blame
from gradwatch.state.rng import random_state
from gradwatch.train.loop import train

BAD, SAMPLE = 5, 3
pytestmark = pytest.mark.filterwarnings("ignore:gradwatch", "ignore:train.accumulate")


class Distance(nn.Module):
    """The distance of two embedded points, with noise in training; its gradient is NaN where the points are equal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.noise = nn.Linear(6, 16), nn.Dropout(0.3)

    def forward(self, left, right):
        return self.noise(self.embed(left) - self.embed(right)).square().sum(1).sqrt()


def step_of(model, losses):
    def step(left, right, distance):
        losses.append((model(left, right) - distance).square().mean())
        return losses[-1]

    return step


def loop(run, *, record=True, batch=lambda *parts: parts, accumulate=1, wrap=lambda model: model):
    """Train until a few steps after a sample of two equal points; return the model and all losses."""
    model, losses = wrap(Distance()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = step_of(model, losses)
    with gradwatch.watch(model, optimizer, run=run, record=record, accumulate=accumulate, on_finding=None) as monitor:
        for micro_step in range(accumulate * (BAD + 3)):
            left, right = torch.randn(2, 8, 6)
            if micro_step == accumulate * BAD:  # the first micro-batch of its step
                right[SAMPLE] = left[SAMPLE]
            parts = left, right, torch.ones(8)
            loss = step(*parts)
            loss.backward()
            if (micro_step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss, batch=batch(*parts))
    return model, losses


@pytest.fixture
def saved(tmp_path):
    """Return the trained model, the losses of its training, and the incident of the bad step."""
    model, losses = loop(tmp_path / "run")
    return model, losses, gradwatch.incidents(tmp_path / "run")[0]


def test_a_saved_step_names_operation_line_and_sample(saved):
    model, _, incident = saved

    located = incident.locate(step_of(model, []), model=model)

    assert (incident.step, located.name, located.samples) == (BAD, "sqrt", (SAMPLE,))
    assert (Path(located.place.file), located.place.function) == (Path(__file__), "forward")
    assert located.blame is Blame.FORMULA


def test_the_step_is_run_as_it_was_and_the_training_is_left_as_it_is(saved):
    model, losses, incident = saved
    again, generators, before = [], random_state(), copy.deepcopy(model.state_dict())

    incident.locate(step_of(model, again), model=model)

    assert torch.equal(again[0], losses[BAD]), "weights, batch or random numbers differ"
    assert all(value.isnan().all() for value in before.values()), "the NaN of the training is still there"
    assert all(value.isnan().all() for value in model.state_dict().values())
    assert torch.equal(random_state()["torch"], generators["torch"])


def test_a_fresh_model_of_another_process_will_do(saved):
    fresh = Distance()

    assert saved[2].locate(step_of(fresh, []), model=fresh).samples == (SAMPLE,)


def test_replay_of_a_rank_shows_the_code_that_runs_its_saved_step_again(tmp_path, capsys):
    loop(tmp_path / "run/ranks/1")

    def replay(*arguments):
        return main(["replay", str(tmp_path / "run"), *arguments]), " ".join(capsys.readouterr().err.split())

    code, said = replay("--rank", "1", "--step", str(BAD))
    assert code == 2
    assert f'gradwatch.incidents("{tmp_path}/run/ranks/1")[0].locate(' in said
    assert f"it saved the steps {BAD}" in replay("--rank", "1", "--step", "1")[1]
    assert "--rank: got 2, expected one of 0, 1" in replay("--rank", "2")[1]


class Wrapper(nn.Module):
    """Adds the prefix that DistributedDataParallel adds to the names of a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_the_model_of_a_rank_runs_without_its_wrapper(tmp_path):
    loop(tmp_path / "run/ranks/1", wrap=Wrapper)
    (incident,) = gradwatch.incidents(tmp_path / "run/ranks/1")
    inner, outer = Distance(), Wrapper(Distance())

    assert incident.locate(step_of(inner, []), model=inner).samples == (SAMPLE,)
    assert incident.locate(step_of(outer, []), model=outer).samples == (SAMPLE,)


def test_a_finite_step_of_a_rank_points_to_the_other_ranks(tmp_path):
    for part in ("run", "run/ranks/1"):
        loop(tmp_path / part)
    incident, model = gradwatch.incidents(tmp_path / "run")[0], Distance()

    with pytest.warns(RuntimeWarning, match=r"NaN of another rank, whose steps are in .*/run/ranks/1'\)"):
        located = incident.locate(lambda left, right, _: model.embed(left - right).sum(), model=model)

    assert located is None


def test_the_model_of_a_saved_step_may_be_wrapped_later(saved):
    outer = Wrapper(Distance())

    assert saved[2].locate(step_of(outer, []), model=outer).samples == (SAMPLE,)


def test_without_a_batch_the_step_gets_the_inputs_of_the_model(tmp_path):
    model, _ = loop(tmp_path / "run", batch=lambda *parts: None)
    (incident, *_) = gradwatch.incidents(tmp_path / "run")

    located = incident.locate(lambda left, right: model(left, right).sum(), model=model)

    assert located.samples == (SAMPLE,)
    with pytest.raises(GradwatchError, match=r"it takes \(left, right, distance\), .* 2 parts; .*batch=\(inputs, targ"):
        incident.locate(step_of(model, []), model=model)


def test_a_batch_that_no_file_can_hold_is_left_out(tmp_path):
    model, _ = loop(tmp_path / "run", batch=lambda *parts: {"points": parts, "source": Path("points.csv")})

    located = gradwatch.incidents(tmp_path / "run")[0].locate(lambda *points: model(*points).sum(), model=model)

    assert located.samples == (SAMPLE,)


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        ({"record": StepRecord(every=BAD + 1)}, "the model was copied before step 0"),
        ({"accumulate": 2}, "2 micro-batches, and only the last one was saved"),
    ],
)
def test_a_finite_result_of_another_state_comes_with_a_doubt(options, doubt, tmp_path):
    model, _ = loop(tmp_path / "run", **options)
    (incident, *_) = gradwatch.incidents(tmp_path / "run")

    def finite(left, right, distance):
        return (model(left, right) * 0 + 1).detach().sum() + model.embed.weight.sum()

    with pytest.warns(RuntimeWarning, match=doubt):
        assert incident.locate(finite, model=model) is None


def test_another_model_is_refused(saved):
    model, _, incident = saved

    with pytest.raises(GradwatchError, match=r"the weights in .*step-000005 do not fit it"):
        incident.locate(step_of(model, []), model=nn.Linear(2, 2))
    with pytest.raises(GradwatchError, match="model: got left, right, expected a single model"):
        incident.locate(step_of(model, []), model={"left": model, "right": model})


def test_a_model_too_large_to_be_copied_says_what_to_do(tmp_path):
    model = loop(tmp_path / "run", record=StepRecord(memory_mb=0))[0]

    with pytest.raises(RunError, match=r"too large to be copied; .*memory_mb="):
        gradwatch.incidents(tmp_path / "run")[0].locate(step_of(model, []), model=model)


def test_an_incident_prints_its_step_its_findings_and_the_way_on(saved):
    text = str(saved[2])

    assert text.startswith(f"step {BAD} of {saved[2].path.parents[1]}: critical non-finite (GW001): ")
    assert text.endswith("; run it again: incident.locate(step, model=model)")
    assert str(gradwatch.incidents(str(saved[2].path.parents[1]))).splitlines()[0] == text


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path):
    with pytest.raises(RunError, match="no such run directory"):
        gradwatch.incidents(str(tmp_path / "none"))
    with pytest.raises(RunError, match=r"is not a run directory: it has no run\.json"):
        gradwatch.incidents(tmp_path)


def test_a_run_that_saved_no_step_says_how_to_save_one(tmp_path):
    loop(tmp_path / "run", record=False)

    with pytest.raises(RunError, match=r"watched without record=True; call gradwatch\.watch\(.*record=True\)"):
        gradwatch.incidents(tmp_path / "run")


def test_an_incident_of_a_config_names_the_command(tmp_path):
    train(poisoned(tmp_path, f"train.steps={STEP + 1}"), log_format="plain")
    (run,) = (tmp_path / "runs").iterdir()
    (incident,) = gradwatch.incidents(run)

    command = f"gradwatch replay {run} --step {STEP}"
    assert str(incident).endswith(command)
    with pytest.raises(RunError, match=command):
        incident.locate(lambda *_: None, model=nn.Linear(1, 1))
