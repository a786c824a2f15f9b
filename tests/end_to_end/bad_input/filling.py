"""A user's own module that fills the disk."""

import resource
from pathlib import Path

from torch import nn


class Filling(nn.Module):
    """From its eighth call on, no file can grow far beyond the size that some file of the run has."""

    def __init__(self, like, room=100):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.like, self.room = like, room
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        if self.calls == 8:
            size = max(path.stat().st_size for path in Path("runs").rglob(self.like))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + self.room, resource.RLIM_INFINITY))
        return self.head(images.flatten(1))
