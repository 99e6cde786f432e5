"""Finds the fewest bytes to keep from which other values can be computed again: a minimum cut.

Every value is an edge whose capacity is its size. Values that cannot be computed again are sources,
and the kept values separate the needed values from all sources. Among cuts of equal capacity the
one nearest to the needed values is chosen, which leaves the least to recompute.

Ford and Fulkerson, 1956, one needed value after the other: most values are far from most of them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)
Node = tuple[Any, bool]
"""One end of the edge of a value: its tail (False) or its head (True)."""
Edge = tuple[Node, Node, int]
"""Edge of the residual graph: its tail, its head and its residual capacity."""
UNLIMITED = 1 << 62


def minimal_cut(
    needs: Iterable[T], parents: Mapping[T, Iterable[T]], cost: Callable[[T], int]
) -> list[T]:
    """Finds the values to keep so that `needs` follow, each from its distinct `parents`."""
    children = _children(needs, parents)
    flow: defaultdict[tuple[Node, Node], int] = defaultdict(int)

    def upstream(node: Node) -> Iterator[Edge]:
        value, at_end = node
        other = value, not at_end
        if at_end:
            yield other, node, cost(value) - flow[other, node]
            backward = ((child, False) for child in children[value])
        else:
            yield from (((parent, True), node, UNLIMITED) for parent in parents[value])
            backward = [other]
        # Flow that leaves this node could be cancelled.
        yield from ((there, node, flow[node, there]) for there in backward)

    def push(path: list[Edge]) -> None:
        amount = min(room for _, _, room in path)
        for start, end, _ in path:
            (a, _), (b, at_end) = start, end
            if (a == b) == at_end:  # along the edge of a value, or between two values
                flow[start, end] += amount
            else:
                flow[end, start] -= amount

    downstream: set[Node] = set()
    for need in list(children)[: len(set(needs))]:
        path, seen = _path((need, True), upstream, parents)
        while path:
            push(path)
            path, seen = _path((need, True), upstream, parents)
        downstream |= seen
    return [v for v in children if (v, True) in downstream and (v, False) not in downstream]


def _children(needs: Iterable[T], parents: Mapping[T, Iterable[T]]) -> dict[T, list[T]]:
    """Returns the values computed from each value that `needs` depend on. The needs are first."""
    children: dict[T, list[T]] = {need: [] for need in needs}
    waiting = list(children)
    for value in waiting:
        for parent in parents.get(value, ()):
            if parent not in children:
                children[parent] = []
                waiting.append(parent)
            children[parent].append(value)
    return children


def _path(
    end: Node, upstream: Callable[[Node], Iterator[Edge]], parents: Mapping[Any, Any]
) -> tuple[list[Edge], set[Node]]:
    """Returns the shortest augmenting path to `end`; without one, all nodes that lead to it."""
    edge_from: dict[Node, Edge | None] = {end: None}
    waiting = [end]
    for node in waiting:
        value, at_end = node
        if not at_end and value not in parents:
            return list(_edges(node, edge_from)), set()
        for edge in upstream(node):
            if edge[2] > 0 and edge[0] not in edge_from:
                edge_from[edge[0]] = edge
                waiting.append(edge[0])
    return [], set(edge_from)


def _edges(node: Node, edge_from: Mapping[Node, Edge | None]) -> Iterator[Edge]:
    while (edge := edge_from[node]) is not None:
        yield edge
        node = edge[1]
