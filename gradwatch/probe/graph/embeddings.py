"""Find embedding tables that act as a weight matrix, or whose rows the loss pulls to fixed values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from torch import Tensor

from gradwatch.events import CODEBOOK, EMBEDDING_PRODUCT, TIED_EMBEDDING, Observation
from gradwatch.probe.graph.graph import LAYOUT, Graph, Node, is_leaf, operation, shape
from gradwatch.probe.graph.singularities import squared
from gradwatch.records import LayerInfo

PRODUCTS = frozenset({"Mul", "Bmm", "Mm", "Baddbmm", "Dot"})
LOOKUPS = frozenset({"Embedding", "Gather", "Index", "IndexSelect"})
MATRIX_PRODUCTS = frozenset({"Addmm", "Mm", "Linear"})

NORMS = frozenset(
    {"NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "FusedRmsNorm"}
)

DISTANCES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "Sub", "Rsub")
"""Operations that compare two values; in a codebook loss one of them is a constant."""


def find_embedding_uses(
    graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]
) -> Iterator[Observation]:
    """Yield summed products of two embeddings, embeddings that are also output layers, and codebooks.

    Args:
        graph: Autograd graph of a loss.
        index: Index of each parameter of the model.
        layers: The parameters, in that order.
    """
    tables = _Tables(graph, index, layers)
    summed = {child for node in graph.of("Sum") for child in _factors(graph, node)}
    # an elementwise product is a dot product only if a sum follows; the others sum themselves
    for node in graph.of(*PRODUCTS):
        if operation(node) != "Mul" or node in summed:
            yield from tables.find_product(node)
    for node in graph.of(*MATRIX_PRODUCTS):
        yield from tables.find_tied(node)
    for node in graph.of("Sub"):
        yield from tables.find_interactions(node)
    for node in graph.of(*DISTANCES):
        yield from tables.find_codebook(node)


@final
class _Tables:
    """The tables that a graph looks rows up in. Arguments as for `find_embedding_uses`."""

    def __init__(self, graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> None:
        self._graph, self._index, self._layers = graph, index, layers
        self._looked_up = {graph.through(graph.first(node)) for node in graph.of("Embedding")}

    def find_product(self, node: Node) -> Iterator[Observation]:
        """Yield a product of rows of two tables."""
        tables = [self._table(child) for child in self._graph.inputs(node)]
        if len(tables) != 2 or tables[0] is None or tables[1] is None or tables[0] == tables[1]:
            return
        one, other = (self._layers[table] for table in tables if table is not None)
        width = one.shape[-1]
        values = {"first": tables[0], "second": tables[1], "dimension": width}
        rows = f"rows of {one.name} and {other.name}"
        yield EMBEDDING_PRODUCT.observe(one.module or one.name, values=values, rows=rows, width=width)

    def find_interactions(self, node: Node) -> Iterator[Observation]:
        """Yield the products of all pairs of rows of a sample: the square of a sum minus the sum of squares.

        A factorization machine computes its pairs in this way (Rendle 2010, https://doi.org/10.1109/ICDM.2010.127,
        eq. 5). The default embeddings, with a deviation of 1, are far too large for it.
        """
        sums = [self._graph.through(child) for child in self._graph.inputs(node)]
        if len(sums) != 2 or (whole := self._graph.through(squared(self._graph, sums[0]))) is None:
            return
        # `whole` is the sum over the rows; below it are the rows, of shape (..., fields, width)
        rows = self._graph.through(self._graph.first(whole)) if operation(whole) == "Sum" else None
        table = self._table(rows) if rows is not None else None
        if rows is None or table is None or len(shape(rows)) < 3 or not self._is_sum_of_squares(sums[1], rows):
            return
        fields, width = shape(rows)[-2:]
        pairs = fields * (fields - 1) // 2
        name = self._layers[table].name
        values = {"first": table, "second": table, "dimension": pairs * width}
        products = f"all {pairs} pairs of rows of {name} in a sample"
        layer = self._layers[table].module or name
        yield EMBEDDING_PRODUCT.observe(layer, values=values, rows=products, width=width)

    def find_tied(self, node: Node) -> Iterator[Observation]:
        """Yield a table with rows that are also the weights of an output layer, if nothing scales the layer's input."""
        graph = self._graph
        # both nodes end in their two factors, but a Linear has the bias after them
        values, matrix = (*graph.edges(node)[-3:], None)[:2] if operation(node) == "Linear" else graph.edges(node)[-2:]
        leaf, made_by = graph.through(matrix), graph.through(values)
        is_scaled = made_by is not None and operation(made_by) in ("Mul", "Div") and len(graph.inputs(made_by)) == 1
        if leaf is None or leaf not in self._looked_up or is_scaled or not is_leaf(leaf):
            return
        if (weight := self._index.get(leaf.variable)) is None:
            return
        layer = self._layers[weight]
        if len(layer.shape) != 2:  # a table that is a part of a larger parameter
            return
        rows, width = layer.shape
        is_normalised = made_by is not None and operation(made_by) in NORMS
        numbers = {"weight": weight, "dimension": width, "classes": rows, "normalised": is_normalised}
        yield TIED_EMBEDDING.observe(layer.module or layer.name, values=numbers, table=layer.name)

    def find_codebook(self, node: Node) -> Iterator[Observation]:
        """Yield a table with looked-up rows that the loss compares with a constant.

        The model chooses these rows; a row that is not chosen has no gradient.
        """
        inputs = self._graph.inputs(node)
        # a constant has no node, so a comparison with one has a single input
        while len(inputs) == 1 and operation(inputs[0]) in LAYOUT - LOOKUPS:
            inputs = self._graph.inputs(inputs[0])
        if len(inputs) != 1 or operation(inputs[0]) not in LOOKUPS:
            return
        leaf = self._graph.through(self._graph.first(inputs[0]))
        if leaf is not None and is_leaf(leaf) and leaf.variable in self._index and leaf.variable.ndim == 2:
            name = self._layers[self._index[leaf.variable]].name
            yield CODEBOOK.observe(name, table=name)

    def _table(self, node: Node) -> int | None:
        """Return the index of the table that holds some values as rows: an embedding, or an indexed parameter."""
        made_by = self._graph.through(node)
        if made_by is not None and operation(made_by) == "Embedding":
            made_by = self._graph.through(self._graph.first(made_by))  # from the lookup to its table
        if made_by is None or not is_leaf(made_by) or (index := self._index.get(made_by.variable)) is None:
            return None
        layer = self._layers[index]
        # other matrices are tables only if they are indexed
        is_table = "Embedding" in layer.module_type or self._is_indexed(node)
        return index if is_table and len(layer.shape) == 2 else None

    def _is_indexed(self, node: Node) -> bool:
        while operation(node) not in LOOKUPS and operation(node) in LAYOUT and self._graph.inputs(node):
            node = self._graph.inputs(node)[0]
        return operation(node) in LOOKUPS

    def _is_sum_of_squares(self, node: Node | None, rows: Node) -> bool:
        if node is None or operation(node) != "Sum":
            return False
        return self._graph.through(squared(self._graph, self._graph.through(self._graph.first(node)))) is rows


def _factors(graph: Graph, node: Node) -> list[Node]:
    return [made_by for child in graph.inputs(node) if (made_by := graph.through(child)) is not None]
