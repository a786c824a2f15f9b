"""Remedies are changes that a config takes, with numbers that follow from the run."""

import math
from dataclasses import replace

import pytest
import yaml

from gradwatch.config.load import load_config
from gradwatch.config.settings import effective_settings
from gradwatch.diagnose.case import Case
from gradwatch.diagnose.remedies import KNOWN, remedies
from gradwatch.diagnose.run_numbers import RunNumbers, measure_run
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import ActivationInfo, Finding, LayerInfo, RunInfo, Severity

FINDING = Finding(
    code="GW108", kind="no-gradient", layer="encoder", step=10, severity=Severity.WARNING, message="it gets none"
)
STEADY = RunNumbers(
    steady_rate=0.02, jumped_at=None, usual_norm=0.7, update_ratio=2e-6, first_rate=0.02, rate=0.02, largest_ratio=0.1
)
JUMPED = replace(STEADY, steady_rate=0.001, jumped_at=60, first_rate=0.001, update_ratio=0.1)
UNKNOWN = RunNumbers(steady_rate=math.nan, jumped_at=None, usual_norm=math.nan, update_ratio=math.nan)

CONFIG = """
model: {name: mlp, depth: 4, width: 32, activation: sigmoid}
data: {name: npz, file: table.npz}
optim: {name: adamw, lr: 0.02}
schedule: {name: multi_step, milestones: [60], gamma: 1000.0}
train: {steps: 150, precision: fp16}
"""


@pytest.fixture
def settings(tmp_path):
    """Return the settings of a config with changes."""

    def make(*changes):
        path = tmp_path / "ill.yaml"
        path.write_text(CONFIG)
        return effective_settings(load_config(path, changes))

    return make


def case_of(settings=None, *, numbers=STEADY, findings=(FINDING,), modules=(), events=(), **info):
    """Return a case of an own loop, or of a config with the given settings; modules are (name, type, shape)."""
    layers = tuple(
        LayerInfo(
            name=f"{name}.weight", module=name, module_type=kind, shape=shape, dtype="float32", trainable=True, group=0
        )
        for name, kind, shape in modules
    )
    run = RunInfo(**{"name": "r", "created": "", "layers": layers, "optimizer": "SGD", "settings": settings} | info)
    return Case(findings=findings, numbers=numbers, info=run, events=events)


@pytest.mark.parametrize("run", [STEADY, JUMPED, UNKNOWN], ids=["steady", "jumped", "unknown"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_patch_is_one_that_the_config_takes(name, run, settings, tmp_path):
    for remedy in remedies([name], case_of(settings(), numbers=run)):
        assert remedy.text, "a remedy is said in words"
        assert "{" not in remedy.text, "a placeholder is left"
        overrides = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in remedy.patch.items()]
        load_config(tmp_path / "ill.yaml", [text.replace("\n...\n", "").strip() for text in overrides])


@pytest.mark.parametrize("name", KNOWN)
def test_an_own_loop_gets_no_settings(name):
    assert [r.patch for r in remedies([name], case_of(modules=[("fc", "Linear", (8, 4))]))] in ([], [{}])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scaler", "train.scaler.enabled=true"),
        ("shuffle", "data.shuffle=true"),
        ("standardize", "data.standardize=true"),
        ("kaiming", "model.init=kaiming"),
        ("normalize", "model.normalization=batch"),
        ("early_stop", "train.early_stop={metric: val_loss}"),
        ("clip", "train.clip={norm: 5.0}"),
        ("per_epoch", "schedule={name: step, step_size: 1, per: epoch}"),
        ("bf16", "train.precision=bf16"),
        ("weight_decay", "optim.weight_decay=0.2"),
        ("leaky_relu", "model.activation=leaky_relu"),
    ],
)
def test_what_the_config_has_is_not_advised(name, change, settings):
    assert remedies([name], case_of(settings(change))) == ()


def test_only_the_settings_that_are_missing_are_advised(settings):
    (remedy,) = remedies(["relu_residual_norm"], case_of(settings("model.residual=true", "model.activation=relu")))

    assert remedy.patch == {"model.normalization": "batch"}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("normalize", case_of(modules=[("fc", "Linear", (8, 4)), ("n", "LayerNorm", (8,)), ("out", "Linear", (2, 8))])),
        ("kaiming", case_of(numbers=replace(STEADY, is_kaiming=True), modules=[("fc", "Linear", (8, 4))])),
        ("clip", case_of(numbers=replace(STEADY, is_clipped=True))),
        ("relu_residual_norm", case_of()),
    ],
    ids=["normalization", "kaiming", "clipping", "residual"],
)
def test_what_an_own_loop_has_or_does_not_show_is_not_advised(name, case):
    assert remedies([name], case) == ()


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "Adam+AdamW"])
def test_clipping_is_no_cure_where_the_step_ignores_the_scale_of_the_gradient(optimizer):
    spike = replace(FINDING, kind="gradient-spike")

    assert remedies(["clip"], case_of(optimizer=optimizer)) == ()
    assert len(remedies(["clip"], case_of(optimizer=optimizer, findings=(spike,)))) == 1, "moments remember a spike"
    assert len(remedies(["clip"], case_of(optimizer=f"{optimizer}+SGD"))) == 1


