"""Every message of a config that is wrong, as its user reads it."""

import pytest

from gradwatch.config.load import load_config, load_detect
from gradwatch.errors import ConfigError

DATA_SETTINGS = "batch_size, eval_batch_size, workers, pin_memory, shuffle, drop_last, transform, augment"
TRAIN_SETTINGS = (
    "steps, epochs, device, parallel, shard_ranks, sync_batchnorm, threads, precision, accumulate, clip, "
    "activation_checkpointing, activation_offloading, compile, eval_every, checkpoint, early_stop, on_nonfinite, "
    "on_critical, rewind, scaler"
)
SECTIONS = "run, model, data, loss, optim, schedule, train, watch, detect, sinks"


def problems(path, *overrides):
    """Return the texts of all problems, without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [str(p).replace(f"{path.parent}/", "") for p in caught.value.problems]


def problem(write, *overrides):
    """Return the text of the one problem that overrides of a right config make, without its place."""
    (text,) = problems(write(), *overrides)
    place = f" (--set {overrides[-1]})"
    assert text.endswith(place), f"the place is the override: {text}"
    return text.removesuffix(place)


def test_a_right_config_loads(write):
    config = load_config(write())

    assert (config.model.name, config.data.name, config.optim.name) == ("mlp", "digits", "AdamW")
    assert config.optim.options == {"lr": 1e-3}
    assert config.train.steps == 100


def test_all_problems_come_at_once_with_their_lines(write):
    path = write(
        """\
model:
  name: mpl
data: {name: digits, batchsize: 32}
optim:
  name: adamw
  learning_rate: 3e-4
  betas: [0.9]
train:
  precision: fp8
  precison: fp16
