"""Code to read: one line per instruction, in the manner of a jaxpr."""

from ..autodiff import Value
from ._code import Buffer, Code, Free, Instruction, Receive, Run, Send


def text(code: Code) -> str:
    """All instructions, in an order in which they could run.

    A buffer is a letter and a number, with `:m` for a microbatch or a version of a sum.
    """
    names: dict[Value, str] = {}

    def name(buffer: Buffer) -> str:
        short = names.setdefault(buffer.value, f"v{len(names)}")
        return short if buffer.number is None else f"{short}:{buffer.number}"

    def typed(buffer: Buffer) -> str:
        return f"{name(buffer)}:{buffer.value.aval.str_short(short_dtypes=True)}"

    inputs = " ".join(f"{typed(b)}@{_ranks(ranks)}" for b, ranks in code.inputs)
    outputs = " ".join(f"{name(b)}@{_ranks(ranks)}" for b, ranks in code.outputs)
    lines = [line for i in code.instructions for line in _lines(i, name, typed)]
    return "\n".join([f"{{ lambda {inputs} . let", *lines, f"  in {outputs} }}"])


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "-"


def _lines(instruction: Instruction, name, typed) -> list[str]:
    rank = instruction.rank
    match instruction:
        case Run(_, label, program, reads, writes, actions, donated):
            info = ", ".join(f"({a.stage}, {a.op.name}, {a.microbatch})" for a in actions)
            return [
                f"    {' '.join(map(typed, writes))} = task[",
                *([f"      task_info={info}"] if info else []),
                f"      mpmd_idx={rank}",
                f"      donate_invars={tuple(i in donated for i in range(len(reads)))}",
                f"      num_steps={len(program.steps)}",
                f"      task_name={label}",
                f"    ] {' '.join(map(name, reads))}",
            ]
        case Send(_, to, buffers):
            return [f"    send[mpmd_idx={rank} tgt_mpmd_idx={to}] {' '.join(map(name, buffers))}"]
        case Receive(_, source, buffers):
            given = " ".join(map(name, buffers))
            return [f"    {given} = receive[mpmd_idx={rank} src_mpmd_idx={source}]"]
        case Free(_, buffers):
            return [f"    _ = delete[mpmd_idx={rank}] {' '.join(map(name, buffers))}"]
