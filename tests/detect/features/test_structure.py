"""Which tensors are compared follows from their names and shapes alone."""

import dataclasses

import numpy as np
import pytest
import torch

from gradwatch.detect.features.depth_profile import module_levels
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.probe.parameters import list_parameters
from gradwatch.records import LayerInfo


@pytest.fixture
def history() -> History:
    rows = (
        ("embed.weight", "Embedding", (50, 8), True),
        ("a.weight", "Linear", (4, 8), True),
        ("a.bias", "Linear", (4,), True),
        ("norm.weight", "LayerNorm", (4,), True),
        ("frozen.weight", "Linear", (4, 4), False),
        ("b.weight", "Linear", (2, 4), True),
        ("b.bias", "Linear", (2,), True),
    )
    layers = tuple(
        LayerInfo(
            name=name,
            module=name.rpartition(".")[0],
            module_type=module_type,
            shape=shape,
            dtype="float32",
            trainable=trainable,
            group=0 if name != "norm.weight" else None,
        )
        for name, module_type, shape, trainable in rows
    )
    return History(dataclasses.replace(Synthetic(layers=1, steps=1).info, layers=layers))


def test_weight_matrices_are_those_whose_gradient_is_full_at_every_step(history):
    assert structure_of(history).matrices.indices_M.tolist() == [1, 5], "no embedding, no norm, nothing frozen"


def test_a_module_with_a_weight_brings_its_bias(history):
    structure = structure_of(history)

    assert structure.chain.indices_K.tolist() == [1, 2, 5, 6]
    assert structure.chain.starts_D.tolist() == [0, 2]
    assert structure.chain.output_bias == 6


def test_sizes_are_per_element_and_levels_those_of_the_larger_tensor(history):
    l2_L = np.array([1.0, np.sqrt(32) * 0.01, 2 * 0.1, 1, 1, np.sqrt(8) * 10, 0])

    np.testing.assert_allclose(matrix_rms(history, l2_L), [0.01, 10], rtol=1e-6)
    np.testing.assert_allclose(module_levels(history, l2_L), [-1, 1], rtol=1e-6)


def test_what_no_optimizer_holds_and_what_stands_for_units_is_known(history):
    structure = structure_of(history)

    assert structure.unowned == (3,)
    assert np.flatnonzero(structure.is_per_unit_L).tolist() == [2, 3, 6]
    assert structure.num_trainable == 6


def test_it_is_worked_out_once_per_history(history):
    assert structure_of(history) is structure_of(history)


def test_a_model_without_weight_matrices_has_no_depth():
    made = Synthetic(layers=1, steps=1)
    made.info = dataclasses.replace(made.info, layers=(dataclasses.replace(made.info.layers[0], shape=(4,)),))
    structure = structure_of(made.history())

    assert len(structure.matrices.indices_M) == 0
    assert structure.chain.output_bias is None


def test_a_recurrent_module_counts_by_its_layers():
    model = torch.nn.Sequential(torch.nn.GRU(3, 4, num_layers=3, bidirectional=True), torch.nn.Linear(8, 2))
    structure = structure_of(
        History(dataclasses.replace(Synthetic(layers=1, steps=1).info, layers=list_parameters(model)[1]))
    )

    assert structure.chain.starts_D.tolist() == [0, 8, 16, 24], (
        "eight tensors each: two weights and two biases per direction"
    )
