"""A bug in the user's own code shows the user's own lines, and warnings are single lines."""

import warnings

import pytest
from end_to_end.bad_input.commands import line_of, settings


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bug_in_the_user_s_model_shows_the_user_s_own_lines(train, folder, workers):
    overrides = settings("model={target: 'mine:Buggy', after: 2}", f"data.workers={workers}")

    code, out, err = train("base.yaml", *overrides)

    (run,) = folder.glob("runs/*")
    # Python 3.12 and later warn of the fork of a loader's worker, which pytest shows
    lines = [line for line in err.splitlines() if not line.startswith("warning: This process")]
    assert code == 70
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{folder}/mine.py", line {line_of("raise RuntimeError")}, in forward', (
        "the first frame is the user's"
    )
    assert lines[-4:] == [
        "RuntimeError: my own bug",
        "note: the model was called with inputs of shape (64, 1, 8, 8) and type torch.float32",
        f"note: the run got to step 2, before its first checkpoint; see what was recorded with: gradwatch diagnose "
        f"{run.relative_to(folder)}",
        "error: your own code raised RuntimeError: my own bug "
        f"(mine.py, line {line_of('raise RuntimeError')}, in forward)",
    ]
    assert '"status": "failed"' in (run / "run.json").read_text()
    assert "2 steps of 4" in out


def test_a_bug_at_the_first_step_leaves_no_run(train, folder):
    assert train("base.yaml", *settings("model={target: 'mine:Buggy'}"))[0] == 70
    assert not list(folder.glob("runs/*"))


def test_shapes_that_do_not_fit_in_the_user_s_model_are_reported_with_those_of_the_inputs(train):
    code, _, err = train("base.yaml", *settings("model={target: 'mine:Channels'}"))

    assert code == 70
    assert 'mine.py", line' in err
    assert "to have 3 channels, but got 1 channels instead" in err
    assert "note: the model was called with inputs of shape (64, 1, 8, 8) and type torch.float32\n" in err
    assert err.splitlines()[-1].startswith("error: your own code raised RuntimeError: Given groups=1")


def test_warnings_while_training_are_single_lines(train):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = train(
            "base.yaml", *settings("model={target: 'mine:Warning_'}", "train.accumulate=2", "data.val_fraction=0")
        )

    assert (code, err) == (0, f"warning: my own warning (mine.py, line {line_of('warnings.warn')})\n")


def test_batch_norm_with_accumulation_warns_in_one_line(train):
    overrides = settings("model.normalization=batch", "train.accumulate=2")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = train("base.yaml", *overrides)

    assert code == 0
    assert err.startswith("warning: train.accumulate: 1 BatchNorm layers (blocks.0.norm, ...) normalize each")
    assert err.count("\n") == 1


def test_a_tensor_that_is_changed_in_place_is_reported_with_both_lines(train):
    code, _, err = train("base.yaml", *settings("model={target: 'mine:InPlace'}"))

    (note,) = [line for line in err.splitlines() if "changed in place" in line]
    assert code == 70
    assert note == (
        "note: a tensor (64x10) was saved for the backward pass at "
        f"mine.py:{line_of('gates = torch.sigmoid')}: `gates = torch.sigmoid(outputs)`, and then changed in place by "
        f"add at mine.py:{line_of('gates += 1')}: `gates += 1`"
    )
