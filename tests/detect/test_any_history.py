"""No detector raises or warns, whatever the numbers of a run are."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detect import detectors
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import KINDS, LEFT_OUT, PER_PARAMETER, PER_SAMPLE
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.ingest import Ingest

ALL = detectors()
ODD = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-45, 3e38]
"""Values that a statistic may have in a run that has gone wrong."""


def ingested(made, *, groups=1, gap=1):
    """Return the history of a made-up run after all detectors, and the parts that raised or warned.

    A `gap` above 1 leaves steps out between the rows, as thinning does.
    """
    with np.errstate(all="ignore"):  # of the made-up data themselves
        like = made.history()
    history = History(like.info, groups=groups)
    history.events.extend(like.events)
    ingest = Ingest(history, detectors=ALL, warned={LEFT_OUT.name})
    steps_T, param_TSL = like.param.rows()
    _, run_TS1 = like.run.rows()
    act_steps_T, act_TSL = like.act.rows()
    act = dict(zip(act_steps_T.tolist(), act_TSL, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, step in enumerate(steps_T.tolist()):
            run = dict(zip(like.run.statistics, run_TS1[i, :, 0].tolist(), strict=True))
            ingest.ingest(history.row(gap * step, run=run, param_SL=param_TSL[i], act_SL=act.get(step)))
        ingest.end_sinks()
    made_up = len(like.events)  # which may be of the same kind
    return history, [event.text for event in history.events[made_up:] if event.kind == LEFT_OUT.name]


ARRAYS = [
    "loss_T",
    "val_loss_T",
    "val_accuracy_T",
    "lr_T",
    "loss_scale_T",
    "skipped_T",
    "batch_hash_T",
    "grad_l2_TL",
    "zero_frac_TL",
    "nonfinite_TL",
    "weight_l2_TL",
    "update_factor_TL",
    "dead_frac_TA",
    "saturated_frac_TA",
    "act_mean_TA",
    "act_std_TA",
    "silent_TA",
    "silent_since_TA",
]


@st.composite
def runs(draw):
    """Draw a healthy run, and overwrite parts of its arrays by odd values."""
    steps = draw(st.sampled_from([1, 2, 9, 60, 150]))
    made = Synthetic(
        steps=steps,
        layers=draw(st.sampled_from([1, 2, 12])),
        activations=draw(st.sampled_from([0, 1, 3])),
        noise=draw(st.sampled_from([0.0, 0.3])),
        optimizer=draw(st.sampled_from(["AdamW", "SGD"])),
        precision=draw(st.sampled_from(["fp32", "fp16"])),
    )
    for name in draw(st.lists(st.sampled_from(ARRAYS), max_size=6)):
        array = getattr(made, name)
        first = draw(st.integers(0, steps - 1))
        array[first : draw(st.sampled_from([None, first + 1, first + 20]))] = draw(st.sampled_from(ODD))
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=6)):
        kind, layer = KINDS[name], draw(st.sampled_from([None, "layers.0.weight", "acts.0", "elsewhere"]))
        numbers = {
            key: float(draw(st.sampled_from([1, 2, 5])))
            for key in kind.values
            if key not in (PER_PARAMETER, PER_SAMPLE)
        }
        if PER_PARAMETER in kind.values:  # of two parameters or more
            numbers = dict(zip(made.names(), range(made.layers), strict=True))
        if all(numbers.get(key, 0) < made.layers > 1 for key, unit in kind.values.items() if "index" in unit):
            made.add_event(kind, step=draw(st.integers(0, steps - 1)), layer=layer, values=numbers)
    return made


@settings(max_examples=25)
@given(made=runs(), gap=st.sampled_from([1, 8]))
def test_any_numbers_may_be_recorded(made, gap):
    history, problems = ingested(made, gap=gap)

    assert problems == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnose(history)


@pytest.mark.parametrize("gap", [2, 8, 64])
@pytest.mark.parametrize("level", [1.0, 0.5])
def test_a_thinned_run_is_read(gap, level):
    made = Synthetic(steps=150, layers=4, activations=2)
    made.loss_T[:] = made.loss_T[0] * level ** (made.t_T > 20)  # a plateau, from the first step on or after a fall

    assert ingested(made, gap=gap)[1] == []


@pytest.mark.parametrize("value", [*ODD, 1.0])
def test_a_run_of_one_number_is_read(value):
    made = Synthetic(steps=150, layers=4, activations=2)
    for name in ARRAYS:
        getattr(made, name)[:] = value

    assert ingested(made)[1] == []


@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize("layers", [0, 1])
def test_a_run_may_have_no_layers_and_no_optimizer(steps, layers):
    made = Synthetic(steps=steps, layers=layers)
    made.lr_T[:] = np.nan

    assert ingested(made, groups=0)[1] == []
