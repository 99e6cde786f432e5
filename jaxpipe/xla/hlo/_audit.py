"""Counts the collectives of a compiled step, with the trip counts of its loops applied.

XLA's own cost analysis counts the body of a loop once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ._collectives import KINDS, Collective, crosses_hosts, ended_chain, starting_collective
from ._parse import Instruction, Module, called_computations, callee, op_name, parse_hlo
from ._trips import Scope, trip_count
from ._walk import CallContext, is_conditional, walk

_PRODUCTS = re.compile(
    # Of kernels in Triton, those of Pallas: its attention, and products of experts.
    r'custom_call_target="[^"]*(gemm|matmul|fmha|splash|gmm|xla\.gpu\.triton)|__triton_gemm'
)
_CALLED = ("calls", "to_apply", "body", "branch_computations")


@dataclass(frozen=True)
class CollectiveSite:
    """One collective of the program text."""

    kind: str  # one of `KINDS`
    name: str  # the name of its instruction
    shape: str  # the shape of its result, as XLA writes it, without layouts
    result_bytes: int  # bytes of the result of one execution, on one device
    executions: int  # how often a step executes it. A loop with an unknown trip count counts once.
    asynchronous: bool  # whether other instructions may run between its start and its end
    beside_product: bool  # whether a matrix product does
    loops: tuple[str, ...]  # names of the loops around it, outermost first
    # Whether it is in a branch; then `executions` counts as if the branch were always taken, unless
    # the conditional is in a name scope `taken_3_of_10`
    conditional: bool
    across_slices: bool  # whether it crosses the network between slices, or between hosts of GPUs
    groups: str  # the devices that communicate, as XLA writes them
    op_name: str  # the `op_name` in its metadata: the place in the Python program


@dataclass(frozen=True)
class WhileLoop:
    """One while loop of the program text."""

    name: str  # the name of its instruction
    trips: int | None  # how often its body runs each time, or None if the text does not tell
    loops: tuple[str, ...]  # names of the loops around it, outermost first
    op_name: str  # the `op_name` in its metadata: the place in the Python program


@dataclass(frozen=True)
class Audit:
    """The collectives and the loops of a step, in program order."""

    sites: tuple[CollectiveSite, ...]
    loops: tuple[WhileLoop, ...]


@dataclass(frozen=True)
class CollectiveTotals:
    """The sum over several collectives, per step and device."""

    sites: int  # how many collectives the program text has
    executions: int  # how many collectives a step executes
    result_bytes: int  # bytes of the results of all executions
    asynchronous_bytes: int  # the part of them that asynchronous collectives move
    beside_product_bytes: int  # the part of them that moves while a matrix product runs
    in_loops_bytes: int  # the part of them that collectives inside loops move
    across_slices_bytes: int  # the part of them that crosses the network between slices


def audit(hlo_text: str, hosts: Sequence[int] = ()) -> Audit:
    """Finds every collective of an optimized program and counts how often a step runs it.

    A loop multiplies by its trip count. Of the branches of a conditional, the one that moves most
    bytes counts: every time, or as often as a name scope says that it is taken. An asynchronous
    collective counts once, however many instructions XLA made of it.

    Args:
        hlo_text: The text of a compiled program, `compiled.as_text()`.
        hosts: The host of every device, in the order of the mesh, for programs of GPUs: what
            crosses the network between hosts then counts as TPUs' transfers between slices do.

    Returns:
        The collectives and the loops, in program order.

    Raises:
        ValueError: If the text is not that of a compiled program.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        >>> spec = jax.sharding.PartitionSpec("x")
        >>> sharding = jax.sharding.NamedSharding(mesh, spec)
        >>> x = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)
        >>> compiled = jax.jit(lambda x: x.sum()).lower(x).compile()
        >>> [(site.kind, site.shape) for site in audit(compiled.as_text()).sites]
        [('all-reduce', 'f32[]')]
    """
    items = tuple(walk(parse_hlo(hlo_text), partial(_visit, hosts), _size))
    sites = tuple(item for item in items if isinstance(item, CollectiveSite))
    return Audit(sites, tuple(item for item in items if isinstance(item, WhileLoop)))


def add_up(sites: tuple[CollectiveSite, ...]) -> CollectiveTotals:
    """Adds up collectives."""

    def moved(chosen: list[CollectiveSite]) -> int:
        return sum(site.executions * site.result_bytes for site in chosen)

    return CollectiveTotals(
        sites=len(sites),
        executions=sum(site.executions for site in sites),
        result_bytes=moved(list(sites)),
        asynchronous_bytes=moved([site for site in sites if site.asynchronous]),
        beside_product_bytes=moved([site for site in sites if site.beside_product]),
        in_loops_bytes=moved([site for site in sites if site.loops]),
        across_slices_bytes=moved([site for site in sites if site.across_slices]),
    )


def totals(audit: Audit) -> dict[str, CollectiveTotals]:
    """Returns the sum for each kind of collective that occurs.

    Args:
        audit: The collectives of a step.

    Returns:
        A sum for each kind, such as `all-gather`, in the order of `KINDS`.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        >>> spec = jax.sharding.PartitionSpec("x")
        >>> sharding = jax.sharding.NamedSharding(mesh, spec)
        >>> x = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)
        >>> compiled = jax.jit(lambda x: x.sum()).lower(x).compile()
        >>> totals(audit(compiled.as_text()))["all-reduce"].result_bytes
        4
    """
    kinds = [kind for kind in KINDS if any(site.kind == kind for site in audit.sites)]
    return {kind: add_up(tuple(s for s in audit.sites if s.kind == kind)) for kind in kinds}


def uncounted_loops(audit: Audit) -> tuple[str, ...]:
    """Returns the loops with collectives inside whose trip count is unknown.

    Args:
        audit: The collectives and loops of a step.

    Returns:
        The sorted names of the loops. What they contain is counted once.
    """
    unknown = {loop.name for loop in audit.loops if loop.trips is None}
    around = {name for site in audit.sites for name in site.loops}
    return tuple(sorted(unknown & around))


_Item = CollectiveSite | WhileLoop


def _visit(
    hosts: Sequence[int], scope: Scope, instruction: Instruction, context: CallContext
) -> tuple[list, bool]:
    collective = starting_collective(scope.computation, instruction, fused=context.fused)
    if collective is not None:
        across = collective.across_slices or (
            bool(hosts) and crosses_hosts(collective.groups, hosts)
        )
        collective = replace(collective, across_slices=across)
        beside = collective.asynchronous and any(
            multiplies_matrices(scope.module, x) for x in instructions_between(scope, instruction)
        )
        return [_site(collective, context, beside)], False
    if instruction.opcode != "while" or is_conditional(instruction):
        return [], True
    trips = trip_count(scope, instruction)
    return [WhileLoop(instruction.name, trips, context.loops, op_name(instruction))], True


def _site(collective: Collective, context: CallContext, beside_product: bool) -> CollectiveSite:
    return CollectiveSite(
        kind=collective.kind,
        name=collective.name,
        shape=collective.shape,
        result_bytes=collective.result_bytes,
        executions=math.ceil(context.executions * context.executed_share),
        asynchronous=collective.asynchronous or context.asynchronous,
        beside_product=beside_product,
        loops=context.loops,
        conditional=context.conditional,
        across_slices=collective.across_slices,
        groups=collective.groups,
        op_name=collective.op_name or context.op_name,
    )


def _size(items: Sequence[_Item]) -> tuple[int, int]:
    total = add_up(tuple(item for item in items if isinstance(item, CollectiveSite)))
    return total.result_bytes, total.executions


def instructions_between(scope: Scope, start: Instruction) -> list[Instruction]:
    """Returns the instructions from a collective's start, or a chain of fusions', to its end."""
    after, parts = [], {start.name}
    instructions = iter(scope.computation.instructions.values())
    for instruction in instructions:
        if instruction is start:
            break
    for instruction in instructions:
        if parts & set(instruction.operands):
            if instruction.opcode.endswith("-done") or _ends_chain(scope.module, instruction):
                return after
            parts.add(instruction.name)
        after.append(instruction)
    return after


def _ends_chain(module: Module, instruction: Instruction) -> bool:
    """Tells whether a fusion ends a collective that an earlier one has started."""
    if instruction.opcode != "fusion":
        return False
    return bool(ended_chain(module.computations[callee(instruction)]))


def multiplies_matrices(module: Module, instruction: Instruction) -> bool:
    """Tells whether an instruction, or what it calls, has a matrix product or calls attention."""
    if instruction.opcode in ("dot", "convolution") or _PRODUCTS.search(instruction.attributes):
        return True
    if instruction.opcode not in ("fusion", "call", "while", "conditional"):
        return False
    names = [name for key in _CALLED for name in called_computations(instruction, key)]
    return any(
        multiplies_matrices(module, inside)
        for name in names
        for inside in module.computations[name].instructions.values()
    )
