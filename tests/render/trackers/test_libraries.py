"""W&B, MLflow and Trackio themselves: what a run of theirs holds after a training, in a run of the user or of ours."""

import json
import time

import pytest
import torch
import wandb
from wandb_file import read_records, values

import gradwatch

STEPS, JUMP = 90, 60


def train(run=None, sinks=None, *, each=lambda step, loss: None):
    """Train with a learning rate that jumps, and return the losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    with gradwatch.watch(model, optimizer, run=run, sinks=sinks, on_finding=None) as monitor:
        for step in range(STEPS):
            if step == JUMP:
                optimizer.param_groups[0]["lr"] = 0.3
            x = torch.randn(64, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)
            losses.append(loss.item())
            each(step, losses[-1])
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # one for all tests, since W&B keeps the first one that it sees
    return tmp_path_factory.mktemp("trackers")


@pytest.fixture(autouse=True)
def offline(folder, monkeypatch):
    monkeypatch.chdir(folder)
    given = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_X_DISABLE_META": "true",
        "WANDB_X_DISABLE_STATS": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def read_newest_wandb(folder):
    """Return the records of the newest run, which W&B may still be writing."""
    path = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime, default=None)
    if path is None:
        pytest.skip("the service of W&B did not start in time on this machine, so the run went without")
    until_s = time.monotonic() + 20
    while "exit" not in (records := read_records(path)) and time.monotonic() < until_s:
        time.sleep(0.05)
    return records


def test_wandb_gets_a_run_that_begins_and_ends_with_the_training(folder):
    losses = train("runs/mine", {"wandb": {"project": "digits", "tags": ["mlp"]}})

    assert wandb.run is None
    records = read_newest_wandb(folder)
    (run, *_), rows = records["run"], [values(row.item) for row in records["history"]]
    assert (run.project, run.display_name, [*run.tags]) == ("digits", "mine", ["mlp"])
    shown = {int(row["gradwatch/step"]): float(row["gradwatch/curves/loss"]) for row in rows}
    assert shown == pytest.approx({step: losses[step] for step in (*range(0, STEPS, 10), STEPS - 1)})
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in records["metric"]}
    assert axes["gradwatch/*"] == "gradwatch/step"
    (alert,) = records["alert"]
    assert (alert.title, alert.level) == ("learning-rate-too-high (GW302)", "WARN")
    assert "the learning rate rose 15-fold" in alert.text
    (artifact,) = records["artifact"]
    assert [entry.path for entry in artifact.manifest.contents] == ["report.html"]
    last = {name: value for summary in records["summary"] for name, value in values(summary.update).items()}
    assert json.loads(last["gradwatch/health"]) == "1 warning"
    assert json.loads(last["gradwatch/cause"]).startswith("learning rate too high")


def test_wandb_run_of_the_user_keeps_its_steps_and_stays_open(folder):
    unwatched = train()
    with wandb.init(project="mine") as run:
        losses = train(sinks={"wandb": {}}, each=lambda step, loss: run.log({"loss": loss}, step=step))
        is_open = wandb.run is run

    assert is_open
    assert losses == unwatched
    rows = [(row.step.num, values(row.item)) for row in read_newest_wandb(folder)["history"]]
    assert [(step, float(row["loss"])) for step, row in rows] == [*enumerate(losses)]
    assert [float(row["gradwatch/step"]) for _, row in rows if "gradwatch/step" in row][-1] == STEPS - 1


def test_mlflow_gets_a_run_that_begins_and_ends_with_the_training():
    mlflow = pytest.importorskip("mlflow")
    losses = train("runs/mlflow", {"mlflow": {"experiment": "digits"}})

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    curve = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "gradwatch/curves/loss")}
    assert curve == pytest.approx({step: losses[step] for step in (*range(0, STEPS, 10), STEPS - 1)})
    assert mlflow.active_run() is None
    assert (run.info.run_name, run.info.status) == ("mlflow", "FINISHED")
    assert run.data.params["optimizer"] == "SGD"
    assert run.data.tags["gradwatch.health"] == "1 warning"
    assert "the learning rate rose 15-fold" in run.data.tags["gradwatch.learning-rate-too-high.run"]
    artifacts = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "gradwatch")]
    assert artifacts == ["gradwatch/report.html"]


def test_mlflow_run_of_the_user_stays_active():
    mlflow = pytest.importorskip("mlflow")
    with mlflow.start_run() as run:
        losses = train(sinks={"mlflow": {}}, each=lambda step, loss: mlflow.log_metric("loss", loss, step=step))
        is_active = mlflow.active_run() is not None

    client = mlflow.MlflowClient()
    mine, ours = (client.get_metric_history(run.info.run_id, name) for name in ("loss", "gradwatch/curves/loss"))
    assert is_active
    assert [metric.value for metric in mine] == pytest.approx(losses)
    assert ours[-1].step == STEPS - 1


def test_trackio_gets_a_run_that_begins_and_ends_with_the_training():
    trackio = pytest.importorskip("trackio")
    losses = train("runs/trackio", {"trackio": {"project": "digits"}})

    (run,) = trackio.Api().runs("digits")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    rows = [row for row in storage.get_logs("digits", run.name) if "gradwatch/curves/loss" in row]
    curve = {row["step"]: row["gradwatch/curves/loss"] for row in rows}
    assert curve == pytest.approx({step: losses[step] for step in (*range(0, STEPS, 10), STEPS - 1)})
    assert [alert["title"] for alert in storage.get_alerts("digits")] == ["learning-rate-too-high (GW302)"]


def test_trackio_run_of_the_user_keeps_its_steps_and_stays_open():
    trackio = pytest.importorskip("trackio")
    trackio.init(project="mine", name="own", embed=False)
    train(sinks={"trackio": {}}, each=lambda step, loss: trackio.log({"loss": loss}))
    trackio.finish()  # raises if the run has ended

    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs("mine", "own")
    assert [row["step"] for row in rows if "loss" in row] == [*range(STEPS)]
    assert max(row["gradwatch/step"] for row in rows if "gradwatch/step" in row) == STEPS - 1
