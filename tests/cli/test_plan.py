"""`gradwatch plan`: the memory of a training before it runs."""

import json

from gradwatch.config.load import load_config
from gradwatch.planning.training import ConfigPlanner


def test_a_plan_tells_the_peak_and_whether_it_fits(gradwatch, config):
    shown = gradwatch("plan", config)

    assert shown.code == 0
    assert "fits in" in shown.out
    assert "activations" in shown.out
    assert not (config.parent / "runs").exists()


def test_mistakes_are_named(gradwatch, config):
    size = gradwatch("plan", config, "--budget", "much")
    setting = gradwatch("plan", config, "--set", "model.depht=3")

    assert (size.code, setting.code) == (2, 2)
    assert "--budget: got 'much', expected a size above 0 such as 8GB" in size.err
    assert "depht" in setting.err


def test_the_patch_makes_the_training_fit_and_json_has_the_plan_with_each_change(gradwatch, config, tmp_path):
    config.write_text(config.read_text().replace("{name: mlp}", "{name: mlp, depth: 2}").replace("adamw", "sgd"))
    patch = tmp_path / "smaller.yaml"
    peak = json.loads(gradwatch("plan", config, "--format", "json").out)["peak_bytes"]

    refused = gradwatch("plan", config, "--budget", peak - 1, "--patch", patch, "--format", "json")

    plan = json.loads(refused.out)
    assert refused.code == 1
    assert set(plan) == {"peak_bytes", "parameters", "parts", "modules", "advice"}
    assert set(plan["parts"]) == {"weights", "gradients", "optimizer", "activations", "temporaries", "buffers"}
    assert plan["parts"]["weights"] == 4 * plan["parameters"] == 4 * plan["modules"][0]["parameters"]
    assert plan["modules"][0]["forward_ms"] is None
    advice = plan["advice"]
    assert (advice["budget_bytes"], advice["largest_batch"]) == (peak - 1, 63)
    assert {"accumulate", "bf16"} <= {change["name"] for change in advice["changes"]}
    assert all(change["peak_bytes"] + change["saved_bytes"] == peak for change in advice["changes"])
    assert f"--set-file {patch}" in patch.read_text()
    assert ConfigPlanner(lambda changes: load_config(config, changes=[patch])).plan().peak_bytes < peak
    without = gradwatch("plan", config, "--patch", patch)
    assert (without.code, "add --budget" in without.err) == (2, True)


def test_one_of_several_ranks_is_planned_and_the_first_way_that_fits_is_written(gradwatch, config, tmp_path):
    patch = tmp_path / "ranks.yaml"

    done = gradwatch("plan", config, "--ranks", "2", "--budget", "1GB", "--patch", patch)
    plan = json.loads(gradwatch("plan", config, "--ranks", "2", "--format", "json").out)

    assert done.code == 0
    assert "one of 2 ranks" in done.out
    assert [way["name"] for way in plan["ranks"]] == ["ddp", "ZeRO 1", "ZeRO 2", "fsdp2 (ZeRO 3)"]
    assert load_config(config, changes=[patch]).train.parallel == "ddp"


def test_a_recorded_step_is_repeated_with_the_time_of_each_module(gradwatch, config):
    gradwatch("train", config, "--set", f"run.out={config.parent / 'runs'}")
    (run,) = (config.parent / "runs").iterdir()
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    shown = gradwatch("plan", run, "--step", "1", "--format", "json")

    assert shown.code == 0
    rows = json.loads(shown.out)["modules"]
    assert rows[0]["forward_ms"] > 0
    assert rows[0]["backward_ms"] > 0
    assert all(row["forward_ms"] <= rows[0]["forward_ms"] for row in rows), "a part takes no longer than the whole"
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before, "the run is as it was"
    kept = gradwatch("plan", run, "--step", "1", "--format", "html")
    report = (run / "report.html").read_text()
    assert kept.code == 0, kept.err
    assert '<section id="modules"' in report
    assert all(f'<th scope="row">{row["name"]}</th>' in report for row in rows if row["name"])
    mistakes = {
        "add --step N": (run,),
        "got html without a recorded step": (config, "--format", "html"),
        "expected a run directory": (config, "--step", "1"),
        "got step 99": (run, "--step", "99"),
        "without other options": (run, "--step", "1", "--budget", "1GB"),
    }
    for message, words in mistakes.items():
        refused = gradwatch("plan", *words)
        assert (refused.code, message in refused.err) == (2, True), refused.err
