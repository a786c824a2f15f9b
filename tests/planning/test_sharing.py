"""Check the peak of one rank by what each way takes away from the step."""

import json

import pytest

from gradwatch.config.load import load_config
from gradwatch.planning.sharing import plan_ranks
from gradwatch.planning.training import ConfigPlanner

CONFIG = """\
model: {name: gpt, layers: 4, heads: 2, width: 64}
data: {name: text, context: 32, batch_size: 4}
optim: {name: adamw, lr: 1e-3}
train: {steps: 3, device: cpu}
"""


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "gpt.yaml"
    path.write_text(CONFIG)
    return ConfigPlanner(
        lambda changes: load_config(path, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    )


def test_a_rank_holds_its_part_of_the_batch_and_of_what_is_sharded(planner):
    ways = {way.sharing.name: way for way in plan_ranks(planner, 2)}
    half = planner.plan({"data.batch_size": 2})
    gradients = 4 * half.parameters

    assert list(ways) == ["ddp", "ZeRO 1", "ZeRO 2", "fsdp2 (ZeRO 3)"]
    # DDP keeps a second copy of the gradients in its buckets
    assert ways["ddp"].peak_bytes == half.peak_bytes + gradients
    # the moments are there all the time, so half of them is saved at any peak
    moments = half.parts["optimizer"]
    assert ways["ZeRO 1"].peak_bytes == pytest.approx(ways["ddp"].peak_bytes - moments / 2, abs=1)
    assert ways["fsdp2 (ZeRO 3)"].peak_bytes < ways["ZeRO 1"].peak_bytes
    assert [way.sharing.setting for way in ways.values()] == ["ddp", None, None, "fsdp2"]
