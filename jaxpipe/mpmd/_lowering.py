"""Lowers a traced function to the instructions of all ranks: runs the passes in order."""

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.graph import Graph
from .ir._check_graph import check_graph
from .ir._loop import PipelinedLoop
from .ir._mpmd_graph import LoweringOptions, MpmdGraph, to_mpmd_graph
from .ir._program import MpmdProgram, check
from .passes import LOWERING

Pass = Callable[[Any], MpmdGraph | MpmdProgram]
"""A function of the graph or the program that the pass before it returns."""

Observe = Callable[[str, Any], None]


def lower(
    traced: Graph,
    options: LoweringOptions,
    passes: Sequence[Pass] = LOWERING,
    *,
    observe: Observe = lambda name, result: None,
) -> MpmdProgram:
    """Applies the passes in order, and checks and shows to `observe` the result of each."""
    result: MpmdGraph | MpmdProgram = to_mpmd_graph(traced, options)
    checked: tuple[PipelinedLoop, ...] = ()
    for one_pass in passes:
        result = one_pass(result)
        if isinstance(result, MpmdGraph):
            check_graph(result, checked)
            checked = result.loops
        else:
            check(result)
        observe(one_pass.__name__, result)
    assert isinstance(result, MpmdProgram), "the last pass returns a program"
    return result
