"""Two processes with a core each against what `schedules.simulate` says of them.

    pip install "jaxpipe[train]"
    python benchmarks/pipeline.py

Each process is a rank. A round is a step in which every task and the first transfer are timed, from
which `simulate` predicts the time of a step, and one that is timed as a whole; the ratio is the
median over rounds. A step begins with the forward of rank 0, which needs its new weights, and ends
with their update, so steps do not overlap. Needs two cores with nothing else to do.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

RANKS, WIDTH, LAYERS, ROWS, ROUNDS = 2, 512, 4, 256, 8
MICROBATCHES = (4, 8, 16)
SCHEDULES = ("gpipe", "1f1b", "zero_bubble_h1")


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, str(port)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    heads = f"{'transfer ms':>13}{'predicted ms':>14}{'measured ms':>13}{'ratio':>8}"
    print(f"{'schedule':<16}{'M':>4}{heads}")
    for row in zip(*results, strict=True):
        report(*row)


def report(*of_ranks: dict[str, Any]) -> None:
    """One row: each round's costs of both ranks, simulated, and the time the slower one saw."""
    from jaxpipe import schedules

    name, count = of_ranks[0]["schedule"], of_ranks[0]["microbatches"]
    schedule = schedules.build(name, ranks=RANKS, microbatches=count)
    predicted, measured, transfers = [], [], []
    for rounds in zip(*(rank["rounds"] for rank in of_ranks), strict=True):
        of_tasks = [costs_of(of_rank["tasks"]) for of_rank in rounds]
        forward, inputs, weight = (
            tuple(cost[key] for cost in of_tasks) for key in ("forward", "input", "weight")
        )
        # Rank 1 waits for its first task, so the transfer before it is all that is in between.
        transfer = 1e3 * (rounds[1]["first"][0] - rounds[0]["first"][1])
        transfers.append(transfer)
        costs = schedules.Costs(forward, inputs, weight, transfer)
        timeline = schedules.simulate(schedule, costs)
        rest = max(of_rank["rest"] for of_rank in rounds)
        predicted.append(float(schedules.makespan(timeline)) + rest)
        measured.append(max(of_rank["ms"] for of_rank in rounds))
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    figures = map(statistics.median, (transfers, predicted, measured, ratios))
    print(
        "{:<16}{:>4}{:>13.1f}{:>14.1f}{:>13.1f}{:>8.3f}".format(name, count, *figures), flush=True
    )


def work(port: int, rank: int) -> None:
    """One process: its costs and its step times of every row, as JSON."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, rank)
    from jaxpipe import schedules

    rows = []
    for name in SCHEDULES:
        for count in MICROBATCHES:
            schedule = schedules.build(name, ranks=RANKS, microbatches=count)
            rows.append({"schedule": name, "microbatches": count, **measure(schedule, rank)})
    print(json.dumps(rows), flush=True)
    jax.distributed.shutdown()


def measure(schedule: Any, rank: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from jaxpipe import mpmd
    from jaxpipe.mpmd import profiling

    def loss(weights, x):
        for of_stage in weights:
            for w in of_stage:
                x = jnp.tanh(x @ w)
            x = mpmd.mark_stage_end(x)
        return jnp.mean(x**2)

    def step(weights, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule=schedule,
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value

    rng = np.random.default_rng(0)
    shape = (RANKS, LAYERS, WIDTH, WIDTH)
    numbers = np.asarray(rng.normal(size=shape) / WIDTH**0.5, np.float32)
    weights = [list(of_stage) for of_stage in numbers]
    rows = (schedule.num_microbatches, ROWS, WIDTH)
    xs = np.asarray(rng.normal(size=rows), np.float32)
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    mesh = mpmd.MpmdMesh(Mesh(np.array(devices), ("stage",)), "stage")
    compiled = mpmd.mpmd_jit_with_loop(step, mesh).compile(weights, xs)
    weights, _ = compiled(weights, jnp.asarray(xs))
    rounds = []
    for _ in range(ROUNDS):  # both in turn: the machine is not equally fast all the time
        _, times = profiling.timed_step(compiled, weights, xs)
        tasks = {run.name: 1e3 * (end - start) for run, start, end in times if run.actions}
        rest = sum(1e3 * (end - start) for run, start, end in times if not run.actions)
        first = next((start, end) for run, start, end in times if run.actions)
        start = time.perf_counter()
        jax.block_until_ready(compiled(weights, xs))
        ms = 1e3 * (time.perf_counter() - start)
        rounds.append({"tasks": tasks, "rest": rest, "ms": ms, "first": first})
    return {"rounds": rounds[1:]}


def costs_of(times: dict[str, float]) -> dict[str, float]:
    """The medians of a rank's tasks; of fused ones only the sum counts, so any division will do."""

    def median(start: str) -> float:
        found = [ms for task, ms in times.items() if task.startswith(start)]
        return statistics.median(found) if found else 0.0

    fused = median("FusedTask")
    forward = fused / 3 or median("fwd_")
    backward = 2 * fused / 3 or median("bwd_i_") or median("bwd_")
    if any(task.startswith("bwd_w_") for task in times):
        return {"forward": forward, "input": median("bwd_i_") or 2 * fused / 3,
                "weight": median("bwd_w_")}  # fmt: skip
    return {"forward": forward, "input": backward / 2, "weight": backward / 2}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(sys.argv[2])]})
        work(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
