"""Checks the rules of an `MpmdGraph`, which every pass keeps.

A variable is defined once, and before it is read. A loop has an input for each invariant, and an
output and a reduction for each output of its body. If it has stages, they are those of its
schedule, and values flow forward in the forward and backward in the backward. If the stages have
tasks, every value that a task reads is written by exactly one task, and every result is accumulated
by exactly one, on each rank that runs its stage. If equations have ranks, every rank that runs one
has, or is sent, what it reads. If there are fragments, they have every equation once on each of its
ranks.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from ...ir.graph import Atom, Eqn, Graph, Literal, Var, aval_of, variables
from ...schedules import Op
from ._eqns import primitive_of
from ._mpmd_graph import MpmdGraph, PipelinedLoop


def check_graph(graph: MpmdGraph, checked: Collection[PipelinedLoop] = ()) -> None:
    """Checks that a graph keeps the rules of an `MpmdGraph`.

    Loops in `checked` were checked after an earlier pass, and are not checked again.
    """
    _check_scope("the function", graph)
    for i, loop in enumerate(graph.loops):
        if loop not in checked:
            _check_loop(f"loop {i}", loop, graph.options.num_ranks)
    if graph.ranks.needed_on:
        _check_ranks(graph)
    if graph.fragments:
        _check_fragments(graph)


def _check_scope(where: str, graph: Graph | MpmdGraph) -> None:
    """Checks that every variable is defined once, and before it is read."""
    defined: set[Var] = set()

    def define(values: Iterable[Var], what: str) -> None:
        for value in values:
            assert value not in defined, f"{where} defines a variable twice, in {what}"
            defined.add(value)

    define(graph.inputs, "its inputs")
    for eqn in graph.eqns:
        name = _name(eqn)
        missing = [value for value in variables(eqn.inputs) if value not in defined]
        assert not missing, f"{where} reads {missing} before it is defined, in {name}"
        define(eqn.outputs, name)
    missing = [value for value in variables(graph.outputs) if value not in defined]
    assert not missing, f"{where} returns {missing}, which it does not define"


def _name(eqn: Eqn | PipelinedLoop) -> str:
    if isinstance(eqn, PipelinedLoop):
        return "a loop"
    return primitive_of(eqn) or type(eqn.operation).__name__


def _check_loop(where: str, loop: PipelinedLoop, num_ranks: int) -> None:
    """Checks a loop, and its stages and tasks if it has them."""
    _check_scope(f"the body of {where}", loop.body)
    assert len(loop.inputs) == len(loop.invariants), f"{where} has other inputs than its body"
    for atom, invariant in zip(loop.inputs, loop.invariants, strict=True):
        assert _type(atom) == _type(invariant), f"{where} gives its body an input of another type"
    sizes = {len(loop.outputs), len(loop.body.outputs), len(loop.reductions), len(loop.specs)}
    assert len(sizes) == 1, f"{where} has other outputs than its body"
    for output, reduction in zip(loop.body.outputs, loop.reductions, strict=True):
        expected = tuple(reduction.shape), reduction.dtype
        assert _type(output) == expected, f"{where} reduces a result of another type"
        assert reduction.num_microbatches == loop.num_microbatches, (
            f"{where} has {loop.num_microbatches} microbatches, and reduces "
            f"{reduction.num_microbatches}"
        )
    assert len(loop.schedule.programs) == num_ranks, f"{where} has a schedule of other ranks"
    if loop.stages:
        assert len(loop.output_ranks) == len(loop.outputs), f"{where} has outputs without ranks"
        _check_stages(where, loop)
        if any(stage.tasks for stage in loop.stages):
            _check_tasks(where, loop)


def _type(atom: Atom) -> tuple[tuple[int, ...], object]:
    aval = aval_of(atom)
    return tuple(aval.shape), aval.dtype


def _check_stages(where: str, loop: PipelinedLoop) -> None:
    """Checks that the stages are those of the schedule, and in which direction values flow."""
    assert len(loop.stages) == loop.num_parts, (
        f"{where} has {len(loop.stages)} stages, and its schedule {loop.num_parts}"
    )
    makers: dict[Var, int] = {}
    for i, stage in enumerate(loop.stages):
        _check_scope(f"stage {i} of {where}", stage.graph)
        assert stage.sent.issubset(stage.graph.outputs), f"stage {i} of {where} sends no output"
        for value in stage.graph.outputs:
            assert isinstance(value, Var) and value not in makers, (
                f"stage {i} of {where} returns what another stage returns"
            )
            makers[value] = i
    for i, stage in enumerate(loop.stages):
        for value in stage.graph.inputs:
            if value in loop.body.inputs:
                continue
            assert value in makers, f"stage {i} of {where} reads {value}, which no stage returns"
            maker = makers[value]
            is_backward = value in loop.stages[maker].backward
            assert value in loop.stages[maker].sent, f"stage {maker} of {where} sends no {value}"
            assert i < maker if is_backward else i > maker, (
                f"stage {i} of {where} reads a value of the "
                f"{'backward' if is_backward else 'forward'} of stage {maker}"
            )
    missing = [value for value in variables(loop.body.outputs) if value not in makers]
    assert not missing, f"no stage of {where} returns its results {missing}"


def _check_tasks(where: str, loop: PipelinedLoop) -> None:
    """Checks that each value has one task that writes it, and each result one that accumulates."""
    assert len(loop.stage_ranks) == len(loop.stages)
    tasks = [
        (f"task {i}{op.name} of {where}", i, op, task)
        for i, stage in enumerate(loop.stages)
        for op, task in stage.tasks.items()
    ]
    for i, stage in enumerate(loop.stages):
        operations = set(stage.tasks)
        assert operations <= {Op.F, Op.B} or operations <= {Op.F, Op.I, Op.W}, (
            f"stage {i} of {where} has the tasks {sorted(op.name for op in operations)}"
        )
    written = Counter(value for _, _, _, task in tasks for value in task.writes)
    accumulated = Counter(
        (value, rank)
        for _, i, _, task in tasks
        for value in task.accumulators
        for rank in loop.stage_ranks[i]
    )
    assert max(written.values(), default=1) == 1, f"two tasks of {where} write one value"
    results = zip(variables(loop.body.outputs), loop.output_ranks, strict=True)
    assert accumulated == Counter(results), (
        f"the tasks of {where} do not accumulate each of its results once on each of its ranks"
    )
    inputs = set(loop.body.inputs)
    for name, _, _, task in tasks:
        _check_scope(name, task.graph)
        assert len(task.graph.inputs) == len(task.reads) + len(task.accumulators), (
            f"{name} has other inputs than its graph"
        )
        assert len(task.graph.outputs) == len(task.writes) + len(task.accumulators), (
            f"{name} has other outputs than its graph"
        )
        missing = [v for v in task.reads if v not in inputs and v not in written]
        assert not missing, f"{name} reads {missing}, which no task writes"


def _check_ranks(graph: MpmdGraph) -> None:
    """Checks that every rank has, or is sent, what its equations read and what it returns."""
    ranks, everything = graph.ranks, set(range(graph.options.num_ranks))
    for eqn in graph.eqns:
        if isinstance(eqn, PipelinedLoop):
            for value in eqn.outputs:
                assert len(ranks.produced_on[value]) == 1, "a result of a loop has several ranks"
            for atom, readers in zip(eqn.inputs, eqn.input_ranks, strict=True):
                for value in variables([atom]):
                    missing = readers.difference(ranks.needed_on[value])
                    assert not missing, f"a loop reads {value} on ranks {missing}, which lack it"
            continue
        runs_on = set(ranks.runs_on.get(eqn, ()))
        assert runs_on <= everything, f"{_name(eqn)} runs on ranks {runs_on}, which do not exist"
        for value in variables(eqn.inputs):
            missing = runs_on.difference(ranks.needed_on[value])
            assert not missing, f"{_name(eqn)} reads {value} on ranks {missing}, which lack it"
    for value, needed_on in ranks.needed_on.items():
        assert not needed_on or ranks.produced_on[value], f"no rank computes {value}"
    for atom in graph.outputs:
        assert not isinstance(atom, Literal), "the function returns a constant"


def _check_fragments(graph: MpmdGraph) -> None:
    """Checks that the fragments have each equation once on each of its ranks."""
    assert len(graph.fragments) == 1 + len(graph.loops), "fragments are not between the loops"
    expected = Counter((eqn, rank) for eqn, ranks in graph.ranks.runs_on.items() for rank in ranks)
    counts: Counter[tuple[Eqn, int]] = Counter()
    for segment in graph.fragments:
        for run in segment:
            _check_scope(f"{run.name} on rank {run.rank}", run.graph)
            counts.update((eqn, run.rank) for eqn in run.graph.eqns)
    assert counts == expected, "the fragments do not have each equation once on each of its ranks"
