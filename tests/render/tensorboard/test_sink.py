"""The TensorBoard sink, read back by TensorBoard."""

import io
import re
import time
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.util import tensor_util

from gradwatch.history.store import Histograms, History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import RunInfo
from gradwatch.render import Sink
from gradwatch.render.tensorboard import throttle
from gradwatch.render.tensorboard.sink import TensorBoard


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Whatever is due is affordable: made-up runs take no time in which to earn it."""
    monkeypatch.setattr(throttle, "GRACE_S", 1e9)


def _read(directory):
    everything = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    reader = EventAccumulator(str(directory), size_guidance=everything)
    reader.Reload()
    return reader


def _served(directory):
    """Return what TensorBoard shows, which also knows where a run began anew."""
    reader = plugin_event_accumulator.EventAccumulator(str(directory), tensor_size_guidance={"": 0})
    reader.Reload()
    return reader


def _scalars(reader, tag):
    """Return the points of a chart as (step, value)."""
    return [(e.step, e.value) for e in reader.Scalars(tag)]


def _strings(reader, tag):
    return [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in reader.Tensors(tag)]


def _text(reader, tag):
    return [(step, value.item().decode()) for step, value in _strings(reader, tag)]


def _live(directory, run, grow, **options):
    """Write a run and leave it as if its process were killed, without `close`. Return the sink."""
    sink = TensorBoard(directory=directory, **options)
    pending = sorted(run.history.findings, key=lambda f: f.step)
    for history in grow(run.history):
        while pending and pending[0].step <= history.step:
            history.report(pending[0])
            sink.report(pending.pop(0))
        sink.write(history)
    return sink


def _run(directory, run, grow, **options):
    _live(directory, run, grow, **options).close(run.history, run.diagnoses)
    return _read(directory)


def _validations(history):
    """Return the accuracy of each validation, by step."""
    values = zip(history.steps("val_accuracy").tolist(), history["val_accuracy"].tolist(), strict=True)
    return {step: value for step, value in values if not np.isnan(value)}


def test_it_is_a_sink(tmp_path):
    sink = TensorBoard(directory=tmp_path)

    assert isinstance(sink, Sink)
    sink.close(History(RunInfo(name="", created="", layers=())), ())


def test_charts_hold_the_values_of_the_history(tmp_path, healthy, grow):
    _live(tmp_path, healthy, grow)

    reader = _read(tmp_path)

    loss = healthy.history["loss"]
    steps = [*range(0, 120, 10)]
    points = _scalars(reader, "curves/loss")
    assert [step for step, _ in points] == steps, "every 10 steps"
    assert [value for _, value in points] == pytest.approx([loss[step] for step in steps])
    measured = _validations(healthy.history)
    assert dict(_scalars(reader, "curves/validation_accuracy")) == pytest.approx(
        {step: value for step, value in measured.items() if step <= 110}  # the newest point
    )
    norms = healthy.history["grad.l2"][:, 1]
    assert dict(_scalars(reader, "per_layer_grad_norm/layers.1.weight")) == pytest.approx(
        {step: norms[step] for step in (0, 50, 100)}
    )


def test_a_run_that_has_ended_shows_every_step(tmp_path, healthy, grow):
    reader = _run(tmp_path, healthy, grow)

    steps = list(range(120))
    assert dict(_scalars(reader, "curves/loss")) == pytest.approx(
        dict(zip(steps, healthy.history["loss"].tolist(), strict=True))
    )
    assert [step for step, _ in _scalars(reader, "per_layer_grad_norm/layers.1.weight")] == steps
    assert dict(_scalars(reader, "curves/validation_accuracy")) == pytest.approx(_validations(healthy.history))
    times = [e.wall_time for e in reader.Scalars("curves/loss")]
    assert times == sorted(times), "in the order of the steps"
    assert sorted(path.stat().st_size > 0 for path in tmp_path.iterdir()) == [False, True], "the thin file is empty"


def test_a_run_whose_layers_are_not_watched_has_its_curves(tmp_path):
    history = History(RunInfo(name="", created="", layers=()))
    sink = TensorBoard(directory=tmp_path)
    for step in range(20):
        history.append(step, run={"loss": 2.0 - step / 20}, param_SL=np.zeros(history.param.shape, np.float32))
        sink.write(history)
    sink.close(history, ())

    assert [step for step, _ in _scalars(_read(tmp_path), "curves/loss")] == list(range(20))


def test_charts_carry_their_description_once(tmp_path, healthy, grow):
    reader = _run(tmp_path, healthy, grow)

    metadata = reader.SummaryMetadata("curves/total_norm")
    assert metadata.plugin_data.plugin_name == "scalars"
    assert "unscaled, before clipping" in metadata.summary_description
    assert (
        "L2 norm of the update" in reader.SummaryMetadata("per_layer_update_ratio/layers.0.weight").summary_description
    )


def test_nan_breaks_no_chart_and_is_counted(tmp_path, broken, grow):
    reader = _run(tmp_path, broken, grow)

    marked = {"curves/loss", "curves/total_norm"}
    for tag in set(reader.Tags()["scalars"]) - marked:
        assert np.isfinite([value for _, value in _scalars(reader, tag)]).all(), tag
    for tag in marked:  # TensorBoard draws a triangle for nan
        assert [step for step, value in _scalars(reader, tag) if np.isnan(value)] == list(range(100, 120))
    assert dict(_scalars(reader, "nonfinite/layers"))[110] == 1
    assert dict(_scalars(reader, "nonfinite/layers"))[90] == 0
    assert _scalars(reader, "nonfinite/steps")[-1] == (119, 20), "from step 100 on"


def test_findings_and_the_diagnosis_are_text(tmp_path, vanishing, grow):
    reader = _run(tmp_path, vanishing, grow)

    findings = _text(reader, "2_findings")
    assert findings[0][0] == 35, "as soon as it is found"
    link = r"\?tagFilter=\S+&runFilter=\S+&smoothing=0#timeseries"
    head = rf"\* ▲ \*\*warning, \[step 35\]\({link}\), GW203 saturated-activation\*\* in `acts.0`: "
    assert re.match(head, findings[0][1])
    assert findings[-1][1].count("\n") == 14, "all 15"
    assert findings[-1][1].startswith("* ✖ **critical"), "the gravest first"
    (diagnosis,) = _text(reader, "1_diagnosis")
    assert "## ✖ saturating activations in a deep network" in diagnosis[1]
    assert "```yaml\nmodel:\n  activation: relu\n  residual: true\n```" in diagnosis[1]


def test_a_finding_stands_at_its_step_with_a_link_to_the_charts_of_its_layer(tmp_path, vanishing, grow):
    reader = _run(tmp_path / "2026-run", vanishing, grow)

    ((step, text),) = _text(reader, "3_finding/saturated-activation")
    query = parse_qs(re.search(r"\(\?(\S+)#timeseries\)", text).group(1))
    tags, runs = re.compile(*query["tagFilter"]), re.compile(*query["runFilter"])
    assert step == 35
    assert tags.match("per_layer_saturated_frac/acts.0")
    assert not tags.match("per_layer_saturated_frac/acts.1")
    assert runs.search("sweep/2026-run")
    assert runs.search("."), "TensorBoard on the run directory itself"
    assert not runs.search("2026-run-b")


def test_a_healthy_run_says_so_in_its_diagnosis(tmp_path, healthy, grow):
    assert "healthy" in _text(_run(tmp_path, healthy, grow), "1_diagnosis")[0][1]


def test_the_config_is_text(tmp_path, healthy, grow):
    reader = _run(tmp_path, healthy, grow, config_text="model:\n  name: mlp\n")

    assert _text(reader, "4_config") == [(0, "```yaml\nmodel:\n  name: mlp\n```")]


def test_pictures_decode(tmp_path, vanishing, grow):
    reader = _run(tmp_path, vanishing, grow, picture_every=50)

    pictures = _strings(reader, "gradients/by_layer_and_step")
    assert [step for step, _ in pictures] == [50, 100, 119]
    assert [step for step, _ in _strings(reader, "updates/by_layer_and_step")] == [50, 100, 119]
    width, height, png = pictures[-1][1]
    image = Image.open(io.BytesIO(png))
    assert image.size == (int(width), int(height))
    assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20, "it is not blank"


def test_histograms_are_written_once_each(tmp_path, healthy, grow):
    edges_B = np.concatenate([-(2.0 ** np.arange(2, -9, -1)), 2.0 ** np.arange(-8, 3)])
    sink = TensorBoard(directory=tmp_path)
    for history in grow(healthy.history):
        if places := {100: [0, 1, 2, 3], 110: [2]}.get(history.step):
            counts_KB = np.zeros((len(places), len(edges_B) - 1), np.int64)
            counts_KB[:, -3] = 5
            seen = Histograms(
                step=history.step,
                edges_B=edges_B,
                places_K=np.array(places),
                grad_KB=counts_KB,
                weight_KB=2 * counts_KB,
            )
            history.histograms |= {place: (seen, k) for k, place in enumerate(places)}
            history.histograms_step = history.step
        sink.write(history)
    sink.close(history, ())

    reader = _read(tmp_path)

    ((before, _), (step, buckets)) = _strings(reader, "per_layer_log10_gradient/layers.2.weight")
    assert (before, step) == (100, 110)
    assert [step for step, _ in _strings(reader, "per_layer_log10_gradient/layers.1.weight")] == [100]
    assert buckets == pytest.approx(np.array([[-np.log10(2), 0, 5]]))
    assert reader.SummaryMetadata("per_layer_log10_weight/layers.0.weight").plugin_data.plugin_name == "histograms"


def test_the_dashboard_is_laid_out(tmp_path, broken, grow):
    ((_, proto),) = _strings(_run(tmp_path, broken, grow), "custom_scalars__config__")

    layout = layout_pb2.Layout.FromString(proto.item())

    assert [c.title for c in layout.category] == [
        "Learning",
        "Gradient flow",
        "Updates",
        "Sparsity",
        "NaN and Inf",
        "Loss scaling",
        "Speed",
    ]
    assert [chart.title.split(";")[0] for chart in layout.category[0].chart[:3]] == [
        "loss",
        "learning rate",
        "total gradient norm",
    ]
    (band,) = layout.category[2].chart[0].margin.series
    assert (band.value, band.lower, band.upper) == (
        "updates/log10_ratio_median",
        "updates/healthy_from",
        "updates/healthy_to",
    )


def test_hyperparameters_are_there_with_the_metrics_to_compare(tmp_path, healthy, grow):
    hparams = {"optim.lr": 0.001, "model.depth": 3, "model.name": "mlp", "run.deterministic": True, "data.augment": []}
    reader = _run(tmp_path, healthy, grow, hparams=hparams)

    def content(tag):
        return reader.SummaryMetadata(tag).plugin_data.content

    experiment = hparams_metadata.parse_experiment_plugin_data(content(hparams_metadata.EXPERIMENT_TAG))
    start = hparams_metadata.parse_session_start_info_plugin_data(content(hparams_metadata.SESSION_START_INFO_TAG))
    end = hparams_metadata.parse_session_end_info_plugin_data(content(hparams_metadata.SESSION_END_INFO_TAG))
    metrics = {m.display_name: m.name.tag for m in experiment.metric_infos}
    assert list(metrics) == ["val_loss", "val_accuracy", "loss", "NaN or Inf steps", "problems"]
    assert set(metrics.values()) <= set(reader.Tags()["scalars"])
    assert _scalars(reader, metrics["val_accuracy"])[-1][1] == pytest.approx(0.875), "the final one"
    assert {h.name for h in experiment.hparam_infos} == set(hparams)
    assert start.hparams["optim.lr"].number_value == 0.001
    assert start.hparams["run.deterministic"].bool_value is True
    assert start.hparams["data.augment"].string_value == "[]"
    assert end.status == 1, "success"


def test_a_critical_run_ends_as_a_failure(tmp_path, broken, grow):
    reader = _run(tmp_path, broken, grow, hparams={"optim.lr": 1.0})

    content = reader.SummaryMetadata(hparams_metadata.SESSION_END_INFO_TAG).plugin_data.content
    assert hparams_metadata.parse_session_end_info_plugin_data(content).status == 2


def test_a_resumed_run_overwrites_the_lost_tail(tmp_path, healthy, grow):
    first = TensorBoard(directory=tmp_path)
    for history in grow(healthy.history):
        if history.step < 80:
            first.write(history)
    # killed here, without close; the last checkpoint is that of step 49
    changed = Synthetic(layers=4, steps=120, seed=5).history()
    second = TensorBoard(directory=tmp_path, purge_step=50)
    for history in grow(changed):
        if history.step >= 50:
            second.write(history)
    second.close(history, ())

    points = _strings(_served(tmp_path), "curves/loss")

    assert [step for step, _ in points] == [*range(120)], "each step once"
    assert dict(points)[70].item() == pytest.approx(changed["loss"][70])


def test_what_a_rewind_takes_back_is_forgotten(tmp_path, healthy, grow):
    changed = Synthetic(layers=4, steps=120, seed=5).history()
    sink = TensorBoard(directory=tmp_path, hparams={"optim.lr": 1.0}, picture_every=60)
    for history in grow(healthy.history):
        if history.step < 83:
            sink.write(history)
    for history in grow(changed):
        if history.step >= 38:  # the run went back to step 38
            sink.write(history)
    sink.close(history, ())

    reader = _served(tmp_path)
    points = _strings(reader, "curves/loss")

    assert [step for step, _ in points] == [*range(120)], "in order, each step once"
    assert dict(points)[40].item() == pytest.approx(changed["loss"][40])
    assert [step for step, _ in _strings(reader, "gradients/by_layer_and_step")] == [60, 119]


def test_a_rewind_to_the_start_keeps_config_and_hyperparameters(tmp_path, healthy, grow):
    sink = TensorBoard(directory=tmp_path, hparams={"optim.lr": 1.0}, config_text="optim: {lr: 1.0}")
    for _ in range(2):
        for history in grow(healthy.history):
            sink.write(history)
    sink.close(history, ())

    reader = _served(tmp_path)

    assert [step for step, _ in _text(reader, "4_config")] == [0]
    assert hparams_metadata.SESSION_START_INFO_TAG in reader.Tags()["tensors"]


def test_nothing_is_written_twice_for_a_step(tmp_path, healthy, grow):
    sink = TensorBoard(directory=tmp_path, every=1)
    for history in grow(healthy.history):
        sink.write(history)
        sink.write(history)
    sink.close(history, ())

    steps = [step for step, _ in _scalars(_read(tmp_path), "curves/loss")]

    assert steps == list(range(120))


def test_it_thins_itself_where_steps_are_fast(tmp_path, healthy, grow, monkeypatch):
    monkeypatch.setattr(throttle, "GRACE_S", 0.0)
    sink = TensorBoard(directory=tmp_path, every=1, layers_every=1)
    began = time.perf_counter()
    for history in grow(healthy.history):
        history.trained_s = elapsed_s = time.perf_counter() - began
        sink.write(history)

    points = _scalars(_read(tmp_path), "curves/loss")

    assert 1 <= len(points) < 30, f"{len(points)} points in {elapsed_s:.3f} s"


def test_zero_switches_a_part_off(tmp_path, healthy, grow):
    sink = TensorBoard(directory=tmp_path, layers_every=0, picture_every=0)
    for history in grow(healthy.history):
        sink.write(history)
    sink.close(history, ())

    tags = [tag for kind in ("scalars", "tensors") for tag in _read(tmp_path).Tags()[kind]]

    assert "curves/loss" in tags
    assert not any(tag.startswith("per_layer_") or tag == "gradients/by_layer_and_step" for tag in tags)


def test_a_disk_that_fails_raises_os_errors_only(tmp_path, healthy):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        TensorBoard(directory=tmp_path / "file")

    sink = TensorBoard(directory=tmp_path / "run")
    sink._file._file.close()
    sink._file._file = Path("/dev/full").open("wb")  # noqa: SIM115 - closed by the sink
    with pytest.raises(OSError, match="No space left"):
        sink.write(healthy.history)
    with pytest.raises(OSError, match="No space left"):
        sink.close(healthy.history, ())
