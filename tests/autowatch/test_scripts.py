"""An unedited script is watched as if it called `watch` itself, and trains as if nothing watched it."""

import functools
import importlib

import numpy as np
import pytest
from autowatch.watches import ThreeLines, Unwatched

SCRIPTS = {
    "mnist": {},
    "nanogpt": {"enabled": False},
    "nanogpt-scaled": {"enabled": True},
    "nanogpt-skipped": {"enabled": True, "init_scale": 2.0**30},
    "dcgan": {},
    "vae": {},
    "word_language_model": {},
    "reinforce": {},
    "actor_critic": {},
    "super_resolution": {},
    "siamese": {},
    "gcn": {},
    "time_sequence": {},
    "lightning_loop": {},
    "transformers_loop": {},
    "accelerate_loop": {},
}


def findings_of(monitor):
    return {(finding.kind, finding.layer, finding.since) for finding in monitor.findings()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unedited_script_is_watched_like_one_with_three_lines(name, monitors, unedited, capsys):
    module = importlib.import_module(f"autowatch.scripts.{name.partition('-')[0]}")
    main = functools.partial(module.main, **SCRIPTS[name])

    losses = main(Unwatched())
    assert main(ThreeLines()) == losses
    with unedited():
        assert main(Unwatched()) == losses

    by_hand, found = monitors
    found.close(), by_hand.close()
    np.testing.assert_allclose(found.history["loss"], by_hand.history["loss"], rtol=1e-6)
    np.testing.assert_array_equal(found.history["skipped"], by_hand.history["skipped"])
    assert findings_of(found) == findings_of(by_hand)
    assert found.history.info.models == by_hand.history.info.models
