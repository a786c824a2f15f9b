"""Make the baselines of a map: zeros, the average, and a blurred or random sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from gradwatch.attribution.score import Score

SMALLEST_BLURRED = 4
"""Height and width in pixels from which an image can be blurred."""


def baselines(score: Score, data: Tensor | None) -> dict[str, Tensor]:
    """Return the baselines of a sample by name, the one that the map is measured from first.

    Args:
        score: The score, with its sample.
        data: Other samples, shape (B, ...), for the mean and the range of the features; or None.

    Returns:
        With data, `mean` comes first: it is the best guess at an unknown sample. Without data, `zeros` comes first.
    """
    point = score.point
    zeros = torch.zeros_like(point)
    if score.embedding is not None:
        weight = next(score.embedding.parameters()).detach()
        mean = weight.mean(0).expand_as(point).clone()
        tokens = torch.randint(0, len(weight), point.shape[1:2], device=weight.device)
        return {"zeros": zeros, "mean": mean, "random tokens": weight[tokens].unsqueeze(0)}
    if data is not None:
        data = data.to(point)
        mean = data.mean(0, keepdim=True)
    else:  # of each channel of an image, or of all values
        mean = point.mean((2, 3), keepdim=True) if score.kind == "image" else point.mean()
        mean = mean.expand_as(point).clone()
    if score.kind == "image" and min(point.shape[2:]) >= SMALLEST_BLURRED:
        radius = min(point.shape[2:]) // 4
        third = {"blurred": gaussian_blur(point, [2 * radius + 1] * 2, [float(radius)] * 2)}
    else:
        low, high = (data.amin(0), data.amax(0)) if data is not None else (point.min(), point.max())
        third = {"uniform noise": low + (high - low) * torch.rand_like(point)}
    first = {"mean": mean, "zeros": zeros} if data is not None else {"zeros": zeros, "mean": mean}
    return first | third
