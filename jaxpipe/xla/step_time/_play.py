"""Plays a scheduled program on a device: on its core, its links and its network.

The core runs instructions in the order of the program. A synchronous collective stops it. An
asynchronous one, in any of the forms of `hlo/_collectives.py`, runs beside the core from its start,
or from when the transfers before it have left the same resource, and the core waits at its end.
What it waits is exposed, the rest is hidden. A loop is played once and counts as often as it runs.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from ..hlo._collectives import Collective, ended_chain, starting_collective
from ..hlo._parse import (
    Instruction,
    Module,
    Sources,
    callee,
    op_name,
    parse_hlo,
    read_sources,
    without_layouts,
)
from ..hlo._trips import Scope, unknown_argument
from ..hlo._walk import ENTRY, CallContext, called_scopes
from ._instruction_costs import COLLECTIVE, COPY, InstructionCost, busy_seconds, kind_of_work
from ._rates import Rates, transfer_seconds


def instruction_costs(hlo_text: str, rates: Rates) -> tuple[InstructionCost, ...]:
    """Lists the instructions that a step executes on a device in program order, with their times.

    A loop multiplies by its trip count. Of the branches of a conditional the one that takes longest
    counts, as often as a name scope `taken_3_of_10` says, else always. An asynchronous collective
    is listed where it ends. Instructions that cost nothing, and asynchronous copies, are left out.
    """
    module = parse_hlo(hlo_text)
    entry = Scope(module, module.entry, unknown_argument)
    return tuple(_play(rates, read_sources(hlo_text), entry, ENTRY).costs)


@dataclass
class _Transfer:
    """A collective, and the second at which it ends; infinity before it has begun."""

    instruction: Instruction
    collective: Collective
    seconds: float
    end: float = float("inf")

    @property
    def resource(self) -> str:
        return "network" if self.collective.across_slices else "links"


@dataclass
class _Played:
    """One execution of a computation, up to the instruction that is played, in seconds."""

    now: float = 0.0  # since it has begun
    # When a resource has done all that has begun, and for how long it was used.
    free: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Asynchronous collectives by what names them where they end: an instruction, or a chain.
    under_way: dict[str, _Transfer] = field(default_factory=dict)
    costs: list[InstructionCost] = field(default_factory=list)  # also of what it calls

    def begin(self, transfer: _Transfer) -> None:
        """Queues a transfer, unless it has begun."""
        if transfer.end == float("inf"):
            resource = transfer.resource
            transfer.end = max(self.now, self.free[resource]) + transfer.seconds
            self.free[resource] = transfer.end
            self.moved[resource] += transfer.seconds

    def wait(self, transfer: _Transfer) -> float:
        """Waits for the end of a transfer, and returns for how many seconds."""
        self.begin(transfer)
        exposed = max(0.0, transfer.end - self.now)
        self.now += exposed
        return exposed

    def call(self, inside: "_Played", times: float) -> None:
        """Runs another computation, whose transfers delay those that are under way."""
        for resource, seconds in inside.moved.items():
            self.moved[resource] += times * seconds
            for transfer in self.under_way.values():
                if transfer.resource == resource and transfer.end > self.now:
                    transfer.end += times * seconds
            if self.free[resource] > self.now:
                self.free[resource] += times * seconds
        self.now += times * inside.now
        self.costs += inside.costs


_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("after-all", "partition-id", "replica-id", "domain", "copy-start", "send"),
        *("call-update", "async-update"),
    )
)
_ENTERED = ("while", "conditional", "call", "call-start", "async-start")


def _play(rates: Rates, sources: Sources, scope: Scope, context: CallContext) -> _Played:
    """Plays one execution of a computation."""
    played = _Played()

    def end(transfer: _Transfer) -> None:
        cost = _cost(transfer.instruction, context, sources, COLLECTIVE, played.wait(transfer))
        kind, shape = transfer.collective.kind, transfer.collective.shape
        moved = replace(cost, opcode=kind, shape=shape, transfer_seconds=transfer.seconds)
        played.costs.append(moved)

    for instruction in scope.computation.instructions.values():
        transfer, is_end = _part_of(rates, scope, instruction, played.under_way)
        if transfer is not None and is_end:
            end(transfer)
        elif transfer is not None and instruction.operands:  # `call-start` has none yet
            played.begin(transfer)
        elif instruction.opcode in _ENTERED and transfer is None:
            for inside, times in _dearest_branch(rates, sources, scope, instruction, context):
                played.call(inside, times)
            continue
        elif _takes_nothing(scope.module, instruction):
            continue
        seconds = busy_seconds(rates, scope.module, scope.computation, instruction)
        # The fusions of a collective may compute besides, and other parts of it have no cycles.
        if transfer is None or seconds:
            work = kind_of_work(scope.module, instruction)
            played.costs.append(_cost(instruction, context, sources, work, seconds))
            played.now += seconds or 0.0
    for transfer in played.under_way.values():
        end(transfer)
    return played


def _takes_nothing(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction keeps no core: asynchronous copies run beside other work."""
    if instruction.opcode == "fusion-start":
        return kind_of_work(module, replace(instruction, opcode="fusion")) == COPY
    return instruction.opcode in _FREE or instruction.opcode.endswith("-done")


