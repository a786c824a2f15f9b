"""Register small training steps, with the stage and the line of the mistake if they have one."""

import linecache
from dataclasses import dataclass

import torch
from torch import nn

MARK = "# planted"


@dataclass(frozen=True)
class Case:
    """A training step: `build` returns the step, its batch, the model and the optimizer."""

    name: str
    build: object
    stage: str = ""
    kind: str = ""

    def marked(self):
        """Return the marked lines of the function that builds the step."""
        code = self.build.__code__
        lines = range(code.co_firstlineno, code.co_firstlineno + 60)
        found = []
        for line in lines:
            text = linecache.getline(code.co_filename, line)
            if line > code.co_firstlineno and text.startswith("@"):
                break
            if MARK in text:
                found.append(line)
        return found


CASES = []


def right(build):
    """Register a step without a mistake."""
    CASES.append(Case(build.__name__, build))
    return build


def wrong(stage, kind):
    """Register a step with a mistake."""

    def register(build):
        CASES.append(Case(build.__name__, build, stage, kind))
        return build

    return register


def net(*, dtype=torch.float32):
    """Return a small network."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(size=8):
    """Return inputs and labels."""
    return torch.randn(size, 4), torch.randint(0, 3, (size,))
