"""A small package in the place of gradwatch's own plugins, and a config that fits it."""

from pathlib import Path

import pytest

from gradwatch.config import known

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
    "data/digits.py": "def build(*, val_fraction: float = 0.2): ...\n",
    "data/csv.py": "def build(*, file: str, header: bool = True): ...\n",
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
    "render/json.py": "class Encoder: ...\n",
}

CONFIG = """\
model: {name: mlp}
data: {name: digits}
optim: {name: adamw, lr: 1e-3}
train: {steps: 100}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put a package with few plugins in the place of gradwatch, and return its folder."""
    folder = tmp_path / "package"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(known, "PACKAGE", folder)
    return folder


@pytest.fixture
def write(tmp_path, package):
    """Return a function that writes a config file and returns its path."""

    def write_config(text: str = CONFIG, name: str = "mlp.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_config
