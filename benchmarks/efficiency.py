"""Pipeline efficiency over two processes with a core each, beside torch.distributed.pipelining.

    pip install "jaxpipe[train]" torch
    python benchmarks/efficiency.py

The model is 8 blocks x + gelu(x W1) W2 of width 512 on microbatches of 4 x 256 tokens, in float32,
with SGD. Efficiency is the time of a step in one process over twice its time in two; "/ ideal"
divides it by the schedule's ideal, M v / (M v + 1) for v stages per rank. Two processes share
caches and memory also if they know nothing of each other: "1+1" is a step in one process beside a
copy of it on the other core, and "of 1+1" takes that for the time of one process. The rows of a
round follow each other, so that a machine that slows down slows all of them down. Needs two cores
with nothing else to do; without torch its columns are empty.
"""

import argparse
import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

RANKS, BLOCKS, WIDTH, ROWS, TOKENS = 2, 8, 512, 4, 256
WARMUP_STEPS, STEPS = 2, 3
RESULT = "seconds: "


class Row(NamedTuple):
    """A schedule, by our name and torch's, with its stages per rank."""

    name: str
    torch_name: str
    chunks: int


SCHEDULES = (
    Row("1f1b", "Schedule1F1B", 1),
    Row("interleaved_1f1b", "ScheduleInterleaved1F1B", 2),
    Row("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="efficiency of pipelines over two processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    args = parser.parse_args()
    libraries = ["ours", "torch"] if importlib.util.find_spec("torch") else ["ours"]
    print(f"{'schedule':<26}{'M':>4}  {'ideal':>5}", end="")
    for library in libraries:
        print(f"{library + ': 1, 1+1, 2, s':>28}{'/ ideal':>9}{'of 1+1':>8}", end="")
    print(flush=True)
    for row in SCHEDULES:
        for count in args.microbatches:
            report(row, count, libraries, args.rounds)


def report(row: Row, count: int, libraries: list[str], rounds: int) -> None:
    """Prints one row: the medians over rounds in which the libraries take turns."""
    ideal = 1 / (1 + bubble(row, count))
    kinds = {"one": (1, 1), "copies": (1, RANKS), "ranks": (RANKS, RANKS)}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for library in libraries:
            for kind, (job, processes) in kinds.items():
                seconds = step_seconds(library, row, count, job, processes)
                times.setdefault((library, kind), []).append(seconds)
    print(f"{row.name:<26}{count:>4}  {ideal:5.2f}", end="")
    for library in libraries:
        one, copies, ranks = (statistics.median(times[library, kind]) for kind in kinds)
        print(f"{one:>14.3f}{copies:>7.3f}{ranks:>7.3f}", end="")
        least = RANKS * ranks * ideal
        print(f"{one / least:>9.2f}{copies / least:>8.2f}", end="")
    print(flush=True)


def bubble(row: Row, count: int) -> float:
    """The bubble of a schedule over the work of a rank, if F, I and W take equally long."""
    from jaxpipe import schedules

    schedule = build(row, count)
    costs = schedules.Costs(1, 1, 1)
    work = 3 * count * row.chunks
    return float(schedules.makespan(schedules.simulate(schedule, costs))) / work - 1


def build(row: Row, count: int) -> Any:
    from jaxpipe import schedules

    options = {"chunks": row.chunks} if row.chunks > 1 else {}
    return schedules.build(row.name, ranks=RANKS, microbatches=count, **options)


def step_seconds(library: str, row: Row, count: int, job: int, processes: int) -> float:
    """The median time of a step of `job` processes, or of copies of it, in so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task = json.dumps([library, row, count, job, port])
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    seconds = [_seconds_of(process) for process in running]
    # Only now: a process may still read what another has sent. Process 0 leads, and leaves last.
    for process in reversed(running):
        process.communicate()
    return max(seconds)


def _seconds_of(process: subprocess.Popen) -> float:
    """Returns what a process measured, from the line that it prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(RESULT):
            return float(line.removeprefix(RESULT))
    raise RuntimeError(f"{process.args} has ended with {process.wait()} and measured nothing.")


def work(rank: int, task: str) -> None:
    """One process: prints the median seconds of a step."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    library, row, count, processes, port = json.loads(task)
    run = {"ours": jaxpipe_step, "torch": torch_step}[library]
    step = run(Row(*row), count, rank, processes, port)
    for _ in range(WARMUP_STEPS):
        step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    print(f"{RESULT}{statistics.median(times)}", flush=True)
    sys.stdin.read()
    os._exit(0)  # neither library has to agree on how to end


def jaxpipe_step(row: Row, count: int, rank: int, processes: int, port: int) -> Any:
    """Returns a step of the MPMD engine; of a plain scan over microbatches in one process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from jaxpipe import mpmd
    from jaxpipe.cli.process import keep_freed_memory

    keep_freed_memory()  # as `jaxpipe train` does
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)

    def loss(weights, x):
        for i, (into, out) in enumerate(weights, 1):
            x = x + jax.nn.gelu(x @ into) @ out
            if i % (BLOCKS // (RANKS * row.chunks)) == 0:
                x = mpmd.mark_stage_end(x)
        return jnp.mean(x**2)

    def step(weights, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule=build(row, count),
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, grads), value

    def plain_step(weights, xs):
        zeros = jax.tree.map(jnp.zeros_like, weights)

        def add(total, x):
            value, grads = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(jnp.add, total, grads), value

        grads, values = jax.lax.scan(add, zeros, xs)
        return jax.tree.map(lambda w, g: w - 1e-4 * g, weights, grads), values.sum()

    weights, xs = numbers(count)
    if processes == 1:
        compiled = jax.jit(plain_step, donate_argnums=0).lower(weights, xs).compile()
        state = jax.tree.map(jnp.asarray, weights)
    else:
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
        mesh = mpmd.MpmdMesh(Mesh(np.array(devices), ("stage",)), "stage")
        compiled = mpmd.mpmd_jit_with_loop(step, mesh, donate_argnums=0).compile(weights, xs)
        state = weights
    xs = jnp.asarray(xs)

    def run() -> None:
        nonlocal state
        state, value = compiled(state, xs)
        jax.block_until_ready((state, value))

    return run


def torch_step(row: Row, count: int, rank: int, processes: int, port: int) -> Any:
    """Returns a step of torch.distributed.pipelining; of a plain loop in one process."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import distributed  # pyright: ignore[reportMissingImports]
    from torch.distributed import pipelining  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    weights, xs = numbers(count)

    class Blocks(torch.nn.Module):
        def __init__(self, chosen: range):
            super().__init__()
            pairs = [torch.tensor(w) for i in chosen for w in weights[i]]
            self.weights = torch.nn.ParameterList(pairs)

        def forward(self, x):
            for into, out in zip(self.weights[::2], self.weights[1::2], strict=True):
                x = x + torch.nn.functional.gelu(x @ into, approximate="tanh") @ out
            return x

    def loss(y, target):
        del target
        return (y**2).mean()

    data = torch.tensor(xs)
    if processes == 1:
        model = Blocks(range(BLOCKS))
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4)

        def run() -> None:
            sgd.zero_grad()
            for x in data:
                loss(model(x), None).backward()
            sgd.step()

        return run

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=processes)
    per_stage = BLOCKS // (RANKS * row.chunks)
    stages, parameters = [], []
    for chunk in range(row.chunks):
        index = chunk * RANKS + rank
        module = Blocks(range(index * per_stage, (index + 1) * per_stage))
        parameters += module.parameters()
        stages.append(
            pipelining.PipelineStage(module, index, RANKS * row.chunks, torch.device("cpu"))
        )
    cls = getattr(pipelining, row.torch_name)
    schedule = cls(stages[0] if row.chunks == 1 else stages, count, loss_fn=loss)
    sgd = torch.optim.SGD(parameters, lr=1e-4)
    batch = data.flatten(0, 1)

    def run() -> None:
        sgd.zero_grad()
        schedule.step(*([batch] if rank == 0 else []), target=batch)
        sgd.step()

    return run


def numbers(count: int) -> tuple[list[tuple[Any, Any]], Any]:
    """The weights of all blocks, and the microbatches [M, 4, 256, 512], the same everywhere."""
    import numpy as np

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return np.asarray(rng.normal(size=shape) / math.sqrt(WIDTH), np.float32)

    weights = [(normal(WIDTH, WIDTH), normal(WIDTH, WIDTH)) for _ in range(BLOCKS)]
    return weights, normal(count, ROWS, TOKENS, WIDTH)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(int(sys.argv[2]), sys.argv[3])
    else:
        main()
