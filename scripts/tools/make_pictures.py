"""Draw the pictures of the README from real runs: `python scripts/tools/make_pictures.py`, into .github/pictures/.

The terminal pictures are exported by rich as SVG. The report and TensorBoard are photographed in a headless chromium,
which must be installed.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from rich.console import Console

from gradwatch.cli.output.bad_operation import print_located
from gradwatch.cli.output.rerun import print_rerun
from gradwatch.config.load import load_config
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.store import History
from gradwatch.pipeline.redetect import redetect
from gradwatch.render.common.layers import matrices
from gradwatch.render.common.sparkline import UNICODE
from gradwatch.render.report.sink import write_report
from gradwatch.render.terminal.live_view import panel
from gradwatch.render.terminal.summary import print_summary
from gradwatch.replay.locate_in_run import locate_in_run
from gradwatch.replay.rerun import rerun
from gradwatch.train.loop import train

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / ".github" / "pictures"
WIDTH = 100
RUNS = Path("runs")
"""Folder of the runs, relative as in the commands of the README, so that the pictures show such paths."""


SHOWN_RUNS = ("quickstart.yaml", "clinic/vanishing-gradient.yaml", "clinic/dead-relu.yaml", "clinic/no-gradient.yaml")
"""Configs of the runs in the picture of TensorBoard."""
SHOWN_TAG = "gradients/by_layer_and_step"
COUNT_PICTURES = "return [...document.images].filter(image => image.naturalWidth > 99).length"
LOADING_S = 120.0
"""Seconds until TensorBoard must show the pictures of its runs."""


def run(config: str) -> History:
    """Train a config and return what was recorded."""
    overrides = [f"run.out={RUNS}", "sinks.terminal.enabled=false", "sinks.tensorboard.enabled=false"]
    return train(load_config(Path("configs") / config, overrides)).history


def recorder() -> Console:
    """Return a console that only remembers."""
    return Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")


def upto(history: History, step: int) -> History:
    """Return a run as it was at an earlier step, with what had been found by then."""
    earlier = redetect(history, ())
    earlier.truncate(step)
    for finding in history.findings:
        if finding.step <= step:
            earlier.report(finding)
    return earlier


def draw_live(history: History, *, step: int) -> None:
    """Draw the live view as it was at a step of a run."""
    earlier = upto(history, step)
    console = recorder()
    console.print(panel(earlier, matrices(earlier.info.layers), width=WIDTH, signs=UNICODE))
    console.save_svg(str(PICTURES / "live.svg"), title="gradwatch train configs/clinic/vanishing-gradient.yaml")


def draw_replay() -> None:
    """Draw the replay of the step at which a loss became NaN."""
    directory = RUNS / run("clinic/non-finite.yaml").info.name
    done = rerun(directory)
    located = locate_in_run(directory, done.step)
    console = recorder()
    print_rerun(console, done)
    console.print()
    print_located(console, located.located, step=located.step, since=located.since)
    console.save_svg(str(PICTURES / "replay.svg"), title="gradwatch replay")


def draw_summary(history: History, name: str, *, title: str) -> None:
    """Draw the summary of a run."""
    console = recorder()
    print_summary(console, history, diagnose(history), run_dir=RUNS / history.info.name)
    console.save_svg(str(PICTURES / f"{name}.svg"), title=title)


@contextlib.contextmanager
def browser_of(width: int, height: int) -> Iterator[WebDriver]:
    """Start a headless chromium with a window of some size."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver") or "")
    with webdriver.Chrome(options=options, service=service) as browser:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield browser


def photograph_report(history: History) -> None:
    """Photograph the report of a run: its findings on the left, its layers on the right."""
    from selenium.webdriver.common.action_chains import ActionChains

    width, height = 1000, 1300
    with tempfile.TemporaryDirectory() as folder, browser_of(width, height) as browser:
        path = Path(folder) / "report.html"
        write_report(path, history, diagnose(history))
        browser.get(path.as_uri())
        left = browser.get_screenshot_as_png()
        browser.execute_script("document.getElementById('layers').scrollIntoView()")
        plot = browser.find_element("css selector", "#map .u-over")
        ActionChains(browser).move_to_element_with_offset(plot, 60, -40).perform()
        right = browser.get_screenshot_as_png()
    both = Image.new("RGB", (2 * width + 2, height), (208, 215, 222))
    for i, side in enumerate((left, right)):
        both.paste(Image.open(io.BytesIO(side)).convert("RGB"), (i * (width + 2), 0))
    both.save(PICTURES / "report.webp", quality=82, method=6)


@contextlib.contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """Start TensorBoard on a folder at a free port, and yield its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", "--load_fast", "false"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
        finally:
            process.terminate()


def photograph_tensorboard() -> None:
    """Photograph the pictures of gradients by layer and step of four runs in TensorBoard."""
    logdir = Path("shown")
    for config in SHOWN_RUNS:
        overrides = [f"run.out={logdir}", "sinks.terminal.enabled=false", "sinks.html.enabled=false"]
        directory = train(load_config(Path("configs") / config, overrides)).directory
        directory.rename(logdir / Path(config).stem)
    with tensorboard(logdir) as address, browser_of(1400, 875) as browser:

        def has_read_all() -> bool:
            with urllib.request.urlopen(f"{address}data/plugin/images/tags") as answer:
                return sum(SHOWN_TAG in tags for tags in json.load(answer).values()) == len(SHOWN_RUNS)

        wait_until(has_read_all)  # before the page asks, which asks once
        browser.get(f"{address}?tagFilter={urllib.parse.quote(SHOWN_TAG, safe='')}#timeseries")
        wait_until(lambda: browser.execute_script(COUNT_PICTURES) >= len(SHOWN_RUNS))
        browser.save_screenshot(str(PICTURES / "tensorboard.png"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + LOADING_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"TensorBoard has not shown the pictures of {len(SHOWN_RUNS)} runs")
        time.sleep(0.5)


def main() -> None:
    """Draw the live view, the report, a diagnosis and TensorBoard of ill runs, and the summary of a healthy one."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(ROOT / "configs", "configs")
        healthy = run("quickstart.yaml")
        draw_summary(healthy, "summary", title="gradwatch train configs/quickstart.yaml")
        ill = run("clinic/dead-relu.yaml")
        draw_summary(ill, "diagnose", title=f"gradwatch diagnose {RUNS / ill.info.name}")
        draw_replay()
        vanishing = run("clinic/vanishing-gradient.yaml")
        draw_live(vanishing, step=40)
        photograph_report(vanishing)
        photograph_tensorboard()


if __name__ == "__main__":
    main()
