"""A restored step is the state before a step, bit for bit, any number of times."""

import numpy as np
import pytest
import torch
from poisoned import STEP, poisoned
from torch import nn

from gradwatch import load_run
from gradwatch.errors import RunError
from gradwatch.incident import recorder
from gradwatch.replay.incident import incidents
from gradwatch.replay.restore.restored_step import restore_step
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


def run_step(restored, window=None, **changes):
    return restored.stepper(**changes).run(restored.window if window is None else window)


def assert_equal(a, b):
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_the_window_of_an_incident_is_restored(recorded):
    incident = incidents(recorded)[0]
    with restore_step(recorded, STEP) as restored:
        assert restored.step == incident.step == STEP
        assert [len(inputs) for inputs, _ in restored.window] == [8, 8]
        assert [part.tolist() for part in restored.indices] == incident.facts["samples"]
        kept = incident.state()["window"]
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
            result = run_step(restored)
            after.append(weights(restored))
            assert result.loss == history["loss"][18]
            assert np.float32(result.norm) == np.float32(history["grad_norm.before_clip"][18])

    assert_equal(after[0], after[1])
    assert_equal(after[0], after[2])
    assert not torch.equal(after[0]["head.weight"], before["head.weight"])


def test_the_passes_alone_leave_the_gradient_and_no_update(recorded):
    with restore_step(recorded, step=18) as restored:
        before = weights(restored)

        passes = restored.stepper().backward(restored.window)

        after = weights(restored)
        assert passes.finite
        assert passes.loss == load_run(recorded)["loss"][18]
        assert all(torch.equal(before[n], after[n]) for n, p in restored.training.model.named_parameters())
        assert all(p.grad is not None for p in restored.training.model.parameters())
        restored.restore()
        assert all(p.grad is None for p in restored.training.model.parameters())
        assert_equal(before, weights(restored))


def test_one_thing_can_be_changed_at_a_time(recorded):
    with restore_step(recorded, STEP) as restored:
        as_it_was = run_step(restored).loss
        restored.restore()
        other_batch = run_step(restored, restored.window_at(1)).loss
        restored.restore()
        bounded = Objective(function=nn.HuberLoss())
        other_loss = run_step(restored, objective=bounded).loss
        restored.restore()
        inputs, targets = restored.window[0]
        keep = targets[:, 0] < 1e30
        without = [(inputs[keep], targets[keep]), restored.window[1]]
        without_the_sample = run_step(restored, without).loss

    assert not np.isfinite(as_it_was)
    assert np.isfinite([other_batch, other_loss, without_the_sample]).tolist() == [True, True, True]


def test_modes_and_what_is_changed_in_them_are_put_back(recorded):
    with restore_step(recorded, step=18) as restored:
        expected = run_step(restored).loss
        restored.restore()
        restored.training.model.eval()
        other = run_step(restored).loss
        restored.restore()

        assert other != expected
        assert run_step(restored).loss == expected


def test_the_next_window_is_the_one_that_the_training_saw(recorded):
    with restore_step(recorded, step=18) as restored, restore_step(recorded, step=17) as earlier:
        assert torch.equal(earlier.window_at(1)[1][0], restored.window[1][0])


def test_random_numbers_and_threads_of_this_process_stay_as_they_were(recorded):
    state, threads = torch.get_rng_state(), torch.get_num_threads()

    with restore_step(recorded, STEP) as restored:
        run_step(restored)

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path):
    with (
        pytest.raises(RunError, match=r"not a run of `gradwatch train` \(no config\.yaml\)"),
        restore_step(tmp_path, 0),
    ):
        pass
