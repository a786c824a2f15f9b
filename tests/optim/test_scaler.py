"""A watched step under a GradScaler unscales and skips as torch's fused step does, and tells unscaled statistics."""

import math

import pytest
import torch

from gradwatch import optim
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.gradients.statistics import GradientProbe

pytestmark = pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
LOSSES = [1.0, 1e-3, float("inf"), 5.0, float("nan"), 2.0]


def train(name, package, *, clips, dtype=torch.float32, watched=True):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).to(dtype)
    params = list(model.parameters())
    options = {"fused": True} if package is torch.optim else {}
    optimizer = getattr(package, name)(params, lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    rows, norms = [], []
    for factor in LOSSES:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 5, dtype=dtype)).square().sum() * factor).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        if package is optim and watched:
            row_SL = torch.full((8, len(params)), -7.0)
            optimizer.watch({p: i for i, p in enumerate(params)})
            optimizer.gradients_SL, optimizer.changes_2L = row_SL[:6], row_SL[6:]
            rows.append(row_SL)
            norms.append(GradientProbe(params).read(inverse_scale=1.0 if clips else 1 / scaler.get_scale()))
        scaler.step(optimizer)
        scaler.update()
    return params, scaler.get_scale(), rows, norms


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_it_trains_as_torch_does(name, clips):
    theirs, their_scale, _, _ = train(name, torch.optim, clips=clips)
    ours, our_scale, rows, norms = train(name, optim, clips=clips)

    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a.grad, b.grad, msg="the step leaves gradients unscaled", equal_nan=True)
    assert our_scale == their_scale < 1024, "two of the losses had no finite gradient"
    for row_SL, expected_SL, factor in zip(rows, norms, LOSSES, strict=True):
        torch.testing.assert_close(row_SL[:6], expected_SL, rtol=1e-5, atol=1e-6, equal_nan=True)
        is_skipped = bool((row_SL[6:] == -7).all())
        assert is_skipped == (not math.isfinite(factor)), "a skipped step changes nothing"


def test_where_torch_has_to_step_the_scale_is_taken_off_all_the_same():
    theirs, _, _, _ = train("AdamW", torch.optim, clips=False, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="parameter 0 is float64"):
        ours, _, rows, norms = train("AdamW", optim, clips=False, dtype=torch.float64)

    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b)
    for row_SL, expected_SL in zip(rows, norms, strict=True):
        torch.testing.assert_close(row_SL[:6], expected_SL, rtol=1e-5, atol=1e-6, equal_nan=True)
