"""Embeddings on the tape that do the work of a weight matrix: multiplied with each other, or tied to the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from torch import Tensor

from gradwatch.probe.graph.graph import LAYOUT, Graph, Node, is_leaf, operation, shape
from gradwatch.probe.graph.singularities import squared
from gradwatch.records import LayerInfo

PRODUCTS = frozenset({"Mul", "Bmm", "Mm", "Baddbmm", "Dot"})
LOOKUPS = frozenset({"Embedding", "Gather", "Index", "IndexSelect"})
MATRIX_PRODUCTS = frozenset({"Addmm", "Mm", "Linear"})

NORMS = frozenset({"NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "FusedRmsNorm"})

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


def facts(graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the products of two embeddings that are summed up, and the embeddings that are output layers too.

    Args:
        graph: The tape.
        index: Place of each parameter in the model.
        layers: What the parameters are, in that order.
    """
    tables = _Tables(graph, index, layers)
    summed = {child for node in graph.of("Sum") for child in _factors(graph, node)}
    for node in graph.of(*PRODUCTS):
        if operation(node) != "Mul" or node in summed:
            yield from tables.product(node)
    for node in graph.of(*MATRIX_PRODUCTS):
        yield from tables.tied(node)
    for node in graph.of("Sub"):
        yield from tables.interactions(node)


@final
class _Tables:
    """The tables of a graph that rows are looked up in. Arguments as for `facts`."""

    def __init__(self, graph: Graph, index: Mapping[Tensor, int], layers: Sequence[LayerInfo]) -> None:
        self._graph, self._index, self._layers = graph, index, layers
        self._looked_up = {graph.through(graph.first(node)) for node in graph.of("Embedding")}

    def product(self, node: Node) -> Iterator[Fact]:
        """Yield a product of rows of two tables."""
        places = [self._table(child) for child in self._graph.inputs(node)]
        if len(places) != 2 or places[0] is None or places[1] is None or places[0] == places[1]:
            return
        one, other = (self._layers[place] for place in places if place is not None)
        text = f"rows of {one.name} and {other.name} are multiplied and summed over {one.shape[-1]} dimensions"
        values = {"first": float(places[0]), "second": float(places[1]), "dimension": float(one.shape[-1])}
        yield "tape-embedding-product", one.module or one.name, text, values

    def interactions(self, node: Node) -> Iterator[Fact]:
        """Yield the products of all pairs of a sample's rows: (the sum squared - the sum of squares), over dimensions.

        That is how a factorisation machine sums them up (Rendle 2010, https://doi.org/10.1109/ICDM.2010.127, eq. 5).
        """
        sums = [self._graph.through(child) for child in self._graph.inputs(node)]
        if len(sums) != 2 or (whole := self._graph.through(squared(self._graph, sums[0]))) is None:
            return
        rows = self._graph.through(self._graph.first(whole)) if operation(whole) == "Sum" else None
        place = self._table(rows) if rows is not None else None
        if rows is None or place is None or len(shape(rows)) < 3 or not self._is_sum_of_squares(sums[1], rows):
            return
        fields, width = shape(rows)[-2:]
        pairs = fields * (fields - 1) // 2
        name = self._layers[place].name
        text = f"all {pairs} pairs of a sample's rows of {name} are multiplied and summed over {width} dimensions"
        values = {"first": float(place), "second": float(place), "dimension": float(pairs * width)}
        yield "tape-embedding-product", self._layers[place].module or name, text, values

    def tied(self, node: Node) -> Iterator[Fact]:
        """Yield a table whose rows are the weights of an output layer, with nothing that scales what goes into it."""
        graph = self._graph
        values, matrix = (*graph.edges(node)[-3:], None)[:2] if operation(node) == "Linear" else graph.edges(node)[-2:]
        leaf, made_by = graph.through(matrix), graph.through(values)
        is_scaled = made_by is not None and operation(made_by) in ("Mul", "Div") and len(graph.inputs(made_by)) == 1
        if leaf is None or leaf not in self._looked_up or is_scaled or not is_leaf(leaf):
            return
        if (place := self._index.get(leaf.variable)) is None:
            return
        layer = self._layers[place]
        rows, width = layer.shape
        text = f"{layer.name} is also the output layer, over {width} dimensions for {rows} classes"
        unit = float(made_by is not None and operation(made_by) in NORMS)
        numbers = {"weight": float(place), "dimension": float(width), "classes": float(rows), "normalised": unit}
        yield "tape-tied-embedding", layer.module or layer.name, text, numbers

    def _table(self, node: Node) -> int | None:
        """Return the table that values are rows of: that of an embedding, or a parameter that is indexed."""
        made_by = self._graph.through(node)
        if made_by is not None and operation(made_by) == "Embedding":
            made_by = self._graph.through(self._graph.first(made_by))
        if made_by is None or not is_leaf(made_by) or (place := self._index.get(made_by.variable)) is None:
            return None
        layer = self._layers[place]
        is_table = "Embedding" in layer.module_type or self._is_indexed(node)
        return place if is_table and len(layer.shape) == 2 else None

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
