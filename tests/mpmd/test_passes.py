"""The compiler's passes: what every rank does in readable text, and what it costs."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import jaxprs_in_params

from jaxpipe import schedules
from jaxpipe.ir.graph import Graph, Var
from jaxpipe.mpmd import Add, mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.ir import (
    Buffer,
    BufferOnRanks,
    Delete,
    MpmdProgram,
    Recv,
    RunTask,
    Send,
    check,
    instructions_of_rank,
)
from jaxpipe.mpmd.jaxpp import GPipe, Interleaved1F1B, KimiK2, Std1F1B, ZeroBubble
from jaxpipe.mpmd.passes import LOWERING
from jaxpipe.schedules import Op
from mpmd.small import batch, compare, gradients, groups, layer, layers, marked_loss

# What ranks do.


def words(program: MpmdProgram, rank: int) -> list[str]:
    """What a rank does: programs by name; `>` sends to, `<` receives from, `-` deletes how many."""
    found = []
    for instruction in instructions_of_rank(program, rank):
        match instruction:
            case RunTask(name=name):
                found.append(name)
            case Send(to=to, buffers=buffers):
                found.append(f">{to}:{len(buffers)}")
            case Recv(source=source, buffers=buffers):
                found.append(f"<{source}:{len(buffers)}")
            case Delete(buffers=buffers):
                found.append(f"-{len(buffers)}")
    return found


def lowered(schedule: Any, num_microbatches: int, loss: Callable = marked_loss) -> Any:
    """A layer for each stage."""
    step = mpmd_jit_with_loop(gradients(schedule, loss), groups(schedule.mpmd_dim))
    return step.lower(layers(schedule.num_stages), *batch(num_microbatches))


def test_two_ranks_of_1f1b_read_like_this():
    program = lowered(Std1F1B(2), 2).program
    assert words(program, 0) == [
        *("start", "fwd_0__0", ">1:1", "-1", "fwd_0__1", ">1:1", "-1"),
        *("<1:1", "<1:1", "bwd_0__0", "-2", "bwd_0__1", "-2"),
    ]
    assert words(program, 1) == [
        *("start", "<0:1", "<0:1"),
        *("FusedTask(fwd_1__0, bwd_1__0)", ">0:1", "-1"),
        *("FusedTask(fwd_1__1, bwd_1__1)", ">0:1", "-1"),
    ]


def test_two_ranks_of_zero_bubble_read_like_this():
    """The last stage hands its cotangent back before it makes gradients."""
    program = lowered(ZeroBubble(2), 2).program
    names = [
        [i.name for i in instructions_of_rank(program, rank) if isinstance(i, RunTask)]
        for rank in range(2)
    ]
    assert names == [
        ["start", "fwd_0__0", "fwd_0__1", "bwd_w_0__0", "bwd_w_0__1"],
        [
            "start",
            "FusedTask(fwd_1__0, bwd_i_1__0)",
            "FusedTask(fwd_1__1, bwd_i_1__1)",
            "bwd_w_1__0",
            "bwd_w_1__1",
        ],
    ]


def test_a_step_prints_like_a_jaxpr():
    def step(weights: Any, xs: Any) -> Any:
        def of_microbatch(x: Any) -> Any:
            return jnp.sum(mark_stage_end(x * weights[0]) * weights[1])

        return treduce(of_microbatch, xs, schedule=GPipe(2), operation=Add)

    two = [jnp.float32(1), jnp.float32(2)]
    text = str(mpmd_jit_with_loop(step, groups(2)).lower(two, jnp.ones((1, 3))))
    assert re.sub(r"num_steps=\d+", "num_steps=n", text) == (
        "{ lambda v0:f32[]@0 v1:f32[]@1 v2:f32[1,3]@0 . let\n"
        "    v3:0:f32[] = run_task[\n"
        "      loop=0\n"
        "      mpmd_idx=1\n"
        "      donate_invars=()\n"
        "      num_steps=n\n"
        "      task_name=start\n"
        "    ] \n"
        "    v4:0:f32[3] = run_task[\n"
        "      loop=0\n"
        "      task_info=(0, F, 0)\n"
        "      mpmd_idx=0\n"
        "      donate_invars=(False, False, False)\n"
        "      num_steps=n\n"
        "      task_name=fwd_0__0\n"
        "    ] v5:0 v2 v0\n"
        "    send[mpmd_idx=0 tgt_mpmd_idx=1] v4:0\n"
        "    _ = delete[mpmd_idx=0] v4:0\n"
        "    v4:0 = recv[mpmd_idx=1 src_mpmd_idx=0]\n"
        "    v3:f32[] = run_task[\n"
        "      loop=0\n"
        "      task_info=(1, F, 0)\n"
        "      mpmd_idx=1\n"
        "      donate_invars=(False, False, True)\n"
        "      num_steps=n\n"
        "      task_name=fwd_1__0\n"
        "    ] v4:0 v1 v3:0\n"
        "    _ = delete[mpmd_idx=1] v4:0\n"
        "  in v3@1 }"
    )


def observed(schedule: Any, num_microbatches: int, loss: Callable = marked_loss) -> dict[str, Any]:
    """The result of every pass, in order."""
    found: dict[str, Any] = {}
    step = mpmd_jit_with_loop(gradients(schedule, loss), groups(schedule.mpmd_dim))
    traced = step.trace(layers(schedule.num_stages), *batch(num_microbatches))
    traced.lower(observe=found.__setitem__)
    return found


def test_passes_run_in_this_order():
    passes = [
        "unroll_scans",
        "extract_loops",
        "hoist_invariants",
        "cut_stages",
        "split_tasks",
        "separate_outputs",
        "assign_ranks",
        "propagate_shardings",
        "outer_fragments",
        "unroll_schedule",
        "insert_transfers",
        "fuse_programs",
        "liveness",
    ]
    assert list(observed(Std1F1B(2), 2)) == passes == [one_pass.__name__ for one_pass in LOWERING]


# What halves of a backward compute.


def matmul_flops(program: Graph) -> int:
    """Of all matrix products, those in loops as often as they run."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.inputs]
    return _flops(jax.make_jaxpr(program)(*shapes).jaxpr)


