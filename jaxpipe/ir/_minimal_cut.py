"""What to keep so that other things can be computed from it again: the fewest bytes that do.

A minimum cut. Every value is a pipe as wide as its size. Values that cannot be computed again are
springs, and what is kept cuts the needs off from all of these. Of cuts of equal width it is the one
nearest to the needs, which leaves the least to compute.

Ford and Fulkerson, 1956, one need after the other: most values lie far from most needs.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)
Node = tuple[Any, bool]
"""A value's pipe: where it begins, or with True where it ends."""
Edge = tuple[Node, Node, int]
"""From a node to one downstream, and how much more could flow there."""
UNLIMITED = 1 << 62


def minimal_cut(
    needs: Iterable[T], parents: Mapping[T, Iterable[T]], cost: Callable[[T], int]
) -> list[T]:
    """What to keep of all values so that `needs` can be computed again.

    Args:
        needs: The values that are needed.
        parents: What a value is computed from, each once, if it may be computed again.
        cost: Of keeping a value, above 0.
    """
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
        # What flows on from here could be taken back.
        yield from ((there, node, flow[node, there]) for there in backward)

    def push(path: list[Edge]) -> None:
        amount = min(room for _, _, room in path)
        for start, end, _ in path:
            (a, _), (b, at_end) = start, end
            if (a == b) == at_end:  # through a pipe, or from one to the next
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
    """What is computed from each value that some need depends on. Needs come first."""
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
    """The shortest way from a spring to `end` with room on it, or else all that `end` is fed by."""
    found: dict[Node, Edge | None] = {end: None}
    waiting = [end]
    for node in waiting:
        value, at_end = node
        if not at_end and value not in parents:
            return list(_edges(node, found)), set()
        for edge in upstream(node):
            if edge[2] > 0 and edge[0] not in found:
                found[edge[0]] = edge
                waiting.append(edge[0])
    return [], set(found)


def _edges(node: Node, found: Mapping[Node, Edge | None]) -> Iterator[Edge]:
    while (edge := found[node]) is not None:
        yield edge
        node = edge[1]
