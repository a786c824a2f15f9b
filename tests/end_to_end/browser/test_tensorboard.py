"""TensorBoard in a real browser, on a real run: who never saw gradwatch finds its charts, pictures and texts."""

import json
import re
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

import gradwatch

pytest.importorskip("selenium", reason="selenium is not installed")

STEPS = 60
START_SECONDS = 60
GROUPS = {"curves", "gradients", "updates"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the directory of a short run in which every batch is the same."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("runs") / "same-batch"
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(16, 8)
    with gradwatch.watch(model, optimizer, run=directory, total_steps=STEPS) as monitor:
        for _ in range(STEPS):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=inputs)
    return directory


@pytest.fixture(scope="module")
def address(run, driver):
    """Return where TensorBoard shows the run; it ends with the tests."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run.parent), "--port", "0"]
    options = ["--host", "127.0.0.1", "--load_fast", "false", "--reload_interval", "0"]
    server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                break
        else:
            pytest.fail("TensorBoard did not start")
        _wait_until_read(found[0])
        yield found[0]
    finally:
        server.terminate()
        server.communicate(timeout=START_SECONDS)


def _wait_until_read(address):
    """Wait until TensorBoard has read the run to its end, where the diagnosis stands."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{address}data/plugin/text/tags", timeout=START_SECONDS) as answer:
            if any("1_diagnosis" in tags for tags in json.load(answer).values()):
                return
        time.sleep(0.1)
    pytest.fail("TensorBoard did not read the run")


@pytest.fixture
def tab(browser, address):
    """Return a function that opens a tab of TensorBoard and waits until some words are in it."""

    def show(name, *words):
        # the address of another tab differs in its fragment only, which loads nothing
        browser.driver.get("about:blank")
        browser.driver.get(f"{address}#{name}")
        for word in words:
            browser.wait(lambda word=word: word in _text(browser), f"{name} does not show {word!r}")
        return browser

    return show


def _text(page):
    """Return the text of a page, that in shadow roots too."""
    return page.script(
        "const walk = (node) => [...node.childNodes].map((child) => child.nodeType === 3 ? child.data : ['STYLE',"
        " 'SCRIPT'].includes(child.tagName) ? '' : walk(child) + (child.shadowRoot ? walk(child.shadowRoot) : ''))"
        ".join(' '); return walk(document.body)"
    )


def test_the_run_and_its_charts_are_listed_by_groups(tab, run):
    page = tab("timeseries", run.name)

    page.wait(lambda: set(_text(page).split()) >= GROUPS, f"{GROUPS} are not listed")

    assert run.name in _text(page)


def test_the_scalars_are_drawn(tab):
    page = tab("scalars", "curves/")

    charts = page.wait(lambda: page.deep("vz-line-chart2, tf-line-chart-data-loader"), "there is no chart")

    assert charts[0].is_displayed()


def test_the_custom_dashboard_opens_on_the_loss(tab, run):
    reader = EventAccumulator(str(run))
    reader.Reload()
    (event,) = reader.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
    titles = [category.title for category in layout.category]

    page = tab("custom_scalars", *titles)

    assert titles[0] == "Learning"
    assert page.wait(lambda: page.deep("tf-custom-scalar-multi-line-chart-card"), "there is no chart")


def test_the_picture_of_the_layers_is_shown(tab):
    page = tab("images", "by_layer_and_step")

    picture = page.wait(lambda: page.deep("img[src*=individualImage]"), "there is no picture")[0]
    size = page.wait(lambda: page.script("return arguments[0].naturalWidth", picture), "the picture is not loaded")

    assert size > 400


def test_the_findings_and_the_diagnosis_are_texts(tab):
    page = tab("text", "1_diagnosis", "2_findings", "constant-batch")

    assert page.complaints() == []