def _flops(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            terms = math.prod(left[dim] for dim in contracted)
            total += 2 * terms * math.prod(equation.outvars[0].aval.shape)
        turns = equation.params.get("length", 1)
        total += turns * sum(map(_flops, jaxprs_in_params(equation.params)))
    return total


def flops_of_tasks(schedule: Any, loss: Callable) -> dict[tuple[int, Op], int]:
    found = {}
    for run in observed(schedule, 3, loss)["unroll_schedule"].instructions:
        for action in run.actions:
            found[action.stage, action.op] = matmul_flops(run.graph)
    return found


def scanned(w: Any, x: Any) -> Any:
    """The same layer three times."""
    return lax.scan(lambda x, _: (layer(w, x), None), x, None, 3)[0]


STAGES = {
    "plain": layer,
    "remat": jax.checkpoint(layer),
    "remat_of_jit": jax.checkpoint(jax.jit(layer)),
    "scan": scanned,
    "scan_with_remat": jax.checkpoint(scanned),
}


@pytest.mark.parametrize("stage", STAGES)
def test_i_and_w_of_a_stage_multiply_as_much_as_b(stage: str):
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return marked_loss(weights, x, y, stage=STAGES[stage])

    whole, halves = flops_of_tasks(Std1F1B(3), loss), flops_of_tasks(ZeroBubble(3), loss)
    for i in range(3):
        assert whole[i, Op.F] == halves[i, Op.F] > 0
        assert whole[i, Op.B] == halves.get((i, Op.I), 0) + halves[i, Op.W]
    assert (0, Op.I) not in halves


def test_halves_of_two_matmuls_are_two_and_two():
    """Of stage 0 nothing is handed on, so one product falls away and the rest is in W."""
    flops = flops_of_tasks(ZeroBubble(2), marked_loss)
    one = 2 * 2 * 8 * 16
    assert {key: count // one for key, count in flops.items()} == {
        (0, Op.F): 2,
        (0, Op.W): 3,
        (1, Op.F): 2,
        (1, Op.I): 2,
        (1, Op.W): 2,
    }


# What is kept, and for how long.


def peak_microbatches(program: MpmdProgram, rank: int) -> int:
    """The most (stage, microbatch)es that hold an array between forward and last backward."""
    versions = {buffer.value for buffer, _ in program.outputs}
    alive: set[Buffer] = set()
    of_forward: dict[tuple[int, int], set[Buffer]] = {}
    peak = 0
    for instruction in instructions_of_rank(program, rank):
        match instruction:
            case RunTask(reads=reads, writes=writes, actions=actions, donated=donated):
                alive.update(reads, writes)
                for action in actions:
                    if action.op is Op.F:
                        of_forward[action.stage, action.microbatch] = {
                            buffer
                            for buffer in (*reads, *writes)
                            if buffer.version is not None
                            and buffer.value not in versions
                            and buffer not in program.indices
                        }
                now = {key for key, buffers in of_forward.items() if buffers & alive}
                now.update((action.stage, action.microbatch) for action in actions)
                peak = max(peak, len(now))
                alive.difference_update(reads[i] for i in donated)
            case Recv(buffers=buffers):
                alive.update(buffers)
            case Delete(buffers=buffers):
                alive.difference_update(buffers)
    return peak


BUILDERS = ("gpipe", "1f1b", "eager_1f1b", "zero_bubble_h1", "interleaved_1f1b")


@pytest.mark.parametrize("name", BUILDERS)
def test_activations_are_freed_as_soon_as_the_schedule_allows(name: str):
    chunks = 2 if name == "interleaved_1f1b" else None
    schedule = schedules.build(name, ranks=4, microbatches=8, chunks=chunks)
    step = mpmd_jit_with_loop(gradients(schedule), groups(4))
    program = step.lower(layers(schedule.num_stages), *batch(8)).program
    found = tuple(peak_microbatches(program, rank) for rank in range(4))
    assert found == schedules.peak_activations(schedule)


def test_after_a_step_only_arguments_and_results_are_left():
    program = lowered(ZeroBubble(3), 4).program
    for rank in range(3):
        alive = {buffer for buffer, ranks in program.inputs if rank in ranks}
        given = set(alive)
        for instruction in instructions_of_rank(program, rank):
            match instruction:
                case RunTask(reads=reads, writes=writes, donated=donated):
                    alive.difference_update(reads[i] for i in donated)
                    alive.update(writes)
                case Recv(buffers=buffers):
                    alive.update(buffers)
                case Delete(buffers=buffers):
                    alive.difference_update(buffers)
        assert alive == given | {buffer for buffer, ranks in program.outputs if rank in ranks}


# What `check` sees.

X, Y = (Buffer(Var(ShapedArray((), jnp.dtype("float32")))) for _ in range(2))
EMPTY = Graph((), (), ())


def run(rank: int, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...], **more: Any) -> RunTask:
    return RunTask(rank, "p", EMPTY, reads, writes, **more)


