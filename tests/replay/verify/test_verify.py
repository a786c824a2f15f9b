"""Causes are proved by changing one thing at a time: what is so is confirmed, what is not is refuted, with numbers."""

import json
import time

import pytest
import torch
from replay.faulty import BAD

from gradwatch.cli import main
from gradwatch.cli.output.verify_run import VerifyOptions, verify_run
from gradwatch.config.load import load_config
from gradwatch.diagnose.rank import diagnose
from gradwatch.errors import GradwatchError
from gradwatch.history.disk.writer import read
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.incident import recorder
from gradwatch.replay.locate.bad_operation import Blame
from gradwatch.replay.locate_in_run import bad_since, locate_in_run
from gradwatch.replay.trials.runner import TrialRunner, no_progress
from gradwatch.replay.verify.verify import verify
from gradwatch.train.loop import train

CONFIG = """
run: {{seed: 3}}
model: {{target: "replay.faulty:Two", {model}}}
data: {{target: "replay.faulty:data", batch_size: 32, {data}}}
optim: {{name: sgd, lr: 0.1}}
train: {{epochs: 2, threads: 1, {train}}}
sinks: {{terminal: {{enabled: false}}, tensorboard: {{enabled: false}}}}
"""

pytestmark = pytest.mark.filterwarnings("ignore:gradwatch")


@pytest.fixture
def ill(tmp_path, monkeypatch):
    """Return a function that trains something ill and returns its run directory."""
    monkeypatch.setattr(recorder, "REST_S", 0.0)

    def run(*, model="scale: 1.0", data="shuffle: true", train_="precision: fp32"):
        path = tmp_path / "ill.yaml"
        path.write_text(CONFIG.format(model=model, data=data, train=train_))
        return train(load_config(path, [f"run.out={tmp_path}"]), log_format="plain").directory

    return run


def proofs_of(run):
    history = read(run)
    runner = TrialRunner(run, history, deadline=time.perf_counter() + 60)
    return verify(runner, diagnose(history))


def status(verification, cause):
    return next((t.status for t in verification.causes if t.cause_id == cause), None)


def test_a_nan_sample_is_found_and_proved(ill):
    run = ill(data="bad: .nan")

    (verification, *_) = proofs_of(run)

    assert verification.reproduced
    assert verification.located.blame is Blame.DATA
    assert status(verification, "bad-data") == "confirmed"
    assert status(verification, "singular-formula") != "confirmed"
    assert verification.dependence == "needs this batch"


def test_the_sample_that_is_named_is_the_bad_one(ill):
    run = ill(data="bad: .nan, shuffle: false")

    searched = locate_in_run(run, BAD // 32)

    assert searched.located.samples == (BAD % 32,)
    assert searched.located.in_data == (BAD,)
    assert searched.located.leaf.name == "inputs"


def test_a_singular_formula_in_a_model_is_proved_by_keeping_away_from_it(ill):
    run = ill(model="share: true")

    (verification, *_) = proofs_of(run)

    assert verification.located.place.text.endswith("# here")
    assert status(verification, "singular-formula") == "confirmed"
    assert status(verification, "bad-data") == "refuted", "it was looked at"


def test_an_overflow_of_half_precision_is_proved_by_float32(ill):
    run = ill(model="scale: 1.0e+6", train_="precision: fp16")

    verification = next(p for p in proofs_of(run) if p.finding.kind in ("non-finite", "loss-scale-collapse"))

    assert verification.located.blame is Blame.FORMAT
    assert status(verification, "half-precision-overflow") == "confirmed"
    assert "the number format" in verification.dependence
    numerics = [c for t in verification.causes for c in t.experiments if c.axis == "numerics"]
    assert any(c.gone and "float32" in c.text for c in numerics)


def test_dropout_and_batch_norm_are_switched_off_in_turn(ill):
    run = ill(model="share: true, dropout: 0.5")

    (verification, *_) = proofs_of(run)

    texts = [c.text for c in verification.other_experiments]
    assert "without dropout" in texts
    assert "BatchNorm with its running statistics" in texts
    assert "3 other random seeds" in texts


def test_what_was_looked_at_is_put_back(ill):
    run = ill(data="bad: .nan")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    torch.manual_seed(5)
    drawn, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)

    proofs_of(run)

    assert torch.equal(torch.rand(3), drawn)
    assert torch.get_num_threads() == threads
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_without_time_a_cause_that_takes_training_stays_open(ill):
    run = ill(model="share: true", train_="eval_every: 100")
    history = read(run)

    verifications = verify(TrialRunner(run, history, deadline=0.0), diagnose(history))

    assert status(verifications[0], "singular-formula") == "confirmed", "a single step takes no training"
    assert all(c.gone is None for p in verifications for t in p.causes for c in t.experiments if c.change)


def test_verifying_a_run_of_ones_own_loop_says_why_it_cannot(tmp_path):
    options = VerifyOptions(verify=True, within_s=1, patch=None, steps=None, seeds=1, change=None)

    with pytest.raises(GradwatchError, match=r"made by gradwatch.watch"):
        verify_run(tmp_path, Synthetic().history(), (), options, progress=no_progress)


def test_replay_names_the_first_bad_operation(ill, capsys):
    run = ill(data="bad: .nan")

    code = main(["replay", str(run)])
    told = capsys.readouterr().out
    main(["replay", str(run), "--format", "json"])
    data = json.loads(capsys.readouterr().out)

    assert code == 0
    assert "the first bad operation is addmm" in told
    assert "bad data" in told
    assert data["located"]["operation"]["module"] == "first"


def test_a_weight_is_bad_since_the_update_after_a_bad_gradient():
    made = Synthetic(layers=3, steps=60)
    made.nonfinite_TL[40:, 1] = 5
    made.skipped_T[40] = 1
    history = made.history()

    assert bad_since(history, "layers.1.weight") == 41, "the update of step 40 was left out"
    assert bad_since(history, "layers.0.weight") is None
    assert bad_since(history, "no.such") is None


def test_a_weight_is_out_of_hand_since_its_norm_grew_a_thousandfold():
    made = Synthetic(layers=3, steps=60)
    made.weight_l2_TL[30:, 2] *= 1e5

    since = bad_since(made.history(), "layers.2.weight")

    assert 30 <= since <= 40, "norms are sampled"