watch: {updates_every: -1}
optimizer: {}
detect: {dead-lair: {}}
"""
    )

    assert problems(path) == [
        "model.name: got 'mpl', expected one of cnn, mlp, or a classification model of torchvision (`gradwatch list "
        "models` shows all); did you mean 'mlp'? (mlp.yaml, line 2)",
        f"data.batchsize: unknown setting of digits, expected one of val_fraction, {DATA_SETTINGS}; did you mean "
        "'batch_size'? (mlp.yaml, line 3)",
        "optim.learning_rate: unknown setting of AdamW, expected one of lr, betas, eps, weight_decay, amsgrad, "
        "maximize, foreach, capturable, differentiable, fused, groups; did you mean 'lr'? (mlp.yaml, line 6)",
        "optim.betas: got [0.9], expected a list of 2, each a number (mlp.yaml, line 7)",
        "train: has neither steps nor epochs, expected exactly one of them (mlp.yaml, line 8)",
        "train.precision: got 'fp8', expected one of fp32, bf16, fp16; did you mean 'fp16'? (mlp.yaml, line 9)",
        f"train.precison: unknown setting, expected one of {TRAIN_SETTINGS}; did you mean 'precision'? "
        "(mlp.yaml, line 10)",
        "watch.updates_every: got -1, expected a whole number of at least 0 (mlp.yaml, line 11)",
        f"optimizer: unknown setting, expected one of {SECTIONS}; did you mean 'optim'? (mlp.yaml, line 12)",
        "detect.dead-lair: got 'dead-lair', expected 'dead-layer'; did you mean 'dead-layer'? (mlp.yaml, line 13)",
    ]


def test_an_empty_mapping_misses_what_it_needs(write):
    texts = problems(write("{}"))

    assert [t.partition(":")[0] for t in texts] == ["model", "data", "optim", "train"]
    assert texts[2] == "optim: missing, expected a mapping such as {name: adamw, lr: 1e-3} (mlp.yaml)"
    assert all("missing, expected a mapping such as {" in t for t in texts)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "train.steps: got 0, expected a whole number of at least 1, or null"),
        ("train.steps=1e3", "train.steps: got 1000.0, expected a whole number of at least 1, or null; write 1000"),
        ("train.steps='9'", "train.steps: got '9', expected a whole number of at least 1, or null"),
        ("train.device=gpu", "train.device: got 'gpu', expected auto, cpu, cuda, cuda:1, mps or xpu"),
        ("train.accumulate=true", "train.accumulate: got true, expected a whole number of at least 1"),
        ("train.clip={}", "train.clip: has neither norm nor value, expected exactly one of them"),
        ("train.clip={norm: 1, value: 2}", "train.clip: has both norm and value, expected exactly one of them"),
        ("train.clip.norm=-1", "train.clip.norm: got -1, expected a number above 0, or null"),
        (
            "train.activation_checkpointing=sqr",
            "train.activation_checkpointing: got 'sqr', expected one of none, sqrt, or a mapping with every, modules, "
            "budget, save; did you mean 'sqrt'?",
        ),
        (
            "train.activation_checkpointing={every: 2, budget: 4GB}",
            "train.activation_checkpointing: has both every and budget, expected exactly one of them",
        ),
        (
            "train.activation_checkpointing={save: matmuls}",
            "train.activation_checkpointing: has neither every, modules nor budget, expected exactly one of them",
        ),
        (
            "train.activation_checkpointing={budget: much}",
            "train.activation_checkpointing.budget: got 'much', expected a size above 0 such as 8GB or 512MiB, or null",
        ),
        (
            "train.activation_checkpointing={budget: 4GB, save: matmuls}",
            "train.activation_checkpointing.save: got 'matmuls' with a budget, for which the plan chooses; set one of "
            "them",
        ),
        (
            "train.activation_checkpointing={every: 0}",
            "train.activation_checkpointing.every: got 0, expected a whole number of at least 1, or null",
        ),
        (
            "train={steps: 2, activation_checkpointing: {budget: 4GB}, activation_offloading: true}",
            "train.activation_offloading: got true with activation_checkpointing: {budget: ...}, which chooses what to "
            "recompute instead; set one of them",
        ),
        (
            "train.compile=maybe",
            "train.compile: got 'maybe', expected true or false, or a mapping with backend, mode, fullgraph, dynamic",
        ),
        (
            "train.compile={bakend: x}",
            "train.compile.bakend: unknown setting, expected one of backend, mode, fullgraph, dynamic; did you mean "
            "'backend'?",
        ),
        ("train.checkpoint=3", "train.checkpoint: got 3, expected a mapping with every, keep, best"),
        ("train.checkpoint.keep=0", "train.checkpoint.keep: got 0, expected a whole number of at least 1"),
        (
            "train.early_stop.metric=acc",
            "train.early_stop.metric: got 'acc', expected one of val_loss, val_accuracy, loss",
        ),
        ("train.scaler.backoff_factor=1", "train.scaler.backoff_factor: got 1, expected a number above 0 and below 1"),
        ("train.on_nonfinite=ignore", "train.on_nonfinite: got 'ignore', expected one of skip, stop, continue"),
        ("data.batch_size=null", "data.batch_size: got null, expected a whole number of at least 1"),
        ("data.workers=two", "data.workers: got 'two', expected a whole number of at least 0"),
        ("run.seed=-1", "run.seed: got -1, expected a whole number of at least 0 and below 4294967296"),
        ("run.name=a/b", "run.name: got 'a/b', expected text without slashes, and not only dots"),
        ("run.out=3", "run.out: got 3, expected a path"),
        ("run=fast", "run: got 'fast', expected a mapping with name, seed, deterministic, out, worst_samples"),
        ("model=mlp", "model: got 'mlp', expected a mapping such as {name: mlp, depth: 3}"),
        ("model.depth=two", "model.depth: got 'two', expected a whole number"),
        ("model.shape=[1]", "model.shape: got [1], expected a list of 2, each a whole number"),
        ("model.activation=rellu", "model.activation: got 'rellu', expected one of relu, tanh; did you mean 'relu'?"),
        ("model.target=nocolon", "model.target: got 'nocolon', expected package.module:factory"),
        ("data={name: csv}", "data.file: missing, expected text"),
        (
            "model={}",
            "model: needs a name or a target; name is one of cnn, mlp, or a classification model of torchvision "
            "(`gradwatch list models` shows all)",
        ),
        ("model={target: a.b:c.d}", "model.target: got 'a.b:c.d', expected package.module:factory"),
        ("model={name: mlp, target: a:b}", "model.target: got 'a:b' as well as name: mlp, expected only one of them"),
        ("loss.reduction=none", "loss.reduction: unknown setting while no loss is named, expected one of name, target"),
        (
            "loss={name: cross_entropy, reduction: none}",
            "loss.reduction: got 'none', expected one of mean, sum",
        ),
        (
            "schedule.T_max=3",
            "schedule.T_max: unknown setting while no schedule is named, expected one of name, warmup_steps, per",
        ),
        (
            "schedule.name=lambda",
            "schedule.name: LambdaLR cannot be used here: it needs 'lr_lambda', which YAML cannot say",
        ),
        (
            "loss.name=ctc",
            "loss.name: CTCLoss cannot be used here: it takes 4 inputs (log_probs, targets, input_lengths, "
            "target_lengths), but a model has outputs and targets to give",
        ),
        (
            "optim.groups=[{}]",
            "optim.groups.0.match: missing, expected a pattern of parameter names, or a list of such",
        ),
        ("optim.groups=[3]", "optim.groups: got [3], expected a list, each a mapping with match"),
        ("optim.groups=[{match: a, weight_decay: x}]", "optim.groups.0.weight_decay: got 'x', expected a number"),
        (
            "data.augment=Flip",
            "data.augment: got 'Flip', expected a list of transforms, such as [RandomHorizontalFlip]",
        ),
        (
            "data.augment=[{a: 1, b: 2}]",
            "data.augment.0: got {a: 1, b: 2}, expected a name, or a mapping from a name to its keyword arguments",
        ),
        (
            "data.augment=[RandomCrop]",
            "data.augment.0.size: missing, expected a whole number, or a list, each a whole number",
        ),
        (
            "data.augment=[{random_crop: {size: 4, pading: 1}}]",
            "data.augment.0.random_crop.pading: unknown setting of RandomCrop, expected one of size, padding, "
            "pad_if_needed, fill, padding_mode; did you mean 'padding'?",
        ),
        (
            "data.transform=[{RandomApply: {transforms: [{ColorJitter: {hue: x}}]}}]",
            "data.transform.0.RandomApply.transforms.0.ColorJitter.hue: got 'x', expected a number, a list, each a "
            "number, or null",
        ),
        ("data.transform=[{target: x}]", "data.transform.0.target: got 'x', expected package.module:factory"),
        ("detect=3", "detect: got 3, expected the settings of each detector below its name"),
        ("detect.dead-layer=off", "detect.dead-layer: got 'off', expected a mapping such as {enabled: false}"),
        ("detect.dead-layer.decades=x", "detect.dead-layer.decades: got 'x', expected a number"),
        (
            "detect.dead-layer.decade=3",
            "detect.dead-layer.decade: unknown setting of dead-layer, expected one of enabled, every, decades; did "
            "you mean 'decades'?",
        ),
        ("sinks.terminal.every=0.5", "sinks.terminal.every: got 0.5, expected a whole number"),
        ("sinks.console={}", "sinks.console: got 'console', expected one of tensorboard, terminal"),
    ],
)
def test_a_wrong_setting_says_the_value_and_what_was_expected(write, override, message):
    assert problem(write, override) == message


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("model.name=resnt18", "resnet18"),
        ("optim.name=adm", "Adam"),
        ("schedule.name=cosine", "cosine_annealing"),
        ("loss.name=crossentropie", "cross_entropy"),
        ("data.name=fashon_mnist", "fashion_mnist"),
        ("data.augment=[RandomHorizontlFlip]", "RandomHorizontalFlip"),
    ],
)
def test_a_misspelt_name_suggests_the_nearest_in_the_spelling_that_is_near(write, override, near):
    assert f"did you mean '{near}'?" in problem(write, override)


@pytest.mark.parametrize("override", ["optim={}", "optim=null", "optim={lr: 1}"])
def test_a_name_that_is_missing_says_what_it_can_be(write, override):
    assert problems(write(), override)[0].startswith(
        "optim.name: missing, expected an optimizer such as AdamW, Adam, SGD (`gradwatch list optimizers` shows all)"
    )


def test_a_detector_that_is_set_in_two_spellings_is_a_mistake(write):
    text = problem(write, "detect={dead-layer: {}, GW103: {}}")

    assert text == "detect.GW103: dead-layer is set twice, in two spellings; remove one"


def test_names_are_stored_as_they_are_called(write):
    overrides = [
        "model.name=MLP",
        "data.name=fashion_mnist",
        "data.root=files",
        "data.augment=[random_horizontal_flip, {resize: {size: [4, 4]}}]",
        "optim.name=sgd",
        "schedule.name=cosine_annealing",
        "loss.name=cross_entropy",
        "detect.DeadLayer.every=5",
    ]

    config = load_config(write(), overrides)

    assert (config.model.name, config.data.name, config.optim.name) == ("mlp", "FashionMNIST", "SGD")
    assert (config.schedule.name, config.loss.name) == ("CosineAnnealingLR", "CrossEntropyLoss")
    assert config.data.augment == ("RandomHorizontalFlip", {"Resize": {"size": [4, 4]}})
    assert config.detect == {"dead-layer": {"every": 5}}


def test_a_target_takes_any_settings(write):
    config = load_config(write(), ["model={target: my.models:Net, depth: 3, extra: {a: [1]}}"])

    assert (config.model.name, config.model.target) == (None, "my.models:Net")
    assert config.model.options == {"depth": 3, "extra": {"a": [1]}}


@pytest.mark.parametrize(("override", "gone"), [("train.epochs=2", "steps"), ("train.steps=7", "epochs")])
def test_an_override_of_how_long_takes_the_place_of_the_file_s(write, override, gone):
    path = write("model: {name: mlp}\ndata: {name: digits}\noptim: {name: sgd}\ntrain: {steps: 5}\n")

    config = load_config(path, [override])

    assert getattr(config.train, gone) is None


def test_two_overrides_that_exclude_each_other_are_a_mistake(write):
    texts = problems(write(), "train.steps=3", "train.epochs=2")

    assert texts == ["train: has both steps and epochs, expected exactly one of them (mlp.yaml, line 4)"]


def test_a_run_is_called_after_its_file_unless_it_has_a_name(write):
    assert load_config(write(name="deep.cured.yaml")).run.name == "deep.cured"
    assert load_config(write(), ["run.name=other", "run.seed=1"]).run.name == "other"


def test_an_empty_section_has_its_defaults(write):
    config = load_config(write(), ["watch=null", "schedule=null", "detect=null", "loss=null"])

    assert config == load_config(write())


def test_detect_alone_is_read_without_looking_at_other_sections(write):
    path = write("model: {name: gone}\ndetect: {dead-layer: {every: 5}}\n")

    assert load_detect(path, ["detect.dead-layer.decades=3"]) == {"dead-layer": {"every": 5, "decades": 3.0}}
    assert load_detect(None, ["detect.GW103.enabled=false"]) == {"dead-layer": {"enabled": False}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=3", "optim.lr: cannot be set here, expected detect.<kind>.<setting> (--set optim.lr=3)"),
        ("detect.dead-layer.every=x", "detect.dead-layer.every: got 'x', expected a whole number (--set detect.dead-"),
        ("detect", "--set detect: expected section.setting=value"),
    ],
)
def test_a_wrong_override_of_detect_alone_is_a_mistake(package, override, message):
    with pytest.raises(ConfigError) as caught:
        load_detect(None, [override])

    assert str(caught.value).startswith(message)
