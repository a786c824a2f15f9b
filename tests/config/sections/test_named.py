"""The sections that name something: settings that are gone."""

import pytest

from gradwatch.config.load import load_config
from gradwatch.errors import ConfigError


def test_the_config_of_an_older_run_loads_without_its_watched_step(write):
    config = load_config(write(), ["optim.watched=false"])

    assert config == load_config(write())
    assert "watched" not in config.optim.options


@pytest.mark.parametrize("value", ["true", "null", "3"])
def test_a_watched_step_is_refused_with_what_to_do(write, value):
    expected = "optim.watched: was removed with gradwatch's own optimizers; remove it, torch's are watched without it"
    with pytest.raises(ConfigError) as caught:
        load_config(write(), [f"optim.watched={value}"])

    assert expected in str(caught.value)
    assert len(caught.value.problems) == 1