def test_an_option_that_the_model_lacks_is_reported_as_code(settings):
    taken = {key: value for key, value in settings().items() if key != "model.init"}

    (remedy,) = remedies(["kaiming"], case_of(taken, modules=[("body.0", "Linear", (8, 4))]))

    assert remedy.patch == {}
    assert remedy.code == "torch.nn.init.kaiming_normal_(model.body[0].weight, nonlinearity='relu')"


def test_code_has_the_names_of_several_models():
    case = case_of(modules=[("critic.fc", "Linear", (8, 4))], models=("actor", "critic"))

    assert remedies(["kaiming"], case)[0].code == "torch.nn.init.kaiming_normal_(critic.fc.weight, nonlinearity='relu')"


def test_activations_that_are_functions_are_named_by_the_layer_before_them():
    found = (ActivationInfo(name="fc.sigmoid", module_type="Sigmoid"), ActivationInfo(name="act", module_type="Tanh"))

    (remedy,) = remedies(["relu_kaiming"], case_of(modules=[("fc", "Linear", (8, 4))], activations=found))

    assert remedy.code.splitlines()[:2] == [
        "model.act = torch.nn.ReLU()",
        "# in forward, after model.fc: torch.nn.functional.relu instead of sigmoid",
    ]


def test_the_rate_is_lowered_tenfold_where_it_was_steady_and_put_back_where_it_jumped(settings):
    lower = remedies(["lower_rate", "drop_jump"], case_of(settings()))
    back = remedies(["lower_rate", "drop_jump"], case_of(settings(), numbers=JUMPED))

    assert [r.patch for r in lower] == [{"optim.lr": 0.002}]
    assert [r.patch for r in back] == [{"schedule": None, "optim.lr": 0.001}]
    assert "step 60" in back[0].text


def test_the_rate_of_adam_is_lowered_to_the_usual_update(settings):
    (remedy,) = remedies(["lower_rate"], case_of(settings(), optimizer="AdamW"))

    assert remedy.patch == {"optim.lr": 0.002}, "0.02 / 0.1 is a fifth, and the rate is lowered by ten at least"


@pytest.mark.parametrize(("largest", "rate"), [(0.5, 0.0008), (2.0, 0.0002), (1e4, 2e-5)])
def test_a_larger_update_of_adam_is_brought_to_that_of_a_usual_rate(largest, rate, settings):
    numbers = replace(STEADY, largest_ratio=largest)

    (remedy,) = remedies(["lower_rate"], case_of(settings(), numbers=numbers, optimizer="AdamW"))

    assert remedy.patch == {"optim.lr": rate}, "of 0.02"


def test_the_rate_is_raised_towards_the_usual_ratio(settings):
    (remedy,) = remedies(["raise_rate"], case_of(settings()))

    assert remedy.patch == {"optim.lr": 2.0}, "1e-3 / 2e-6 is 500: a hundredfold"


def test_groups_with_rates_of_their_own_are_raised_as_well(settings):
    changed = settings("optim.groups=[{match: '*.bias', lr: 0.001}, {match: 'head.*'}]")

    (remedy,) = remedies(["raise_rate"], case_of(changed))

    assert remedy.patch["optim.groups"] == [{"match": "*.bias", "lr": 0.1}, {"match": "head.*"}]


LOW = {"first_rate": 3e-8, "rate": 6.3e-7, "steady_rate": 6.3e-7}
"""Rates of the first 20 steps of a warm-up of 100,000 steps to 3e-3."""


