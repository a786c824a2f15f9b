"""Every remedy of the table of causes is applied to a planted fault, and the finding is gone."""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
import torch
from rank_faults_worker import REMEDIES as OF_RANKS
from replay.code_cases import CODE_LOOPS
from replay.remedy_cases import FORMULAS, LOOPS, Loop, Operation, run

from gradwatch.config.load import load_config
from gradwatch.data import digits
from gradwatch.diagnose.causes import CAUSES
from gradwatch.diagnose.rank import diagnose
from gradwatch.diagnose.remedies import KNOWN
from gradwatch.records import Severity
from gradwatch.replay.trials.trial_run import run_trial

UNTESTED = {
    "find_operation": "names the operation and changes nothing",
    "larger_batch": "a lower noise takes longer to show than the tests may take",
    "no_grad": "its finding is a note; the healthy loops of tests/probe/memory evaluate without autograd",
    "weigh_classes": "its finding is a note; tests/detect/data_and_loss/test_majority_class.py has weighted classes",
    "bound_collection": "memory takes longer to fill than the tests may take",
    "expandable_segments": "there is no allocator of CUDA without a GPU",
    "normalize_queries": "heads take longer to collapse than the tests may take; scripts/studies/lead_time.py has both",
    "balance_experts": "routers collapse in more steps than tests may take; moe_top1_routing of the zoo has this loss",
    "calm_router": "routers take longer to collapse than the tests may take",
    "fewer_passes": "agents take longer to train than the tests may; scripts/studies/policies.py has both",
    "same_log_probs": "as above",
    "split_workers": "tests/detect/data_and_loss/test_worker_copies.py has the stream, split and not",
    "own_parameters": "tests/probe/gradients/test_opposed_optimizers.py has both, with two optimizers",
    "watch_again": "tests/end_to_end/watch/test_next_model.py has one monitor for two models, and one for each",
    "match_names": "the load precedes the loop; tests/autowatch/test_scripts.py has the script with both names",
    "copy_state": "tests/probe/modules/test_own_state.py has both, with a copy and without",
    "smaller_batch": "gradwatch plans the change that fits, in tests/end_to_end/bad_input/test_out_of_memory.py",
}
"""Remedies without a planted fault, each with the reason."""

MLP = "model: {name: mlp, depth: 3, width: 64}\n"
DIGITS = "data: {name: digits, batch_size: 64}\n"
ADAM = "optim: {name: adamw, lr: 1e-3}\n"
SYNTHETIC = "model: {name: mlp, depth: 2, width: 16}\ndata: {name: synthetic, batch_size: 50}\n" + ADAM.replace(
    "1", "3", 1
)

