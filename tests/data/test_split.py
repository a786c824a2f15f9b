"""Which samples are held out: all kept apart, in proportion, a pure function of what goes in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.data._split import random_split, stratified_split

fractions = st.floats(0, 0.99)


@given(size=st.integers(1, 300), val_fraction=fractions, seed=st.integers(0, 1000))
def test_random_split_puts_every_sample_into_one_part(size, val_fraction, seed):
    train, val = random_split(size, val_fraction=val_fraction, seed=seed)

    assert sorted([*train, *val]) == list(range(size))
    assert len(train) >= 1, "something is left to learn from"
    assert abs(len(val) - size * val_fraction) <= 1


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=200), val_fraction=fractions, seed=st.integers(0, 1000))
def test_stratified_split_leaves_each_label_in_the_training_part(labels, val_fraction, seed):
    labels = np.array(labels)
    train, val = stratified_split(labels, val_fraction=val_fraction, seed=seed)

    assert sorted([*train, *val]) == list(range(len(labels)))
    assert set(labels[train]) == set(labels)
    for label in set(labels):
        assert abs((labels[val] == label).sum() - (labels == label).sum() * val_fraction) <= 1
