"""Draws the pictures of docs/architecture.md: `.venv/bin/python docs/_pictures.py`.

Three are computed by the code that they explain, so they change with it; a test compares the files
with what this script draws.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from _drawing import WIDTH, Picture

from jaxpipe import mpmd, schedules
from jaxpipe.schedules import builders, lock_step
from jaxpipe.sharding import make_mesh
from jaxpipe.spmd import stepwise
from jaxpipe.train.checkpoint import _digests, _sealing

FOLDER = Path(__file__).parent / "pictures"


def circular_ticks() -> str:
    """Draws three ticks of a circular pipeline with S = 3, R = 2, M = 6."""
    S, R, M = 3, 2, 6
    ticks = builders.circular_ticks(S, R, M)
    picture = Picture(f"circular: {S} ranks, {R} repeats, {M} microbatches, {ticks} ticks", 792)
    left, cell = 90, 60
    for t in range(ticks):
        picture.text(left + cell * (t + 0.5), 62, f"tick {t}", "small", "middle")
    for rank in range(S):
        y = 70 + 32 * rank
        picture.text(left - 12, y + 19, f"rank {rank}", "", "end")
        picture.box(left, y, cell * ticks, 28, "lane")
        for t in range(ticks):
            if work := _visit(t, rank, (S, R, M)):
                microbatch, repeat = work
                kind = ("blue", "orange")[repeat]
                picture.labelled(left + cell * t, y, cell - 2, 28, kind, f"{microbatch}")
    picture.box(left, 174, 14, 14, "blue")
    picture.text(left + 20, 186, "microbatch in repeat 0: stages 0, 1, 2")
    picture.box(left + 280, 174, 14, 14, "orange")
    picture.text(left + 300, 186, "microbatch in repeat 1: stages 3, 4, 5")
    picture.box(left + 560, 174, 14, 14, "lane")
    picture.text(left + 580, 186, "bubble")
    notes = {
        4: "Microbatches enter: rank 0 takes one from its stream, and the stream moves down.",
        7: "Rank 0 has begun repeat 1. Results of rank 2 wait on rank 0 for their next repeat.",
        10: "Microbatches leave: rank 2 writes results into the stream, which moves down.",
    }
    for row, (t, note) in enumerate(notes.items()):
        picture.text(20, 226 + 192 * row, f"Tick {t}. {note}", "bold")
        _circular_tick(picture, 240 + 192 * row, t, (S, R, M))
    return picture.svg()


def _visit(t: int, rank: int, sizes: tuple[int, int, int]) -> tuple[int, int] | None:
    """Returns the microbatch and the repeat of a rank in a tick; None in a bubble."""
    num_repeats = sizes[1]
    microbatches, repeats = stepwise.microbatch_and_repeat_ids(t, stepwise.PipelineShape(*sizes, 1))
    microbatch, repeat = int(microbatches[rank]), int(repeats[rank])
    return (microbatch, repeat) if t >= rank and repeat < num_repeats else None


def _stream(until: int, sizes: tuple[int, int, int]) -> list[list[str]]:
    """Returns the stream of every rank before a tick: `in m`, `out m`, or "" if it is used."""
    S, _, M = sizes
    n, end = M // S, builders.circular_ticks(*sizes)
    stream = [[f"in {rank * n + i}" for i in range(n)] for rank in range(S)]
    for t in range(until):
        if M <= t < end - M:
            continue
        slot = t % n
        moved = [stream[(rank + 1) % S][slot] for rank in range(S)]
        work = _visit(t, S - 1, sizes)
        moved[-1] = f"out {work[0]}" if work and t >= end - M else ""
        for rank in range(S):
            stream[rank][slot] = moved[rank]
    return stream


def _circular_tick(picture: Picture, y: float, t: int, sizes: tuple[int, int, int]) -> None:
    """Draws the ranks in tick `t`: what they run, and what moves at the end of it."""
    S, _, M = sizes
    enters, leaves = t < M, t >= builders.circular_ticks(*sizes) - M
    moves = enters or leaves
    stream, wide = _stream(t, sizes), 190
    for rank in range(S):
        x = 90 + 300 * rank
        picture.box(x, y, wide, 120, "line")
        picture.text(x + 10, y + 18, f"rank {rank}", "bold")
        microbatch, repeat = _visit(t, rank, sizes) or (0, 0)
        picture.labelled(
            *(x + 10, y + 28, wide - 20, 40, ("blue", "orange")[repeat]),
            f"stage {repeat * S + rank}",
            f"microbatch {microbatch}, repeat {repeat}",
        )
        picture.text(x + 10, y + 88, "stream", "small")
        for i, item in enumerate(stream[rank]):
            used = item.startswith("out") or (item and not leaves)
            kind = "green" if item.startswith("out") else "yellow" if used else "lane"
            picture.labelled(x + 60 + 62 * i, y + 76, 58, 18, kind, item if used else "used")
        if rank < S - 1:
            picture.text(x + wide + 55, y + 40, "result", "small", "middle")
            picture.arrow((x + wide, y + 48), (x + 300, y + 48))
            if moves:
                picture.text(x + wide + 55, y + 78, f"slot {t % (M // S)}", "small", "middle")
                picture.arrow((x + 300, y + 85), (x + wide, y + 85), dashed=True)
    if enters:
        picture.arrow((74, y + 85), (74, y + 48), (90, y + 48))
        picture.text(64, y + 70, "takes", "small", "end")
    waiting = _stored(t, sizes)
    if waiting:
        listed = ", ".join(map(str, waiting))
        picture.text(100, y + 112, f"stored for repeat 1: {listed}", "small")
    last = 90 + 300 * (S - 1) + wide
    if leaves:
        picture.arrow((last, y + 48), (last + 16, y + 48), (last + 16, y + 85), (last, y + 85))
        picture.text(last + 24, y + 70, "writes", "small")
    else:
        picture.arrow((last, y + 48), (last + 16, y + 48), (last + 16, y + 134), (40, y + 134),
                      (40, y + 108), (90, y + 108))  # fmt: skip
        picture.text(WIDTH / 2, y + 147, "result of the last rank, to rank 0", "small", "middle")


def _stored(t: int, sizes: tuple[int, int, int]) -> list[int]:
    """Returns the microbatches whose results wait on rank 0 in a tick."""
    S, R, _ = sizes
    finished = [_visit(before, S - 1, sizes) for before in range(t)]
    taken = [_visit(now, 0, sizes) for now in range(t)]
    return [
        work[0]
        for work in finished
        if work and work[1] < R - 1 and (work[0], work[1] + 1) not in taken
    ]


def scheduled_buffers() -> str:
    """Draws the slots of the buffers of `scheduled` for 1F1B on 3 ranks with 4 microbatches."""
    S, M = 3, 4
    costs = schedules.Costs(forward=1, input=1, weight=1)
    ticks = lock_step.to_lock_step(builders.one_f_one_b(S, M), costs)
    tables = lock_step.tick_tables(ticks)
    kinds = {
        "inputs": ("activation", "green"),
        "residuals_for_backward": ("residuals", "purple"),
        "cotangents": ("cotangent", "yellow"),
    }
    assert tables.num_slots["wgrad_residuals"] == 0
    rows = [(name, slot) for name in kinds for slot in range(tables.num_slots[name])]
    each = 42 + 20 * len(rows)
    count, cell, left = lock_step.num_ticks(ticks), 104, 150
    picture = Picture(
        f"scheduled: 1F1B on {S} ranks, {M} microbatches, in {count} ticks", 106 + each * S
    )
    x = 150
    for kind, label in (
        ("blue", "forward F"),
        ("orange", "backward B"),
        *((kind, label) for label, kind in kinds.values()),
    ):
        picture.box(x, 46, 14, 14, kind)
        picture.text(x + 20, 58, label)
        x += 150
    for t in range(count):
        picture.text(left + cell * (t + 0.5), 84, f"tick {t}", "small", "middle")
    lives = list(_lives(tables))
    for rank in range(S):
        y = 94 + each * rank
        picture.text(left - 12, y + 19, f"rank {rank} runs", "bold", "end")
        picture.box(left, y, cell * count, 28, "lane")
        for t in range(count):
            for phase, kind, start in (
                (tables.forward, "blue", 0),
                (tables.backward, "orange", 0.4),
            ):
                if (microbatch := phase.microbatch[t][rank]) >= 0:
                    at = left + cell * (t + start)
                    picture.labelled(at, y, cell * 0.4 - 2, 28, kind, f"{microbatch}")
        for i, (name, slot) in enumerate(rows):
            top = y + 32 + 20 * i
            picture.text(left - 12, top + 13, f"{kinds[name][0]} {slot}", "small", "end")
            picture.box(left, top, cell * count, 17, "lane")
            for life in lives:
                if life[:3] == (rank, name, slot):
                    start, end, microbatch = life[3:]
                    at, wide = left + cell * start, cell * (end - start)
                    picture.box(at, top, wide, 17, kinds[name][1])
                    picture.text(at + wide / 2, top + 13, f"{microbatch}", "small on", "middle")
    return picture.svg()


def _lives(tables: lock_step.TickTables) -> Iterator[tuple[int, str, int, float, float, int]]:
    """Yields (rank, buffer, slot, start, end, microbatch) of every array, in ticks.

    It follows the tables as the engine does. A tick begins with F, has B in its middle, and ends
    with the hand-over.
    """
    num_ranks = len(tables.forward.microbatch[0])
    made: dict[tuple[int, str, int], tuple[float, int]] = {}
    for t in range(len(tables.forward.microbatch)):
        for rank in range(num_ranks):
            row = {name: table[t][rank] for name, table in tables.forward._asdict().items()}
            if row["microbatch"] >= 0:
                if row["input_slot"] >= 0:
                    yield _ended(made, (rank, "inputs", row["input_slot"]), t + 0.2)
                slot = row["residuals_for_backward_slot"]
                made[rank, "residuals_for_backward", slot] = t + 0.2, row["microbatch"]
                if row["cotangent_slot"] >= 0:  # the loss follows the F of the last stage
                    made[rank, "cotangents", row["cotangent_slot"]] = t + 0.3, row["microbatch"]
            row = {name: table[t][rank] for name, table in tables.backward._asdict().items()}
            if row["microbatch"] >= 0:
                yield _ended(made, (rank, "cotangents", row["cotangent_slot"]), t + 0.6)
                slot = row["residuals_for_backward_slot"]
                yield _ended(made, (rank, "residuals_for_backward", slot), t + 0.6)
        for name, phase, arrivals in (
            ("inputs", tables.forward, tables.activation_arrivals),
            ("cotangents", tables.backward, tables.cotangent_arrivals),
        ):
            for offset, table in arrivals.items():
                for rank, slot in enumerate(table[t]):
                    if slot >= 0:
                        sender = (rank - offset) % num_ranks
                        made[rank, name, slot] = t + 0.9, phase.microbatch[t][sender]
    assert not made, "every array is read"


def _ended(made: dict, where: tuple[int, str, int], end: float) -> tuple:
    start, microbatch = made.pop(where)
    return *where, start, end, microbatch


# By what the text of an instruction contains, the first that fits.
_BARS = {
    "send[": "yellow",
    "rec": "yellow",
    "delete[": "purple",
    "Fused": "green",
    "fwd": "blue",
    "bwd": "orange",
}


def step(weights, xs):
    def loss(weights, x):
        first, second = weights
        x = mpmd.mark_stage_end(jnp.tanh(x * first))
        return jnp.sum(x * second)

    return mpmd.treduce(
        lambda x: jax.grad(loss)(weights, x),
        xs,
        schedule="1f1b",
        operation=mpmd.Add,
    )


def mpmd_passes() -> str:
    """Draws the passes of `mpmd`, a small program before them, and what two of them make of it."""
    groups = mpmd.MpmdMesh(make_mesh({"stage": 2}, devices=jax.devices()[:2]), "stage")
    seen: dict[str, str] = {}
    traced = mpmd.mpmd_jit_with_loop(step, groups).trace((jnp.float32(1),) * 2, jnp.ones((2, 3)))
    traced.lower(observe=lambda name, result: seen.update({name: str(result)}))
    names = list(seen)
    unrolled, final = "unroll_schedule", names[-1]
    source = [line for line in inspect.getsource(step).splitlines() if line]
    before = [_short(i) for i in _instructions(seen[unrolled])]
    after = [[_short(i) for i in _instructions(seen[final]) if _rank(i) == r] for r in range(2)]
    height = 212 + 15 * (max(len(source), _size(before)) + max(map(_size, after)))
    picture = Picture("mpmd: the passes, and a step of two stages before and after them", height)
    for y, row in ((46, names[:7]), (80, names[7:])):
        x = 20.0
        for name in row:
            wide = 10 + 7.4 * len(name)
            kind = "blue" if name in (unrolled, final) else "lane"
            picture.labelled(x, y, wide, 24, kind, f"`{name}")
            x += wide + 14
            if name != final:
                picture.arrow((x - 14, y + 12), (x, y + 12))
    for i, (fill, label) in enumerate(
        [("blue", "F"), ("orange", "B"), ("green", "F and B"), ("yellow", "transfer"),
         ("purple", "delete")]
    ):  # fmt: skip
        picture.box(20 + 84 * i, 118, 5, 14, fill)
        picture.text(30 + 84 * i, 130, label)
    top = 158
    picture.text(20, top, "The function", "bold")
    _listing(picture, 20, top + 20, [[line] for line in source], "line")
    picture.text(480, top, f"After {unrolled}: tasks in the order of the schedule", "bold")
    _listing(picture, 480, top + 20, before)
    top += 40 + 15 * max(len(source), _size(before))
    for rank in range(2):
        x = 20 + 460 * rank
        picture.text(x, top, f"After {final}: rank {rank}", "bold")
        _listing(picture, x, top + 20, after[rank])
    return picture.svg()


def _instructions(printed: str) -> list[str]:
    """Returns the instructions of a printed program, one text each."""
    body = printed.split("let\n", 1)[1].rsplit("\n  in ", 1)[0]
    return re.split(r"\n(?=    \S)(?!    \])", body)


def _rank(instruction: str) -> int:
    return int(re.search(r"\bmpmd_idx=(\d+)", instruction)[1])


def _short(instruction: str) -> list[str]:
    """Returns an instruction in one or two lines, without what the picture does not explain."""
    words = " ".join(instruction.split())
    words = re.sub(r"donate_invars=\([^)]*\) |num_steps=\d+ |task_info=.*(?=mpmd_idx)", "", words)
    words = words.replace("loop=0 ", "")
    words = words.replace("[ ", "[").replace(" ]", "]")
    return re.split(r"(?<= =) (?=\w*task\w*\[)", words)


def _size(blocks: list[list[str]]) -> int:
    return sum(map(len, blocks))


def _listing(picture: Picture, x: float, y: float, blocks: list[list[str]], kind: str = "") -> None:
    """Writes blocks of lines one below the other; a bar shows what kind of instruction each is."""
    for lines in blocks:
        text = " ".join(lines)
        bar = kind or next((fill for word, fill in _BARS.items() if word in text), "lane")
        if bar != "line":
            picture.box(x, y - 10, 5, 15 * len(lines) - 3, bar)
        for i, line in enumerate(lines):
            picture.text(x + 10 + 14 * (i > 0), y, line, "mono small")
            y += 15


def checkpoint_life() -> str:
    """Draws how a checkpoint is written, checked at the next start, and removed."""
    unsealed = f"120.{_sealing.UNSEALED_SUFFIX}"
    picture = Picture("The life of the checkpoint of step 120", 560)
    box, y = picture.labelled, 76
    picture.text(20, 62, "Save", "bold")
    box(20, y, 200, 56, "yellow", "written", f"`{unsealed}.orbax-…")
    box(280, y, 200, 56, "yellow", "complete", f"`{unsealed}")
    box(540, y, 200, 56, "yellow", "on the disk, with", f"`{_digests.DIGESTS_FILE}")
    box(800, y, 180, 56, "green", "a checkpoint", "`120")
    for x, name in ((220, "rename"), (480, "digest"), (740, "rename")):
        picture.arrow((x, y + 28), (x + 60, y + 28))
        picture.text(x + 28, y + 20, name, "small", "middle")
    box(
        280, 186, 460, 44, "lane", "partial folders that a kill leaves", "removed at the next start"
    )
    for x in (380, 640):
        picture.arrow((x, y + 56), (x, 186), dashed=True)
    picture.arrow((120, y + 56), (120, 208), (280, 208), dashed=True)
    picture.text(130, 200, "kill", "small")
    box(800, 186, 180, 44, "lane", "deleted by way of", f"`{_sealing.REMOVED_FOLDER}/120")
    picture.arrow((890, y + 56), (890, 186))
    picture.text(20, 276, "Start: newest step first", "bold")
    y = 290
    questions = (
        ("can be read?", "RunError: nothing is changed", "red"),
        ("complete?", "renamed to 120.incomplete", "purple"),
        ("has digests?", "refused, unless allow_unverified", "red"),
        ("as its digests say?", "renamed to 120.damaged", "purple"),
        ("of this model?", "ValueError: leaves that differ", "red"),
    )
    for i, (question, answer, kind) in enumerate(questions):
        top = y + 42 * i
        box(20, top, 240, 30, "blue", question)
        picture.arrow((260, top + 15), (340, top + 15))
        picture.text(298, top + 10, "no", "small", "middle")
        box(340, top, 300, 30, kind, answer)
        picture.arrow((140, top + 30), (140, top + 42))
        if kind == "purple":
            picture.arrow((640, top + 15), (700, top + 15))
            box(700, top, 280, 30, "lane", "the step before it is next")
    box(20, y + 210, 240, 44, "green", "restored", "into the shardings of this run")
    return picture.svg()


PICTURES = {
    "circular": circular_ticks,
    "scheduled": scheduled_buffers,
    "mpmd": mpmd_passes,
    "checkpoint": checkpoint_life,
}

if __name__ == "__main__":
    from jaxpipe.cli import emulate_devices

    emulate_devices(2)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
