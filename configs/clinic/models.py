"""A model with a part that nothing reaches, and the same model whole."""

import torch
from torch import Tensor, nn


class TwoPaths(nn.Module):
    """Reads (N, 1, 8, 8) images through two encoders and classifies both codes together.

    Args:
        detached: Cut the second code from the graph, as a leftover `.detach()` does.
    """

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.rows = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.columns = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, 10)."""
        columns = self.columns(images.transpose(-1, -2))
        if self.detached:
            columns = columns.detach()
        return self.head(torch.cat([self.rows(images), columns], dim=-1))
