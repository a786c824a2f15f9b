"""A file of changes sets what it names, leaves the rest, and its mistakes are told with its own lines."""

import pytest

from gradwatch.config.load import load_config
from gradwatch.errors import ConfigError


@pytest.fixture
def change(tmp_path):
    def make(text, name="cure.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


def test_it_sets_what_it_names_and_leaves_the_rest(write, change):
    plain = load_config(write())

    config = load_config(write(), changes=[change("optim:\n  lr: 0.5\ntrain: {clip: {norm: 2.0}}\n")])

    assert config.optim.options == plain.optim.options | {"lr": 0.5}
    assert config.train.clip.norm == 2.0
    assert config.train.steps == plain.train.steps


def test_a_section_that_is_null_is_set_back_to_its_default(write, change):
    text = "model: {name: mlp}\ndata: {name: digits}\noptim: {name: adamw}\ntrain: {steps: 1}\n"
    path = write(text + "loss: {name: mse_loss}\n")

    config = load_config(path, changes=[change("loss: null\n")])

    assert load_config(path).loss.name == "MSELoss"
    assert config.loss.name is None


def test_it_takes_the_place_of_what_excludes_it(write, change):
    config = load_config(write(), changes=[change("train: {epochs: 2}\n")])

    assert (config.train.steps, config.train.epochs) == (None, 2)


def test_later_files_are_stronger_and_set_is_strongest(write, change):
    files = [change("optim: {lr: 1.0}\ntrain: {accumulate: 2}\n", "a.yaml"), change("optim: {lr: 2.0}\n", "b.yaml")]

    both = load_config(write(), changes=files)
    set_too = load_config(write(), ["optim.lr=3.0"], changes=files)

    assert (both.optim.options["lr"], both.train.accumulate) == (2.0, 2)
    assert set_too.optim.options["lr"] == 3.0


def test_a_mistake_in_it_is_reported_with_its_file_and_line(write, change):
    path = change("# a cure\noptim:\n  learning_rate: 0.5\ntrain:\n  precision: fp8\n")

    with pytest.raises(ConfigError) as caught:
        load_config(write(), changes=[path])

    texts = [str(p) for p in caught.value.problems]
    assert len(texts) == 2
    assert any("optim.learning_rate" in t and t.endswith(f"({path}, line 3)") for t in texts)
    assert any("got 'fp8'" in t and t.endswith(f"({path}, line 5)") for t in texts)


def test_a_key_that_it_sets_twice_is_reported_with_its_file(write, change):
    path = change("optim: {lr: 1.0, lr: 2.0}\n")

    with pytest.raises(ConfigError, match=r"optim.lr: is set twice.*cure.yaml, line 1"):
        load_config(write(), changes=[path])


def test_a_file_that_is_missing_is_reported(write, tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(write(), changes=[tmp_path / "nothing.yaml"])
