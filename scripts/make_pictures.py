"""Draw the pictures of the README from real runs: `python scripts/make_pictures.py`, into .github/pictures/.

The terminal pictures are exported by rich as SVG. The one of TensorBoard is taken by hand, with a headless browser.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from rich.console import Console

from gradwatch.config.load import load_config
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.store import History
from gradwatch.render.terminal import print_diagnosis, print_summary
from gradwatch.train.loop import train

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / ".github" / "pictures"


def run(config: str, out: Path) -> History:
    """Train a config and return what was recorded."""
    overrides = [f"run.out={out}", "sinks.terminal.enabled=false", "sinks.tensorboard.enabled=false"]
    return train(load_config(ROOT / "configs" / config, overrides)).history


def recorder() -> Console:
    """Return a console that only remembers."""
    return Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")


def main() -> None:
    """Draw the diagnosis of an ill run and the summary of a healthy one."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        ill, healthy = run("clinic/dead-relu.yaml", out), run("quickstart.yaml", out)
    console = recorder()
    print_diagnosis(console, ill, diagnose(ill))
    console.save_svg(str(PICTURES / "diagnose.svg"), title=f"gradwatch diagnose runs/{ill.info.name}")
    console = recorder()
    print_summary(console, healthy, diagnose(healthy), run_dir=Path("runs") / healthy.info.name)
    console.save_svg(str(PICTURES / "summary.svg"), title="gradwatch train configs/quickstart.yaml")


if __name__ == "__main__":
    main()
