"""A scene stands before a step as the training did, as often as one likes, and follows it to the last bit."""

import dataclasses

import numpy as np
import pytest
import torch
from poisoned import STEP, poisoned
from torch import nn

from gradwatch import load_run
from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.incident import recorder
from gradwatch.replay.restore.restored_step import restore_step
from gradwatch.train import checkpoint
from gradwatch.train.loop import train
from gradwatch.train.objective import Objective

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradwatch"),
    pytest.mark.filterwarnings("ignore:train.accumulate"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a run with dropout, augmentation and accumulation, and an incident in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "REST_S", 0.0)
        config = poisoned(tmp_path_factory.mktemp("recorded"), "data.batch_size=8", "train.accumulate=2")
        return train(config, log_format="plain").directory


def weights(restored):
    return {name: value.clone() for name, value in restored.training.model.state_dict().items()}


def assert_equal(a, b):
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_it_stands_before_the_step_of_the_first_incident(recorded):
    with restore_step(recorded) as restored:
        assert (restored.step, restored.start_step) == (STEP, 16)
        assert restored.incident.step == STEP
        assert [len(inputs) for inputs, _ in restored.window] == [8, 8]
        assert [part.tolist() for part in restored.indices] == restored.incident.facts["samples"]
        kept = restored.incident.state()["window"]
        assert all(
            torch.equal(a, b)
            for mine, its in zip(restored.window, kept, strict=True)
            for a, b in zip(mine, its, strict=True)
        )


def test_a_step_comes_out_as_recorded_any_number_of_times(recorded):
    history = load_run(recorded)
    after = []
    with restore_step(recorded, step=18) as restored:
        before = weights(restored)
        for _ in range(3):
            restored.restore()
            assert_equal(before, weights(restored))
            result = restored.run_step()
            after.append(weights(restored))
            assert result.loss == history["loss"][18]
            assert np.float32(result.norm) == np.float32(history["grad_norm.before_clip"][18])

    assert_equal(after[0], after[1])
    assert_equal(after[0], after[2])
    assert not torch.equal(after[0]["head.weight"], before["head.weight"])


def test_it_runs_on_to_the_weights_of_the_next_checkpoint(recorded):
    with restore_step(recorded, step=32) as restored:
        results = restored.run_on(8)

        state = checkpoint.load(recorded / "checkpoints", step=40)[1]
        assert_equal(state["model"], weights(restored))
        assert [r.loss for r in results] == load_run(recorded)["loss"][32:40].tolist()
        restored.restore()
        assert restored.training.progress.step == 32


def test_the_passes_alone_leave_the_gradient_and_no_update(recorded):
    with restore_step(recorded, step=18) as restored:
        before = weights(restored)

        loss, finite = restored.forward_backward()

        after = weights(restored)
        assert finite
        assert loss == load_run(recorded)["loss"][18]
        assert all(torch.equal(before[n], after[n]) for n, p in restored.training.model.named_parameters())
        assert all(p.grad is not None for p in restored.training.model.parameters())
        restored.restore()
        assert all(p.grad is None for p in restored.training.model.parameters())
        assert_equal(before, weights(restored))


def test_one_thing_can_be_changed_at_a_time(recorded):
    with restore_step(recorded) as restored:
        as_it_was = restored.run_step().loss
        restored.restore()
        other_batch = restored.run_step(restored.window_at(1)).loss
        restored.restore()
        bounded = Objective(function=nn.HuberLoss())
        other_loss = restored.run_step(stepper=restored.stepper(objective=bounded)).loss
        restored.restore()
        inputs, targets = restored.window[0]
        keep = targets[:, 0] < 1e30
        without = [(inputs[keep], targets[keep]), restored.window[1]]
        without_the_sample = restored.run_step(without).loss

    assert not np.isfinite(as_it_was)
    assert np.isfinite([other_batch, other_loss, without_the_sample]).tolist() == [True, True, True]


def test_modes_and_what_is_changed_in_them_are_put_back(recorded):
    with restore_step(recorded, step=18) as restored:
        expected = restored.run_step().loss
        restored.restore()
        restored.training.model.eval()
        other = restored.run_step().loss
        restored.restore()

        assert other != expected
        assert restored.run_step().loss == expected


def test_windows_before_and_after_are_those_that_the_training_saw(recorded):
    with restore_step(recorded, step=18) as restored, restore_step(recorded, step=17) as earlier:
        assert torch.equal(restored.window_at(-1)[0][0], earlier.window[0][0])
        assert torch.equal(earlier.window_at(1)[1][0], restored.window[1][0])
        with pytest.raises(IndexError, match="the epoch has 18 steps before step 18"):
            restored.window_at(-19)


def test_a_changed_config_stands_at_the_same_weights(recorded):
    config = load_config(recorded / "config.yaml", ["train.precision=bf16"])

    with restore_step(recorded, step=30) as restored, restore_step(recorded, step=30, config=config) as changed:
        assert_equal(weights(restored), weights(changed))
        assert restored.run_step().loss != changed.run_step().loss


def test_the_state_of_any_moment_can_be_gone_back_to(recorded):
    with restore_step(recorded, step=18) as restored:
        restored.run_on(2)
        moment = restored.state()
        expected = restored.run_on(1)[0]
        restored.restore()

        restored.set_state(moment)

        assert restored.training.progress.step == 20
        assert dataclasses.astuple(restored.run_on(1)[0]) == dataclasses.astuple(expected)


def test_random_numbers_and_threads_of_this_process_stay_as_they_were(recorded):
    state, threads = torch.get_rng_state(), torch.get_num_threads()

    with restore_step(recorded) as restored:
        restored.run_step()

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path):
    with pytest.raises(RunError, match=r"it holds no config\.yaml"), restore_step(tmp_path):
        pass
