"""What the check of graphs sees: each rule of an `MpmdGraph`, broken by hand."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest

from jaxpipe.ir.graph import Eqn, Graph, Var
from jaxpipe.mpmd import mpmd_jit_with_loop
from jaxpipe.mpmd.ir import (
    MpmdGraph,
    MpmdProgram,
    PipelinedLoop,
    RankAssignment,
    check,
    check_graph,
)
from jaxpipe.mpmd.jaxpp import Std1F1B
from jaxpipe.schedules import Op
from mpmd.small import batch, gradients, groups, layers


@cache
def after(name: str) -> Any:
    """The result of a pass."""
    found: dict[str, Any] = {}
    loop = gradients(Std1F1B(2))

    def step(weights: Any, *data: Any) -> Any:
        _, grads = loop(weights, *data)
        return jax.tree.map(lambda w, g: w - g, weights, grads)

    traced = mpmd_jit_with_loop(step, groups(2)).trace(layers(2), *batch(2))
    traced.lower(observe=found.__setitem__)
    return found[name]


def with_loop(graph: MpmdGraph, **changes: Any) -> MpmdGraph:
    (loop,) = graph.loops
    new = replace(loop, **changes)
    return replace(graph, eqns=tuple(new if eqn is loop else eqn for eqn in graph.eqns))


def with_stage(graph: MpmdGraph, i: int, **changes: Any) -> MpmdGraph:
    (loop,) = graph.loops
    stages = list(loop.stages)
    stages[i] = replace(stages[i], **changes)
    return with_loop(graph, stages=tuple(stages))


def without_a_definition(graph: MpmdGraph) -> MpmdGraph:
    return replace(graph, inputs=graph.inputs[1:])


def defined_twice(graph: MpmdGraph) -> MpmdGraph:
    return replace(graph, inputs=(*graph.inputs, graph.inputs[0]))


def returning_what_is_not_there(graph: MpmdGraph) -> MpmdGraph:
    return replace(graph, outputs=(Var(graph.inputs[0].aval),))


def with_fewer_inputs(graph: MpmdGraph) -> MpmdGraph:
    return with_loop(graph, inputs=graph.loops[0].inputs[1:])


def with_fewer_reductions(graph: MpmdGraph) -> MpmdGraph:
    return with_loop(graph, reductions=graph.loops[0].reductions[1:])


def with_a_missing_stage(graph: MpmdGraph) -> MpmdGraph:
    return with_loop(graph, stages=graph.loops[0].stages[:1])


def with_stages_in_reverse(graph: MpmdGraph) -> MpmdGraph:
    return with_loop(graph, stages=graph.loops[0].stages[::-1])


def sending_nothing(graph: MpmdGraph) -> MpmdGraph:
    return with_stage(graph, 0, sent=frozenset())


def with_a_forward_that_is_called_backward(graph: MpmdGraph) -> MpmdGraph:
    stage = graph.loops[0].stages[0]
    return with_stage(graph, 0, backward=stage.backward | stage.sent)


def without_a_backward(graph: MpmdGraph) -> MpmdGraph:
    tasks = graph.loops[0].stages[1].tasks
    return with_stage(graph, 1, tasks={Op.F: tasks[Op.F]})


def with_b_and_w(graph: MpmdGraph) -> MpmdGraph:
    tasks = graph.loops[0].stages[1].tasks
    return with_stage(graph, 1, tasks={**tasks, Op.W: tasks[Op.B]})


def without_a_forward(graph: MpmdGraph) -> MpmdGraph:
    tasks = graph.loops[0].stages[0].tasks
    return with_stage(graph, 0, tasks={Op.B: tasks[Op.B]})


def needed_nowhere(graph: MpmdGraph) -> MpmdGraph:
    needed_on = dict.fromkeys(graph.ranks.needed_on, ())
    ranks = RankAssignment(graph.ranks.runs_on, needed_on, graph.ranks.produced_on)
    return replace(graph, ranks=ranks)


def without_the_last_fragment(graph: MpmdGraph) -> MpmdGraph:
    return replace(graph, fragments=(*graph.fragments[:-1], ()))


def with_too_few_segments(graph: MpmdGraph) -> MpmdGraph:
    return replace(graph, fragments=graph.fragments[1:])


BROKEN: list[tuple[str, Callable[[MpmdGraph], MpmdGraph], str]] = [
    ("extract_loops", without_a_definition, r"the function reads .* before it is defined"),
    ("extract_loops", defined_twice, "the function defines a variable twice, in its inputs"),
    ("extract_loops", returning_what_is_not_there, "which it does not define"),
    ("extract_loops", with_fewer_inputs, "loop 0 has other inputs than its body"),
    ("hoist_invariants", with_fewer_reductions, "loop 0 has other outputs than its body"),
    ("cut_stages", with_a_missing_stage, "loop 0 has 1 stages, and its schedule 2"),
    ("cut_stages", with_stages_in_reverse, "reads a value of the (forward|backward) of stage"),
    ("cut_stages", sending_nothing, "stage 0 of loop 0 sends no"),
    (
        "cut_stages",
        with_a_forward_that_is_called_backward,
        "stage 1 of loop 0 reads a value of the backward of stage 0",
    ),
    ("split_tasks", without_a_backward, "do not accumulate each of its results once"),
    ("split_tasks", with_b_and_w, r"stage 1 of loop 0 has the tasks \['B', 'F', 'W'\]"),
    ("split_tasks", without_a_forward, r"reads .*, which no task writes"),
    ("assign_ranks", needed_nowhere, r"a loop reads .* on ranks .*, which lack it"),
    ("outer_fragments", without_the_last_fragment, "each equation once on each of its ranks"),
    ("outer_fragments", with_too_few_segments, "fragments are not between the loops"),
]


@pytest.mark.parametrize(("name", "damage", "message"), BROKEN, ids=[b[1].__name__ for b in BROKEN])
def test_check_graph_names_what_is_broken(name: str, damage: Callable, message: str):
    graph = after(name)
    check_graph(graph)
    with pytest.raises(AssertionError, match=message):
        check_graph(damage(graph))


def test_a_program_without_transfers_reads_only_what_some_rank_has_written():
    program: MpmdProgram = after("unroll_schedule")
    check(program)
    for i, run in enumerate(program.instructions):
        rest = (*program.instructions[:i], *program.instructions[i + 1 :])
        with pytest.raises(AssertionError, match="which no rank has written"):
            check(replace(program, instructions=rest))
        with pytest.raises(AssertionError, match="writes a buffer that exists"):
            check(replace(program, instructions=(*program.instructions[: i + 1], run)))


def test_a_loop_is_a_node_and_no_pass_after_extract_loops_sees_the_primitive():
    assert "treduce" in str(after("unroll_scans")) and not after("unroll_scans").loops
    assert {type(eqn) for eqn in after("extract_loops").eqns} == {Eqn, PipelinedLoop}
    for name in ("extract_loops", "hoist_invariants", "cut_stages", "split_tasks"):
        assert "treduce" not in str(after(name))


def test_every_node_prints_alone():
    (loop,) = after("split_tasks").loops
    assert re.match(r"v\d+:f32\[\] .* = pipelined_loop\[\n    rank 0: 0F0", str(loop))
    texts = [str(instruction).split("[")[0] for instruction in after("liveness").instructions]
    assert {text.split(" = ")[-1] for text in texts} >= {"send", "recv", "delete"}
    assert isinstance(loop.body, Graph)