@pytest.mark.parametrize(
    ("change", "total", "text", "patch"),
    [
        (
            "schedule={warmup_steps: 100000}",
            320,
            "step 20 of a warm-up of 100,000 in a run of 320 steps: set schedule.warmup_steps to 16",
            {"schedule.warmup_steps": 16},
        ),
        (
            "schedule={name: cosine_annealing, warmup_steps: 5000}",
            1000,
            "step 20 of a warm-up of 5,000 in a run of 1,000 steps: set schedule.warmup_steps to 50",
            {"schedule.warmup_steps": 50},
        ),
        (
            "schedule={name: one_cycle, max_lr: 3e-3}",
            100000,
            "at step 20 of 100,000, OneCycleLR has raised the learning rate from 3e-08 to 6e-07: "
            "train without it, at a constant 0.003",
            {"schedule": None, "optim.lr": 0.003},
        ),
        (
            "schedule={name: LinearLR, start_factor: 1e-5, total_iters: 100000}",
            None,
            "at step 20, LinearLR has raised the learning rate from 3e-08 to 6e-07: "
            "train without it, at a constant 0.02",
            {"schedule": None},
        ),
        (
            "schedule={warmup_steps: 200}",
            1000,
            "step 20 of a warm-up of 200 in a run of 1,000 steps: wait until the warm-up ends, "
            "or set schedule.warmup_steps to 50",
            {"schedule.warmup_steps": 50},
        ),
        (
            "schedule={warmup_steps: 40}",
            1000,
            "step 20 of a warm-up of 40 in a run of 1,000 steps: wait until the warm-up ends",
            {},
        ),
    ],
)
def test_a_rate_that_a_schedule_holds_down_is_never_written_to_the_base(change, total, text, patch, settings):
    late = replace(FINDING, kind="learning-rate-too-low", step=20)
    case = case_of(settings(change), numbers=replace(STEADY, **LOW), findings=(late,), total_steps=total)

    (remedy,) = remedies(["raise_rate"], case)

    assert (remedy.text, remedy.patch) == (text, patch)


def test_a_warm_up_in_epochs_is_counted_in_epochs(settings):
    changed = settings("train={epochs: 40}", "schedule={warmup_steps: 400, per: epoch}")
    numbers, late = replace(STEADY, **LOW), replace(FINDING, step=20)

    (remedy,) = remedies(["raise_rate"], case_of(changed, numbers=numbers, findings=(late,), total_steps=400))

    assert remedy.text == "epoch 2 of a warm-up of 400 in a run of 40 epochs: set schedule.warmup_steps to 2"


def test_an_own_warm_up_is_reported_without_a_rate_to_set():
    (remedy,) = remedies(["raise_rate"], case_of(numbers=replace(STEADY, **LOW), total_steps=320))

    assert remedy.text.endswith("shorten its warm-up")
    assert remedy.code == ""


def test_a_rate_that_grows_without_end_is_not_lowered_at_its_base(settings):
    grown = replace(STEADY, first_rate=0.02, rate=40.0, steady_rate=40.0)

    (config,) = remedies(["lower_rate"], case_of(settings(), numbers=grown))
    (own,) = remedies(["lower_rate"], case_of(numbers=grown))

    assert config.patch == {"schedule": None}
    assert own.text.endswith("limit the rise")


def test_the_norm_is_clipped_at_twice_the_usual_or_at_one_where_it_was_ill_from_the_start(settings):
    run = replace(STEADY, usual_norm=7e3)

    (late,) = remedies(["clip"], case_of(settings(), findings=[replace(FINDING, step=200)], numbers=run))
    (early,) = remedies(["clip"], case_of(settings(), numbers=run))

    assert late.patch == {"train.clip": {"norm": 10000.0}}, "14000 with one digit"
    assert early.patch == {"train.clip": {"norm": 1.0}}


def test_layers_are_named_at_most_three(settings):
    findings = [replace(FINDING, layer=f"l{i}") for i in range(5)]

    (remedy,) = remedies(["reattach"], case_of(settings(), findings=findings))
    (own,) = remedies(["reattach"], case_of(findings=findings))

    assert "l0, l1, l2 and 2 more" in remedy.text
    assert "model.l0, model.l1, model.l2 and 2 more" in own.text


def test_without_a_singular_formula_in_the_graph_no_stable_form_is_advised():
    case = case_of(findings=(replace(FINDING, kind="non-finite"),))

    made = remedies(["stable_formula", "find_operation"], case)

    assert [r.text for r in made] == [
        "find the operation with gradwatch.locate(step, batch), and guard it against overflow"
    ]


def test_numbers_tell_a_jump_of_the_rate_from_a_warm_up_and_a_restart():
    jump, warm, restart = Synthetic(steps=80), Synthetic(steps=80), Synthetic(steps=80)
    jump.lr_T[50:] *= 100
    warm.lr_T *= (1 + warm.t_T) / 80
    restart.lr_T[20:50] /= 100

    assert measure_run(jump.history(), until=79).jumped_at == 50
    assert measure_run(jump.history(), until=79).steady_rate == pytest.approx(1e-3)
    assert measure_run(jump.history(), until=40).jumped_at is None, "it has not happened yet"
    assert measure_run(warm.history(), until=79).jumped_at is None
    assert measure_run(restart.history(), until=79).jumped_at is None, "the rate comes back to what it was"
