"""Shows the instructions of ranks as JaxPP does: as equations with primitives and parameters."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import Primitive

from ..ir._program import Buffer, Delete, Instruction, MpmdProgram, Recv, RunTask, Send

TASK, SEND, RECV, DELETE = map(Primitive, ("task", "send", "recv", "delete"))


class MpmdEqn(NamedTuple):
    """An instruction of a rank, as an equation of a jaxpr whose `primitive.name` says its kind."""

    primitive: Primitive
    params: dict[str, Any]
    invars: tuple[Buffer, ...]
    outvars: tuple[Buffer, ...]


@dataclass(frozen=True)
class ClosedJaxpr:
    """The instructions of all ranks, under JaxPP's names."""

    program: MpmdProgram

    @property
    def eqns(self) -> list[MpmdEqn]:
        """Returns the instructions of all ranks, in an order in which they could run."""
        return list(map(_eqn, self.program.instructions))

    @property
    def jaxpr(self) -> "ClosedJaxpr":
        """Returns `self`: JaxPP's closed jaxpr has its equations in this attribute."""
        return self

    def __str__(self) -> str:
        return str(self.program)


def _eqn(instruction: Instruction) -> MpmdEqn:
    match instruction:
        case RunTask(rank, name, graph, reads, writes, actions, donated, loop):
            params = {
                "task_name": name,
                "mpmd_idx": rank,
                "task_info": tuple((a.stage, a.op, a.microbatch) for a in actions),
                "call_jaxpr": graph,
                "loop": loop,
                "donate_invars": tuple(i in donated for i in range(len(reads))),
            }
            return MpmdEqn(TASK, params, reads, writes)
        case Send(rank, to, buffers):
            return MpmdEqn(SEND, {"mpmd_idx": rank, "tgt_mpmd_idx": to}, buffers, ())
        case Recv(rank, source, buffers):
            return MpmdEqn(RECV, {"mpmd_idx": rank, "src_mpmd_idx": source}, (), buffers)
        case Delete(rank, buffers):
            return MpmdEqn(DELETE, {"mpmd_idx": rank}, buffers, ())
