"""`optim.watched` in a config: which optimizer it makes, and for which it is refused."""

import pytest
import torch

from gradwatch import build, optim
from gradwatch.config import ineffective
from gradwatch.config.load import load_config
from gradwatch.config.sections import named
from gradwatch.errors import ConfigError, GradwatchError

CONFIG = """
model: {name: mlp}
data: {name: digits}
optim: {name: adamw, lr: 0.5, watched: true, groups: [{match: "*.bias", weight_decay: 0.25}]}
train: {steps: 2, device: cpu}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize("name", named.WATCHED)
def test_a_watched_optimizer_is_that_of_the_name(path, name):
    config = load_config(path, [f"optim.name={name}"])

    made = build.optimizer(config.optim, torch.nn.Sequential(torch.nn.Linear(2, 3)))

    assert type(made) is getattr(optim, name)
    assert [(g["lr"], g["weight_decay"]) for g in made.param_groups][1] == (0.5, 0.25)
    assert ineffective.ineffective_settings(config) == ()


def test_each_watched_optimizer_is_one_of_the_package():
    assert {*named.WATCHED} == {*optim.__all__} - {"InstrumentedOptimizer"}


def test_others_are_refused_with_the_names_of_those_that_are(path):
    with pytest.raises(ConfigError, match=r"optim.watched: got true with RMSprop, expected one of Adam, AdamW, SGD; "):
        load_config(path, ["optim.name=rmsprop"])


def test_without_it_torch_steps(path):
    config = load_config(path, ["optim.watched=false"])

    assert type(build.optimizer(config.optim, torch.nn.Sequential(torch.nn.Linear(2, 3)))) is torch.optim.AdamW


def test_a_mode_that_it_lacks_is_a_mistake_of_the_config(path):
    config = load_config(path, ["optim.differentiable=true"])

    with pytest.raises(GradwatchError, match="differentiable=True is not supported"):
        build.optimizer(config.optim, torch.nn.Sequential(torch.nn.Linear(2, 3)))


def test_on_another_device_it_warns_that_torch_steps(path):
    config = load_config(path, ["train.device=mps"])

    (sentence,) = ineffective.ineffective_settings(config)
    assert sentence.startswith("optim.watched: has no effect on mps,")
