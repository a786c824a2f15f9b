"""report.html: what it says, what it hides from nobody, and that it needs nothing but itself."""

import base64
import hashlib
import json
import math
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwatch
from gradwatch import catalogue
from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.history import thinning
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import ActivationInfo, Event, LayerInfo, RunInfo
from gradwatch.render import Sink
from gradwatch.render.report import encoding as pack
from gradwatch.render.report.page import page
from gradwatch.render.report.sink import NAME, Html, write_report
from gradwatch.train.loop import train

# T = recorded steps, L = rows of a table, W = columns, S = statistics

ATTACKS = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"' onmouseover=alert(1) x='")


class Elements(HTMLParser):
    """Lists the elements of a page with their attributes, and the text of scripts and styles by its id or tag."""

    def __init__(self, text):
        super().__init__()
        self.found, self.inside, self._open = [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open = dict(attrs).get("id", tag)

    def handle_data(self, data):
        if self._open:
            self.inside[self._open] = self.inside.get(self._open, "") + data

    def handle_endtag(self, tag):
        self._open = ""


@pytest.fixture
def read_back():
    """Return a function that gives the statistics of a page as values: what codes.js does, the obvious way."""

    def statistics(text):
        elements = Elements(text)
        document, data = json.loads(elements.inside["data"]), zlib.decompress(base64.b64decode(elements.inside["pack"]))
        at, found = 0, {}
        for entry in document["statistics"]:
            columns = document["columns"][entry["columns"]]
            shape = (len(document["rows"][entry["of"]]), len(columns["first"]))
            planes = []
            for _ in range(3 if columns["thinned"] else 1):
                size = math.prod(shape)
                low, high = (np.frombuffer(data, np.uint8, size, at + part * size) for part in (0, 1))
                planes.append((low.astype(np.int64) + 256 * high.astype(np.int64)).reshape(shape))
                at += 2 * size
            if len(planes) == 3:
                mid, below, above = planes
                planes = [mid, (mid - below) % 65536, (mid + above) % 65536]
            found[entry["name"]] = (columns, [_values(plane, entry["scale"]) for plane in planes])
        assert at == len(data)
        return document, found

    return statistics


def _values(codes, scale):
    """Return the values that codes stand for; None stands for no value."""
    made = np.empty(codes.shape, object)
    for place, code in np.ndenumerate(codes):
        level = scale["low"] + (abs(int(code) - 32768) - 1) * scale["step"]
        size = 10**level if scale["log"] else level
        special = {0: None, 32768: 0.0, 65534: np.inf, 65535: np.nan}
        made[place] = special[int(code)] if int(code) in special else math.copysign(size, int(code) - 32768)
    return made


def _is_close(read, value, *, log):
    if read is None or math.isnan(read) or math.isinf(read) or read == 0:
        return read is not None and str(abs(read)) == str(abs(float(value)))
    return math.isclose(read, value, rel_tol=0.0024) if log else math.isclose(read, value, abs_tol=1 / 4096)


def _long_run(*, steps=100_000, layers=200, noise=1.0):
    """Return what is kept of a long run of a model with so many tensors, half as many activations, and much noise."""
    rng = np.random.default_rng(0)
    params = tuple(
        LayerInfo(
            name=f"blocks.{i // 2}.{'bias' if i % 2 else 'weight'}",
            module=f"blocks.{i // 2}",
            module_type="Linear",
            shape=(64,) if i % 2 else (64, 64),
            dtype="float32",
            trainable=True,
            group=0,
        )
        for i in range(layers)
    )
    acts = tuple(ActivationInfo(name=f"blocks.{i}.act", module_type="ReLU") for i in range(layers // 2))
    history = History(RunInfo(name="long", created="", layers=params, activations=acts, total_steps=steps))
    all_T = np.arange(steps)
    steps_T = all_T[thinning.is_kept(all_T, newest=steps - 1, length=history.param.segment_length)]
    param_TSL = np.exp(noise * rng.standard_normal((len(steps_T), len(catalogue.PARAM), layers))).astype(np.float32)
    param_TSL[:, catalogue.PARAM_NAMES.index("grad.zero_frac")] %= 1
    param_TSL[:, catalogue.PARAM_NAMES.index("grad.nonfinite")] = 0
    history.param.fill(steps_T, param_TSL)
    sampled_T = steps_T[steps_T % 10 == 0]
    history.act.fill(sampled_T, rng.random((len(sampled_T), len(catalogue.ACT), layers // 2), np.float32))
    run_TS = np.exp(noise * rng.standard_normal((len(steps_T), len(history.run.statistics), 1)))
    run_TS[:, [history.run.statistics.index(name) for name in catalogue.POLICY_NAMES]] = np.nan  # of policies only
    history.run.fill(steps_T, run_TS)
    return history


def test_the_page_has_verdict_cause_evidence_remedy_and_manual_page(vanishing):
    text = page(vanishing.history, vanishing.diagnoses, config_text="model: {name: mlp}")

    assert "14 critical problems, 1 warning" in Elements(text).inside["title"]
    assert text.index("Vanishing gradient: saturating activations in a deep network") < text.index('<section id="run"')
    assert "almost certain" in text
    assert "activation: relu" in text
    assert "Train 200 steps with relu." in text
    assert "What it measures:" in text, "the manual page of GW101"
    assert "<dt>grad.l2</dt><dd>3.10e-9</dd>" in text
    assert "L2 norm of the gradient of each layer, input side first; at step 119 from" in text
    assert "; since step" not in text, "the trend of one layer says nothing of the depth"
    assert text.count("layers.13.weight") >= 1
    assert "model: {name: mlp}" in text


def test_a_healthy_run_says_so(healthy):
    text = page(healthy.history, ())

    assert '<span class="badge healthy"><span aria-hidden="true">✔</span> healthy</span>' in text
    assert "No problems found." in text


def test_the_page_loads_nothing_and_runs_only_its_own_script(vanishing):
    elements = Elements(page(vanishing.history, vanishing.diagnoses))

    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.inside[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    loads = [(tag, a) for tag, a in elements.found if tag == "link" or {"src", "srcset", "data", "action"} & a.keys()]
    assert [(tag, a["src"][:15]) for tag, a in loads] == [("img", "data:image/png;")]
    assert "url(" not in elements.inside["style"]
    assert "@import" not in elements.inside["style"]


def test_the_licence_of_the_plotting_library_goes_with_it(healthy):
    assert "Permission is hereby granted, free of charge" in page(healthy.history, ())


@pytest.mark.parametrize("attack", ATTACKS)
def test_names_settings_and_texts_are_never_read_as_markup(attack, vanishing, make_finding):
    usual = [tag for tag, _ in Elements(page(vanishing.history, vanishing.diagnoses, config_text="x")).found]
    layers = tuple(replace(layer, name=f"{attack}{i}") for i, layer in enumerate(vanishing.history.info.layers))
    info = replace(vanishing.history.info, name=attack, layers=layers, optimizer=attack, versions={attack: attack})
    history = History(info)
    history.param.fill(*vanishing.history.param.rows())
    history.act.fill(*vanishing.history.act.rows())
    history.run.fill(*vanishing.history.run.rows())
    found = [replace(f, layer=f"{attack}{i}", message=attack) for i, f in enumerate(vanishing.history.findings)]
    for finding in found:
        history.report(finding)
    history.add_event(Event(kind=attack, step=1, layer=attack, text=attack))
    diagnosis = replace(vanishing.diagnoses[0], cause=attack, because=attack, confirm=attack, findings=tuple(found))

    elements = Elements(page(history, (diagnosis,), config_text=attack))

    assert not [a for _, a in elements.found if any(name.startswith("on") for name in a)]
    tags = [tag for tag, _ in elements.found]
    assert (tags.count("script"), tags.count("img")) == (usual.count("script"), usual.count("img"))
    assert json.loads(elements.inside["data"])["rows"]["param"][0]["name"] == f"{attack}0"
    assert attack in elements.inside["title"]


def test_every_value_of_a_short_run_is_read_back(healthy, read_back):
    document, found = read_back(page(healthy.history, ()))

    assert document["step"] == healthy.history.step
    for name, (columns, (mid,)) in found.items():
        steps_T, values_TL = healthy.history.table(name).series(name)
        known_T = ~np.isnan(values_TL).all(axis=1)
        assert columns["first"] == steps_T[known_T].tolist(), name
        for read, value in zip(mid.T.ravel(), values_TL[known_T].ravel(), strict=True):
            absent = read is None and np.isnan(value)
            assert absent or _is_close(read, value, log=not name.endswith("_frac")), name


def test_nan_inf_zero_and_no_gradient_stay_apart(read_back):
    run = Synthetic(layers=6, steps=40).no_gradient(1).dead(2, onset=0)
    run.non_finite(step=5, layers=3).non_finite(step=5, layers=4, value=np.inf)

    _, found = read_back(page(run.history(), ()))

    norms = found["grad.l2"][1][0][:, 5]
    assert norms[1] is None
    assert norms[2] == 0
    assert math.isnan(norms[3])
    assert norms[4] == np.inf
    assert 0 < norms[0] < np.inf


def test_a_single_step_is_seen_however_many_share_its_column(read_back):
    history = _long_run(steps=20_000, layers=4, noise=0.1)
    steps_T, values_TSL = history.param.rows()
    l2, bad = (catalogue.PARAM_NAMES.index(name) for name in ("grad.l2", "grad.nonfinite"))
    spike, broken, lull = 700, 1500, 2500
    values_TSL[spike, l2, 0] = 1e4
    values_TSL[broken, l2, 1], values_TSL[broken, bad, 1] = np.nan, 7
    values_TSL[lull, l2, 2] = 0
    changed = History(history.info)
    changed.param.fill(steps_T, values_TSL)
    changed.run.fill(*history.run.rows())

    _, found = read_back(page(changed, ()))

    columns, (mid, low, high) = found["grad.l2"]
    assert len(columns["first"]) < len(steps_T) / 2
    where = [np.searchsorted(columns["first"], steps_T[i], side="right") - 1 for i in (spike, broken, lull)]
    assert math.isclose(high[0, where[0]], 1e4, rel_tol=0.003)
    assert mid[0, where[0]] < 10
    assert math.isnan(high[1, where[1]])
    assert mid[1, where[1]] < 10
    assert low[2, where[2]] == 0
    assert math.isclose(found["grad.nonfinite"][1][2][1, where[1]], 7, rel_tol=0.003)


def test_columns_hold_the_least_the_median_and_the_greatest(read_back):
    history = _long_run(steps=20_000, layers=2)
    steps_T, values_TL = history.param.series("grad.l2")

    _, found = read_back(page(history, ()))

    columns, planes = found["grad.l2"]
    for w, (first, last) in enumerate(zip(columns["first"], columns["last"], strict=True)):
        inside = np.sort(values_TL[(steps_T >= first) & (steps_T <= last), 0])
        expected = inside[(len(inside) - 1) // 2], inside[0], inside[-1]
        assert [plane[0, w] for plane in planes] == pytest.approx(expected, rel=0.0024)


def test_columns_cover_every_recorded_step_once():
    steps_T = np.unique(np.random.default_rng(0).integers(0, 50_000, 4_000))

    found = pack.bins(steps_T, 300)

    assert 250 <= len(found.first_W) <= 300
    np.testing.assert_array_equal(found.steps_W, steps_T[found.first_W])
    np.testing.assert_array_equal(found.last_W[:-1], steps_T[found.first_W[1:] - 1])
    assert found.last_W[-1] == steps_T[-1]


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_codes_are_in_the_order_of_their_values(values):
    values_TL = np.array(values, np.float64)[:, None]

    codes_TL, _ = pack.encode(values_TL, missing_TL=np.zeros(values_TL.shape, bool), log=True)

    finite = np.isfinite(values_TL)
    by_value = np.argsort(values_TL[finite], kind="stable")
    assert (np.diff(codes_TL[finite][by_value].astype(int)) >= 0).all()
    assert (codes_TL[values_TL == 0] == pack.ZERO).all()
    assert (codes_TL[np.isnan(values_TL)] == pack.NAN).all()
    assert (codes_TL[np.isinf(values_TL)] == pack.INFINITE).all()


@pytest.mark.parametrize("noise", [0.3, 2.0])
def test_a_run_of_100_000_steps_and_200_layers_stays_below_2_mb(noise):
    assert len(page(_long_run(noise=noise), ())) < 2_000_000


def test_a_run_without_a_step_has_a_page_and_leaves_no_file(tmp_path):
    history = History(Synthetic(layers=2, steps=1).info)

    assert "No steps recorded" in page(history, ())
    Html(directory=tmp_path).close(history, ())

    assert list(tmp_path.iterdir()) == []


def test_the_sink_writes_the_page_at_the_end(tmp_path, vanishing):
    sink = Html(directory=tmp_path, config_text="optim: {lr: 1}")

    sink.write(vanishing.history)
    assert not list(tmp_path.iterdir())
    sink.close(vanishing.history, vanishing.diagnoses)

    assert isinstance(sink, Sink)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert "optim: {lr: 1}" in (tmp_path / NAME).read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_warns_and_says_how_to_get_it(tmp_path, healthy):
    directory = tmp_path / "gone"

    with pytest.warns(
        RuntimeWarning, match=r"could not write the report: .*Write it later with: gradwatch diagnose .*--format html"
    ):
        Html(directory=directory).close(healthy.history, ())


def test_a_full_disk_leaves_the_earlier_page(tmp_path, healthy, vanishing, monkeypatch):
    path = tmp_path / NAME
    write_report(path, healthy.history, ())
    before = path.read_bytes()

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(RunError, match="make room on that disk"):
        write_report(path, vanishing.history, vanishing.diagnoses)

    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_a_step_whose_backward_pass_was_skipped_is_a_gap_and_said(broken, read_back):
    run = Synthetic(layers=3, steps=30)
    run.loss_T[[11, 12, 20]] = np.nan
    history = run.history()
    steps_T, values_TSL = history.param.rows()
    values_TSL[[11, 12, 20]] = np.nan
    skipped = History(history.info)
    skipped.param.fill(steps_T, values_TSL)
    skipped.run.fill(*history.run.rows())
    skipped.report(replace(broken.history.findings[0], layer=None, step=11))

    text = page(skipped, ())

    document, found = read_back(text)
    assert document["gaps"] == [[11, 12], [20, 20]]
    assert found["grad.l2"][0]["first"] == list(range(30)), "the map has a place for the gap"
    assert (
        "The loss was NaN or Inf at 3 steps: 11, 12, 20. The backward pass was skipped there, so no gradient was "
        "computed."
    ) in text
    assert read_back(page(broken.history, broken.diagnoses))[0]["gaps"] == [], "its gradients were computed"


def test_changed_settings_come_first_and_the_whole_config_is_folded(healthy):
    text = page(
        healthy.history, (), config_text="run: {seed: 0}\nmodel: {name: mlp}", changed_text="model: {name: mlp}"
    )

    section = text[text.index('<section id="config"') :]
    assert section.index("<code>model: {name: mlp}</code>") < section.index("<details><summary>The whole config")
    assert section.index("<details>") < section.index("run: {seed: 0}")


def test_a_patch_has_the_command_that_trains_with_it(vanishing, tmp_path):
    text = page(vanishing.history, vanishing.diagnoses, run=tmp_path / "deep", config_text="model: {name: mlp}")

    command = f"gradwatch train {tmp_path}/deep/config.yaml --set model.activation=relu --set model.residual=true"
    assert f"<code>{command}</code>" in text
    assert "gradwatch train" not in page(vanishing.history, vanishing.diagnoses, run=tmp_path), "there is no config"


def test_what_happened_besides_is_listed(healthy):
    history = healthy.history
    grown = History(history.info)
    grown.run.fill(*history.run.rows())
    grown.param.fill(*history.param.rows())
    grown.add_event(Event(kind="rewind", step=7, text="back to step 3"))

    assert re.search(r"1 event</summary><ul><li>step 7: <b>rewind</b> back to step 3", page(grown, ()))


def test_skipped_updates_and_the_loss_scale_are_in_the_curves(broken, read_back):
    document, _ = read_back(page(broken.history, broken.diagnoses))

    curves = {curve["name"]: curve for curve in document["curves"]}
    assert {"loss", "lr.0", "loss_scale", "skipped", "watch_ms", "grad_norm.before_clip"} <= curves.keys()
    (losses,) = (np.frombuffer(base64.b64decode(text), "<f4") for text in curves["loss"]["values"])
    np.testing.assert_allclose(losses[:100], broken.history["loss"][:100], rtol=1e-6)
    assert np.isinf(losses[100:]).all(), "every step has a loss, so that nan is a NaN"


def test_a_run_that_watch_closes_has_its_report(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with gradwatch.watch(model, optimizer, run=tmp_path / "mine") as monitor:
        for _ in range(3):
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        assert not (tmp_path / "mine" / NAME).exists()

    assert "<h1>mine</h1>" in (tmp_path / "mine" / NAME).read_text(encoding="utf-8")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_training_leaves_its_report_unless_it_is_switched_off(tmp_path, enabled):
    document = {
        "run": {"out": str(tmp_path)},
        "model": {"name": "mlp", "depth": 1, "width": 4},
        "data": {"name": "digits"},
        "optim": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 3},
        "sinks": {"html": {"enabled": enabled}, "terminal": {"enabled": False}},
    }
    (tmp_path / "small.yaml").write_text(json.dumps(document))

    outcome = train(load_config(tmp_path / "small.yaml"))

    report = outcome.directory / NAME
    assert report.exists() == enabled
    if enabled:
        config = report.read_text(encoding="utf-8").partition("Settings that differ from the defaults")[2]
        changed, _, whole = config.partition("The whole config")
        assert "steps: 3" in changed
        assert "eval_every" not in changed
        assert "eval_every: null" in whole


def test_the_largest_value_of_a_wide_range_is_not_taken_for_infinity():
    values_TL = np.array([[1e-38], [1.0], [1e38], [-1e38], [np.inf]])

    codes_TL, _ = pack.encode(values_TL, missing_TL=np.zeros_like(values_TL, np.bool_), log=True)

    assert (codes_TL[:, 0] == pack.INFINITE).tolist() == [False, False, False, False, True]
    assert (codes_TL[:, 0] != pack.MISSING).all()
