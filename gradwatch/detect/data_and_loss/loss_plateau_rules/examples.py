"""Make runs with a loss that stands still, as examples for `loss_plateau`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gradwatch.detect import Example
from gradwatch.events import (
    ADVERSARY,
    BROADCAST,
    CHANCE,
    CHOSEN_OUTPUTS,
    EMBEDDING_PRODUCT,
    OUTPUTS_AVERAGED,
    PADDING_ATTENDED,
    POLICY,
    POOLED,
    SEQUENCE_AXIS,
    TARGETS_AHEAD,
    TARGETS_SHARED,
    TARGETS_UNREACHABLE,
    WEIGHTS_TRAINED,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.dynamics import ADAM_STEP


def make_proofs() -> Iterator[Example]:
    """Yield runs in which events prove that the loss compares the wrong numbers, and a near miss."""
    text = "prediction and target of shapes (16, 1) and (16,) make 16 x 16 differences"
    broadcast = Synthetic(steps=20).add_event(BROADCAST, layer="layers.11", text=text)
    yield Example("targets are broadcast against predictions", broadcast.history(), ("layers.11",))
    along = Synthetic(steps=20).add_event(SEQUENCE_AXIS, layer="layers.3", text="it mixes the samples of a batch")
    yield Example("a recurrent layer runs along the batch dimension", along.history(), ("layers.3",))
    ahead = Synthetic(steps=20).add_event(TARGETS_AHEAD, text="each label is the input token 2 positions later")
    yield Example("labels that are shifted twice", ahead.history(), (None,))
    shown = Synthetic(steps=20).add_event(PADDING_ATTENDED, layer="layers.3", text="its mask shows the padding")
    yield Example("an attention mask shows the padding only", shown.history(), ("layers.3",))
    pooled = Synthetic(steps=20).add_event(POOLED, text="a single prediction is compared with 32 targets")
    yield Example("a model pools all graphs of a batch into one", pooled.history(), (None,))
    mean = Synthetic(steps=40).add_event(OUTPUTS_AVERAGED, step=30, text="the gradient is the same for all outputs")
    yield Example("the error is averaged before it is squared", mean.history(), (None,))
    one = Synthetic(steps=40).add_event(TARGETS_SHARED, step=30, text="all samples have the same target")
    yield Example("all samples of a batch get the target of the first", one.history(), (None,))
    beyond = {"share": 0.5, "target": -1.7}
    bounded = Synthetic(steps=20).add_event(TARGETS_UNREACHABLE, values=beyond, text="the output is a ReLU")
    yield Example("a ReLU cannot give negative targets", bounded.history(), (None,))
    noise = {"share": 0.03, "target": -0.1}
    near = Synthetic(steps=20).add_event(TARGETS_UNREACHABLE, values=noise, text="the output is a ReLU")
    yield Example("some targets are a little out of range", near.history())


def make_flat(*, fall: float = 0.0, was_trained: bool = False, guesses: bool = False) -> Synthetic:
    """Return a run in which the loss stands still, falls by a fraction in 160 steps, or falls to guessing at once."""
    made = Synthetic(steps=200)
    made.loss_T = 2.3 * (1 - fall * made.t_T / 160) * np.exp(0.03 * made.rng.standard_normal(made.steps))
    if guesses:
        made.loss_T[20:] *= 1.8 / 2.3
        made.add_event(CHANCE, values={"nat": 1.0, "classes": 6.0})
    return made.add_event(WEIGHTS_TRAINED, values={"changes": 300}) if was_trained else made


def make_unjudged() -> Iterator[Example]:
    """Yield flat runs whose loss may stand still while the model learns, for information."""
    trained = make_flat(was_trained=True).history()
    yield Example("the model was trained before: for information", trained, (None,))
    yield Example("a critic keeps up: for information", make_flat().add_event(ADVERSARY).history(), (None,))
    actions = make_flat().add_event(POLICY).policy_gradient(divergence=0.02, clipped=0.1)
    yield Example("advantages of actions: for information", actions.history(), (None,))
    yield Example("values of actions: for information", make_flat().add_event(CHOSEN_OUTPUTS).history(), (None,))


def make_climbing(*, until: int) -> History:
    """Return a run in which the loss climbs at each step, with noise, and from one step on is half of the first."""
    made = make_flat()
    made.loss_T *= np.where(made.t_T < until, 1 + 0.05 * made.t_T, 0.5)
    return made.history()


def make_decayed(*, fall: float = 0.0) -> Synthetic:
    """Return a run in which all weights shrink a thousandfold in 100 steps, and the loss falls by a fraction."""
    made = make_flat(fall=fall)
    made.weight_l2_TL *= 10 ** (-3 * np.minimum(made.t_T / 100, 1.0))[:, None]
    made.update_factor_TL *= 100  # most of an update is across the weights, as of a gradient
    return made


def make_contracting(*, inward: float = 1.0, learned: float = 0.1, until: int | None = None) -> History:
    """Return a run in which the weights shrink by 1 % per step, and some of the loss is learned in 20 steps.

    Args:
        inward: Fall of the norms over the length of the updates.
        learned: Part of the first loss that is learned.
        until: Number of steps; None for 200.
    """
    made = make_flat()
    made.loss_T *= 1 - learned * np.minimum(made.t_T / 20, 1.0)
    made.weight_l2_TL *= 0.99 ** made.t_T[:, None]
    length_TL = 0.01 / inward * made.weight_l2_TL
    made.update_factor_TL = length_TL / (made.lr_T[:, None] * made.width * ADAM_STEP)
    return made.history(until)


def make_shrinking() -> Iterator[Example]:
    """Yield runs in which a decay outweighs the gradient, and near misses."""
    yield Example("all weights decay to nothing, and the loss stays", make_decayed().history(), (None,))
    yield Example("all weights decay, but the model normalizes and learns", make_decayed(fall=0.2).history())
    yield Example("each update shrinks the weights by 1 %, and does nothing else", make_contracting(), (None,))
    yield Example("the weights shrink as much, on a path of ten times that length", make_contracting(inward=0.1))
    yield Example("only weight decay is left, in a model that has learned", make_contracting(learned=0.7))
    yield Example("the loop makes the weights smaller after each update", make_contracting(inward=10.0))


def make_constant(*kinds: EventKind, unread: float = 0.0) -> History:
    """Return a run in which the loss halves at once and then stands, with events about its predictions."""
    made = make_flat()
    made.loss_T[20:] *= 0.5
    made.info = replace(made.info, layers=tuple(replace(i, module_type="Embedding") for i in made.info.layers))
    made.zero_frac_TL[:] = unread
    for kind in kinds:
        made.add_event(kind, step=100)
    return made.history()


def make_product() -> History:
    """Return a flat run in which only two multiplied embeddings grow."""
    made = make_flat().add_event(EMBEDDING_PRODUCT, values={"first": 0.0, "second": 1.0, "dimension": 16.0})
    tables = (replace(layer, module_type="Embedding") for layer in made.info.layers[:2])
    made.info = replace(made.info, layers=(*tables, *made.info.layers[2:]))
    made.weight_l2_TL[:, :2] *= 1 + 0.002 * made.t_T[:, None]
    return made.history()


def make_collapsed(*, spread: float, equal_batches: bool = False) -> History:
    """Return a run in which the loss falls a little, and then differs from batch to batch by a fraction only."""
    made = Synthetic(steps=120)
    noise_T = np.where(made.t_T < 40, 0.05, spread) * made.rng.standard_normal(made.steps)
    made.loss_T = 0.5 * (1 + 0.1 * np.exp(-made.t_T / 10)) * np.exp(noise_T)
    if equal_batches:
        made.batch_hash_T[:] = 7.0
    return made.history()