def _dearest_branch(
    rates: Rates,
    sources: Sources,
    scope: Scope,
    instruction: Instruction,
    context: CallContext,
) -> list[tuple[_Played, float]]:
    """Returns the computations of the longest branch, with their executions each time."""
    branches = [
        [
            (_play(rates, sources, inside, inner), inner.times_in(context))
            for inside, inner in sequence
        ]
        for sequence in called_scopes(scope, instruction, context)
    ]
    return max(branches, key=lambda sequence: sum(times * x.now for x, times in sequence))


def _part_of(
    rates: Rates,
    scope: Scope,
    instruction: Instruction,
    under_way: dict[str, _Transfer],
) -> tuple[_Transfer | None, bool]:
    """Returns the collective that an instruction is a part of, and whether it waits for its end."""
    collective = _collective(scope, instruction)
    if collective is not None:
        seconds = transfer_seconds(
            *(collective.kind, collective.result_bytes, collective.groups, rates),
            across_slices=collective.across_slices,
        )
        transfer = _Transfer(instruction, collective, seconds)
        if collective.asynchronous:
            under_way[collective.chain or instruction.name] = transfer
        return transfer, not collective.asynchronous
    if instruction.opcode == "fusion":
        chain = ended_chain(scope.module.computations[callee(instruction)])
        return under_way.pop(chain, None), True
    is_update = instruction.opcode.endswith("-update")
    if not is_update and not instruction.opcode.endswith("-done"):
        return None, False
    transfer = under_way.pop(instruction.operands[0], None)
    if is_update and transfer is not None:
        under_way[instruction.name] = transfer
    return transfer, not is_update


def _collective(scope: Scope, instruction: Instruction) -> Collective | None:
    """Returns the collective that an instruction, or what it calls, starts or runs."""
    is_fusion = instruction.opcode == "fusion"
    if not is_fusion and instruction.opcode not in ("call-start", "async-start"):
        return starting_collective(scope.computation, instruction, fused=False)
    body = scope.module.computations[callee(instruction)]
    starting = (starting_collective(body, x, fused=is_fusion) for x in body.instructions.values())
    collective = next((x for x in starting if x is not None), None)
    return collective if is_fusion or collective is None else replace(collective, asynchronous=True)


def _cost(
    instruction: Instruction,
    context: CallContext,
    sources: Sources,
    work: str,
    seconds: float | None,
) -> InstructionCost:
    return InstructionCost(
        name=instruction.name,
        work=work,
        opcode=instruction.opcode,
        shape=without_layouts(instruction.shape),
        seconds=seconds,
        transfer_seconds=0.0,
        executions=float(context.executions * context.executed_share),
        marked=context.executed_share != 1,
        unmarked=context.conditional and context.executed_share == 1,
        source=sources.line(instruction),
        op_name=op_name(instruction) or context.op_name,
    )