MAKE, SEND, RECEIVE = run(0, (), (X,)), Send(0, 1, (X,), "p"), Recv(1, 0, (X,), "p")
BROKEN = {
    "p reads .* which the rank does not hold": (run(1, (X,), (Y,)), MAKE, SEND, RECEIVE),
    "p writes a buffer that exists": (MAKE, MAKE),
    "sends a missing buffer": (SEND, RECEIVE),
    "have no receive": (MAKE, SEND),
    "has no send": (MAKE, RECEIVE),
    "does not match Send": (
        *(MAKE, run(0, (), (Y,)), SEND, Send(0, 1, (Y,), "p")),
        *(Recv(1, 0, (Y,), "p"), RECEIVE),
    ),
    "receives a buffer that exists": (MAKE, run(1, (), (X,)), SEND, RECEIVE),
    "deletes a missing buffer": (MAKE, Delete(0, (X,)), Delete(0, (X,))),
    "p reads .* does not hold": (MAKE, run(0, (X,), (Y,), donated=(0,)), run(0, (X,), ())),
    "is missing on a rank that returns it": (MAKE,),
}


@pytest.mark.parametrize("message", BROKEN)
def test_check_names_what_is_broken(message: str):
    with pytest.raises(AssertionError, match=message):
        check(MpmdProgram(2, (), (BufferOnRanks(X, (1,)),), {}, BROKEN[message]))


def test_check_passes_what_is_whole():
    check(MpmdProgram(2, (), (BufferOnRanks(X, (0, 1)),), {}, (MAKE, SEND, RECEIVE)))


@pytest.mark.parametrize("kind", [Send, Recv, RunTask])
def test_check_sees_that_an_instruction_is_missing(kind: type):
    program = lowered(Std1F1B(2), 2).program
    check(program)
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, kind):
            rest = (*program.instructions[:i], *program.instructions[i + 1 :])
            with pytest.raises(AssertionError):
                check(MpmdProgram(2, program.inputs, program.outputs, program.indices, rest))


# What is fused.


@pytest.mark.parametrize(
    ("schedule", "num_fused"),
    [(Std1F1B(1), 4), (Std1F1B(3), 4), (Interleaved1F1B(4, 2), 4), (ZeroBubble(2), 4)],
    ids=str,
)
def test_tasks_that_neither_change_nor_communicate_are_fused(schedule: Any, num_fused: int):
    """Of each microbatch the last forward and its backward are one program; what lies between
    them, and no W reads, is no array of any rank."""
    found = observed(schedule, 4)
    apart, fused = found["insert_transfers"], found["fuse_programs"]
    pairs = [i for i in fused.instructions if isinstance(i, RunTask) and len(i.actions) == 2]
    assert len(pairs) == num_fused
    runs = [i for i in apart.instructions if isinstance(i, RunTask)]
    by_action = {action: run for run in runs for action in run.actions}
    for pair in pairs:
        first, second = (by_action[action] for action in pair.actions)
        assert pair.name == f"FusedTask({first.name}, {second.name})"
        later = {b for run in runs if run not in (first, second) for b in run.reads}
        between = {b for b in first.writes if b in second.reads and b not in later}
        assert between.isdisjoint((*pair.reads, *pair.writes))
        assert between or not isinstance(schedule, Std1F1B)
        assert set(pair.writes) == {*first.writes, *second.writes} - between
    alone = [i for i in fused.instructions if not isinstance(i, RunTask)]
    assert alone == [i for i in apart.instructions if not isinstance(i, RunTask)]
    compare(
        gradients(schedule),
        groups(schedule.mpmd_dim),
        *(layers(schedule.num_stages), *batch(4)),
    )


@pytest.mark.parametrize("cls", [Interleaved1F1B, KimiK2])
def test_a_fused_steady_state_computes_the_same(cls: Any):
    """What a forward hands on leaves before a backward of another microbatch begins."""
    schedule, args = cls(4, 2, fuse_steady_state=True), (layers(4), *batch(5))
    compare(gradients(schedule), groups(2), *args)
    for run in observed(schedule, 5)["fuse_programs"].instructions:
        if isinstance(run, RunTask):
            assert len({(action.stage, action.microbatch) for action in run.actions}) <= 1
