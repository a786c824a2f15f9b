"""Compute maps by Captum: saliency, SmoothGrad, integrated gradients, occlusion and Grad-CAM."""

# B = samples of a batch

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from gradwatch.attribution.package import require_captum
from gradwatch.attribution.score import BATCH, Score
from gradwatch.attribution.thresholds import Thresholds
from gradwatch.errors import GradwatchError

Method = Literal["saliency", "smoothgrad", "integrated", "occlusion", "gradcam"]
PATCHES = 8
"""Patches along each side of an image that occlusion replaces."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """A map of one sample.

    Args:
        values: The map as the method defines it, shape of the sample; saliency and SmoothGrad have no sign.
        contributions: The share of each input in the change of the score from the baseline, shape of the sample;
            None for Grad-CAM, whose values have no unit.
        evaluations: Steps of the integral or samples of SmoothGrad; 0 for other methods.
        standard_error: Mean standard error of SmoothGrad over its mean magnitude; nan for other methods.
    """

    values: Tensor
    contributions: Tensor | None
    evaluations: int = 0
    standard_error: float = math.nan


@final
class Mapper:
    """Computes maps of one score at any point.

    Args:
        score: The score.
        method: Method.
        limits: Tolerances, and the number of steps and samples.
        layer: Layer of Grad-CAM; by default the last convolution.
    """

    def __init__(self, score: Score, method: Method, *, limits: Thresholds, layer: nn.Module | None = None) -> None:
        require_captum()
        with warnings.catch_warnings():  # of Captum's dependencies
            warnings.simplefilter("ignore")
            self._captum: Any = importlib.import_module("captum.attr")
        self._score, self._limits = score, limits
        self.method = method
        self.is_signed = method in ("integrated", "occlusion", "gradcam")
        self._layer = (layer or _last_convolution(score)) if method == "gradcam" else None

    def __call__(self, point: Tensor, baseline: Tensor) -> Map:
        """Return the map of a point, measured from a baseline."""
        with warnings.catch_warnings():
            # Captum warns that it makes the inputs require gradients
            warnings.filterwarnings("ignore", category=UserWarning, module=r"captum\.")
            match self.method:
                case "saliency":
                    gradient = self._captum.Saliency(self._score).attribute(point, abs=False)
                    return Map(values=gradient.abs(), contributions=gradient * (point - baseline))
                case "smoothgrad":
                    return self._smoothgrad(point, baseline)
                case "integrated":
                    return self.integrated(point, baseline)
                case "occlusion":
                    return self._occlusion(point, baseline)
                case _:
                    return self._gradcam(point)

    def integrated(self, point: Tensor, baseline: Tensor) -> Map:
        """Return integrated gradients, with the number of steps doubled until the sum is the change of the score."""
        method = self._captum.IntegratedGradients(self._score)
        steps = self._limits.min_steps
        while True:
            values = method.attribute(point, baseline, n_steps=steps, internal_batch_size=BATCH).to(point.dtype)
            gap = relative_gap(self._score, values, point, baseline)
            if gap <= self._limits.gap or steps >= self._limits.max_steps:
                return Map(values=values, contributions=values, evaluations=steps)
            steps *= 2

    def _smoothgrad(self, point: Tensor, baseline: Tensor) -> Map:
        """Return the mean gradient under noise, with as many samples as its standard error requires."""
        tunnel = self._captum.NoiseTunnel(self._captum.Saliency(self._score))
        samples = self._limits.min_noise_samples
        common = {"stdevs": noise_of(point, self._limits), "abs": False, "nt_samples_batch_size": BATCH}
        while True:
            # the same noise for both, and for every point
            torch.manual_seed(0)
            gradient = tunnel.attribute(point, nt_type="smoothgrad", nt_samples=samples, **common)
            torch.manual_seed(0)
            variance = tunnel.attribute(point, nt_type="vargrad", nt_samples=samples, **common)
            size = float(gradient.abs().mean())
            error = float((variance / samples).clamp(min=0).sqrt().mean()) / size if size else 0.0
            if error <= self._limits.smoothgrad_error or samples >= self._limits.max_noise_samples:
                contributions = gradient * (point - baseline)
                return Map(
                    values=gradient.abs(), contributions=contributions, evaluations=samples, standard_error=error
                )
            samples *= 2

    def _occlusion(self, point: Tensor, baseline: Tensor) -> Map:
        """Return the drop of the score for each patch or value that the baseline replaces, spread over its elements."""
        mask = _patches(self._score)
        # Occlusion of Captum slides one window; patches that do not overlap share its code under another name
        method = self._captum.FeatureAblation(self._score)
        with torch.no_grad():
            values = method.attribute(point, baseline, feature_mask=mask, perturbations_per_eval=BATCH)
        sizes = mask.flatten().bincount()[mask]
        values = (values / sizes).to(point.dtype)
        return Map(values=values, contributions=values)

    def _gradcam(self, point: Tensor) -> Map:
        method = self._captum.LayerGradCam(self._score, self._layer)
        coarse = method.attribute(point, attr_dim_summation=True).detach()
        if coarse.ndim != 4:
            raise GradwatchError(
                f"layer: its output has shape {tuple(coarse.shape)}, expected that of a convolution (B, C, H, W)"
            )
        fine = nn.functional.interpolate(coarse, point.shape[2:], mode="bilinear", align_corners=False)
        # spread over the channels, so that their sum is the value of the pixel
        return Map(values=(fine / point.shape[1]).expand_as(point).clone(), contributions=None)


def relative_gap(score: Score, contributions: Tensor, point: Tensor, baseline: Tensor) -> float:
    """Return the distance of the sum of contributions from the change of the score.

    Returns:
        The difference over the sum of the contributions' magnitudes, or over the change if that is larger.
    """
    change = float(score.values(point) - score.values(baseline))
    total, size = float(contributions.double().sum()), float(contributions.double().abs().sum())
    scale = max(size, abs(change))
    return abs(total - change) / scale if scale else 0.0


def noise_of(point: Tensor, limits: Thresholds) -> float:
    """Return the standard deviation of small noise: a fraction of the range of the sample."""
    spread = float(point.max() - point.min())
    return limits.noise_frac * (spread or float(point.abs().max()) or 1.0)


def _last_convolution(score: Score) -> nn.Module:
    found = [m for m in score.model.modules() if isinstance(m, nn.Conv2d)] if score.kind == "image" else []
    if not found:
        raise GradwatchError(
            "method: gradcam needs a model with a Conv2d and images of shape (1, C, H, W); take integrated, saliency, "
            "smoothgrad or occlusion"
        )
    return found[-1]


def _patches(score: Score) -> Tensor:
    """Return the number of the patch, value or token of each input, in the shape of the sample."""
    shape = score.point.shape
    device = score.point.device
    if score.kind == "image":
        rows, columns = (torch.arange(n, device=device) * min(PATCHES, n) // n for n in shape[2:])
        numbers = rows[:, None] * min(PATCHES, shape[3]) + columns
        return numbers.expand(shape).contiguous()
    if score.kind == "tokens":
        return torch.arange(shape[1], device=device)[None, :, None].expand(shape).contiguous()
    return torch.arange(score.point.numel(), device=device).view(shape)