CONFIGS = {
    "rate-high": (MLP + DIGITS + "optim: {name: adam, lr: 1.0}\n", 50),
    "rate-jumps": (MLP + DIGITS + ADAM + "schedule: {name: multi_step, milestones: [40], gamma: 1000.0}\n", 70),
    "rate-grows": (MLP + DIGITS + ADAM + "schedule: {name: exponential, gamma: 1.08}\n", 90),
    "rate-low": (MLP + DIGITS + "optim: {name: adamw, lr: 1e-7}\n", 40),
    "warm-up": (SYNTHETIC + "schedule: {warmup_steps: 100000}\n", 60),
    "one-cycle": (
        SYNTHETIC + "schedule: {name: one_cycle, max_lr: 3e-3, total_steps: 100000, div_factor: 1e5, "
        "anneal_strategy: linear}\n",
        60,
    ),
    "plugin": (SYNTHETIC + "schedule: {name: LinearLR, start_factor: 1e-5, total_iters: 100000}\n", 60),
    "decay": (
        "model: {name: mlp, depth: 2, width: 32}\n" + DIGITS + "optim: {name: sgd, lr: 0.02, momentum: 0.9}\n"
        "schedule: {name: step, step_size: 5, gamma: 0.5}\n",
        140,
    ),
    "sigmoid": ("model: {name: mlp, depth: 12, width: 32, activation: sigmoid}\n" + DIGITS + ADAM, 60),
    "tanh": ("model: {name: mlp, depth: 30, width: 16, activation: tanh}\n" + DIGITS + ADAM, 50),
    "weights-large": ("model: {name: mlp, depth: 3, width: 200, init: normal, init_std: 1.0}\n" + DIGITS + ADAM, 40),
    "weights-gain": ("model: {name: mlp, depth: 12, width: 48, init: kaiming, gain: 5.0}\n" + DIGITS + ADAM, 40),
    "weights-zero": ("model: {name: mlp, depth: 3, width: 32, init: normal, init_std: 0.0}\n" + DIGITS + ADAM, 40),
    "underflow": (
        "model: {name: mlp, depth: 4, width: 64, activation: gelu}\n"
        "data: {name: synthetic, kind: values, samples: 2000, dims: 8, noise: 0.05, batch_size: 128}\n"
        "loss: {name: HuberLoss, delta: 1e-5}\noptim: {name: adamw, lr: 2e-3}\n"
        "train: {precision: fp16, scaler: {enabled: false}}\n",
        30,
    ),
    "scale-low": (
        "model: {name: mlp, depth: 10, width: 64}\n"
        + DIGITS
        + ADAM
        + "train: {precision: fp16, scaler: {init_scale: 0.01}}\n",
        30,
    ),
    "sorted": (
        "model: {name: cnn, channels: [24, 48], normalization: none, activation: leaky_relu}\n"
        "data: {name: npz, file: FOLDER/sorted.npz, batch_size: 15, shuffle: false}\noptim: {name: sgd, lr: 0.1}\n",
        150,
    ),
    "raw": (
        "model: {name: mlp, depth: 3, width: 64, activation: tanh}\n"
        "data: {name: npz, file: FOLDER/raw.npz, standardize: false, batch_size: 100}\n"
        "optim: {name: sgd, lr: 0.02, momentum: 0.9}\n",
        40,
    ),
    "few-samples": (
        "model: {name: mlp, depth: 3, width: 256}\n"
        "data: {name: npz, file: FOLDER/few.npz, val_inputs: u, val_targets: v, batch_size: 35}\n"
        "optim: {name: adam, lr: 3e-4}\ntrain: {eval_every: 10}\n",
        120,
    ),
    "linear": (
        "model: {name: mlp, depth: 3, width: 32, activation: identity, normalization: batch}\n"
        "data: {name: npz, file: FOLDER/circles.npz, batch_size: 128}\noptim: {name: sgd, lr: 0.02, momentum: 0.9}\n",
        200,
    ),
}
"""Config and number of steps of a training with a planted fault."""

CURES = [
    ("rate-high", "learning-rate-too-high", "optim.lr"),
    ("rate-jumps", "learning-rate-too-high", "schedule"),
    ("rate-grows", "learning-rate-too-high", "schedule"),
    ("rate-low", "learning-rate-too-low", "optim.lr"),
    ("warm-up", "learning-rate-too-low", "schedule.warmup_steps"),
    ("one-cycle", "learning-rate-too-low", "schedule"),
    ("plugin", "learning-rate-too-low", "schedule"),
    ("decay", "fast-decay", "schedule.per"),
    ("decay", "fast-decay", "schedule"),
    ("sigmoid", "saturating-stack", "model.init"),
    ("sigmoid", "saturating-stack", "model.normalization"),
    ("sigmoid", "saturating-stack", "model.residual"),
    ("tanh", "saturating-stack", "model.init"),
    ("weights-large", "bad-initialization", "model.init"),
    ("weights-large", "bad-initialization", "model.normalization"),
    ("weights-gain", "bad-initialization", "model.gain"),
    ("weights-zero", "zero-weights", "model.init"),
    ("underflow", "unscaled-half-precision", "train.scaler.enabled"),
    ("underflow", "unscaled-half-precision", "train.precision"),
    ("scale-low", "low-loss-scale", "train.scaler.init_scale"),
    ("scale-low", "low-loss-scale", "train.precision"),
    ("sorted", "unshuffled-data", "data.shuffle"),
    ("raw", "unscaled-inputs", "data.standardize"),
    ("few-samples", "memorization", "optim.weight_decay"),
    ("few-samples", "memorization", "train.early_stop"),
    ("linear", "linear-stack", "model.activation"),
]
"""A planted fault, its cause, and a key of the patch of each remedy that must cure it."""

OWN_LOOPS = LOOPS | CODE_LOOPS

