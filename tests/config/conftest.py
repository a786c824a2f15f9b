"""A small package instead of gradwatch's own plugins, and a config that fits it."""

import itertools
import pkgutil
from pathlib import Path

import pytest

from gradwatch.config.names import registry
from gradwatch.config.names.sources import load_module

FILES = {
    "models/mlp.py": '''
"""A model."""
from typing import Literal


def build(spec, *, depth: int = 2, width: int = 64, activation: Literal["relu", "tanh"] = "relu",
          shape: tuple[int, int] = (1, 2), note: str | None = None):
    """Return a fully connected network. It has a second sentence.

    Args:
        depth: Number of layers.
        width: Units of a layer,
            but for the last.
    """
''',
    "models/cnn.py": "def build(spec, *, channels: list[int] = [8]): ...\n",
    "models/_parts.py": "def build(): ...\n",
    "models/_torchvision.py": "def build(spec, *, name: str, **options): ...\n",
    "optimizers/adamw8bit.py": "def build(params, *, lr: float = 1e-3): ...\n",
    "data/digits.py": "def build(*, val_fraction: float = 0.2): ...\n",
    "data/csv.py": "def build(*, file: str, header: bool = True): ...\n",
    "data/_torchvision.py": "def build(*, name: str, root: str = 'data', val_split: str = '', **options): ...\n",
    "detect/dead_layer.py": '''
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class DeadLayer:
    """One layer is frozen while others learn.

    Args:
        decades: Gap, in powers of ten, at which to report.
    """

    code: ClassVar[str] = "GW103"
    kind: ClassVar[str] = "dead-layer"
    every: int = 10
    decades: float = 4.0
''',
    "render/terminal.py": '''
class Terminal:
    """Shows a run."""
    def __init__(self, *, console=None, every: int = 50): ...
    def write(self, history): ...
    def report(self, finding): ...
    def close(self, history, diagnoses): ...
''',
    "render/tensorboard.py": """
class Helper: ...
class TensorBoard:
    def __init__(self, *, directory, every: int = 10): ...
    def write(self, history): ...
    def report(self, finding): ...
    def close(self, history, diagnoses): ...
""",
}

CONFIG = """\
model: {name: mlp}
data: {name: digits}
optim: {name: adamw, lr: 1e-3}
train: {steps: 100}
"""


NUMBERS = itertools.count()


@pytest.fixture
def make_package(tmp_path, monkeypatch):
    """Return a function that makes a package of files, puts it on the Python path, and returns its folder."""

    def make(files):
        folder = tmp_path / f"package_{next(NUMBERS)}"  # never the same name: what was read is kept by name
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        for inner in {folder, *(path.parent for path in folder.rglob("*.py"))}:
            (inner / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        return folder

    return make


@pytest.fixture
def load_text(make_package):
    """Return a function that writes the text of a module and returns the module as griffe reads it."""
    return lambda text: load_module(f"{make_package({'module.py': text}).name}.module")


@pytest.fixture
def package(make_package, monkeypatch):
    """Let a package with few plugins stand for gradwatch, and return its folder."""
    folder = make_package(FILES)
    detector = pkgutil.resolve_name(f"{folder.name}.detect.dead_layer:DeadLayer")
    sinks = {
        "terminal": f"{folder.name}.render.terminal:Terminal",
        "tensorboard": f"{folder.name}.render.tensorboard:TensorBoard",
    }
    monkeypatch.setattr(registry, "PACKAGE", folder.name)
    monkeypatch.setattr(registry, "detector_classes", lambda: iter([detector]))
    monkeypatch.setattr(registry, "SINK_CLASSES", sinks)
    return folder


@pytest.fixture
def write(tmp_path, package):
    """Return a function that writes a config file and returns its path."""

    def write_config(text: str = CONFIG, name: str = "mlp.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_config