IN_CONFIGS = {
    "lower_rate", "drop_jump", "raise_rate", "per_epoch", "relu_kaiming", "normalize", "relu_residual_norm", "xavier",
    "kaiming", "scaler", "init_scale", "bf16", "shuffle", "standardize", "weight_decay", "early_stop", "nonlinear",
}  # fmt: skip
"""Remedies that `CURES` tests."""


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the tables that the configs read."""
    made, draw = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    with np.load(digits.FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"][:, None].astype(np.float32) / digits.DARKEST, arrays["labels"]
    order = np.argsort(labels, kind="stable")
    np.savez(made / "sorted.npz", x=images[order], y=labels[order])
    np.savez(made / "raw.npz", x=np.round(images.reshape(len(images), -1) * 255), y=labels)
    radius, angle = 1 + draw.integers(0, 2, 3000), draw.uniform(0, 2 * np.pi, 3000)
    circles = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) + draw.normal(0, 0.1, (3000, 2))
    np.savez(made / "circles.npz", x=circles.astype(np.float32), y=radius)
    groups = draw.integers(0, 2, 350)
    cells = draw.normal(size=(350, 30)) + 0.5 * groups[:, None]
    flipped = np.where(draw.random(70) < 0.12, 1 - groups[:70], groups[:70])
    np.savez(made / "few.npz", x=cells[:70], y=flipped, u=cells[70:], v=groups[70:])
    return made


@cache
def planted(name, folder):
    """Return the diagnoses of a planted fault."""
    made = trained(name, folder, {})
    return [d for d in diagnose(made.history) if d.severity > Severity.INFO]


def trained(name, folder, patch):
    text, steps = CONFIGS[name]
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("FOLDER", str(folder)) + ("train: {}\n" if "train:" not in text else ""))
    changes = [f"train.steps={steps}", "train.threads=1", *(f"{key}={json.dumps(v)}" for key, v in patch.items())]
    return run_trial(load_config(path, changes), steps=steps, threads=1)


@pytest.mark.parametrize(("name", "cause", "key"), CURES, ids=lambda value: str(value))
def test_a_remedy_for_a_config_cures_its_planted_fault(name, cause, key, folder):
    diagnosis = next(d for d in planted(name, folder) if d.cause_id == cause)
    offered = [remedy for remedy in diagnosis.remedies if key in remedy.patch]
    assert offered, f"offered were {[r.patch for r in diagnosis.remedies]}"

    for remedy in offered:
        made = trained(name, folder, remedy.patch)
        assert made.found(diagnosis.findings[0]) == [], f"{remedy.patch} does not cure"
        assert made.loss < 10, "it learns"


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_remedy_for_an_own_loop_cures_its_planted_fault(name):
    case = OWN_LOOPS[name]
    monitor = run(case)
    diagnosis = next((d for d in diagnose(monitor.history) if d.cause_id == case.cause), None)
    assert diagnosis, [d.cause_id for d in diagnose(monitor.history)]
    place = next(c for c in CAUSES if c.id == case.cause).remedies.index(case.remedy)
    remedy = diagnosis.remedies[min(place, len(diagnosis.remedies) - 1)]

    assert not remedy.patch, "an own loop has no config"
    assert case.kind in {f.kind for f in diagnosis.findings if f.severity > Severity.INFO}
    cured = run(case, code=remedy.code) if case.is_code else run(case, fixed=remedy.code or True)

    left = [f for f in cured.history.findings if f.kind == case.kind and f.severity > Severity.INFO]
    assert left == [], f"{remedy.text}: {remedy.code}"


@pytest.mark.parametrize("name", FORMULAS)
def test_the_stable_form_of_a_formula_keeps_the_loss_and_the_gradients_finite(name):
    def model(fixed):
        made = Operation(*FORMULAS[name])
        made.code = code
        return made

    code = ""
    case = Loop(kind="non-finite", cause="singular-formula", remedy="stable_formula", model=model, steps=15)
    diagnosis = next(d for d in diagnose(run(case).history) if d.cause_id == case.cause)
    code = diagnosis.remedies[0].code

    assert code, diagnosis.remedies
    assert [f.kind for f in run(dataclasses.replace(case)).history.findings if f.severity > Severity.INFO] == []


def test_every_remedy_is_tested_or_has_a_reason_why_not():
    of_loops = {case.remedy for case in OWN_LOOPS.values()}
    tested = IN_CONFIGS | of_loops | set(OF_RANKS) | {"stable_formula"}  # of ranks: test_rank_faults

    assert tested | set(UNTESTED) == set(KNOWN)
    assert not tested & set(UNTESTED)
    assert all(UNTESTED.values())
