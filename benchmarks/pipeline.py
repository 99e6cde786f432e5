"""Two processes with a core each against what `schedules.simulate` says of them.

    pip install "jaxpipe[train]"
    python benchmarks/pipeline.py

Each process is a rank. Tasks are timed one by one, in a step of their own; from their medians
`simulate` predicts the time of a step, which is then measured, many steps in a row. A step begins
with the forward of rank 0, which needs its new weights, and ends with their update, so steps do not
overlap. Needs two cores with nothing else to do.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

RANKS, WIDTH, LAYERS, ROWS, STEPS = 2, 512, 4, 256, 12
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
    print(f"{'schedule':<16}{'M':>4}{'predicted ms':>14}{'measured ms':>13}{'ratio':>8}")
    for row in zip(*results, strict=True):
        report(*row)


def report(*of_ranks: dict[str, Any]) -> None:
    """One row: the costs of both ranks, simulated, and the time that the slower one has seen."""
    from jaxpipe import schedules

    name, count = of_ranks[0]["schedule"], of_ranks[0]["microbatches"]
    schedule = schedules.build(name, ranks=RANKS, microbatches=count)
    costs = [rank["costs"] for rank in of_ranks]
    forward, inputs, weight = (
        tuple(cost[key] for cost in costs) for key in ("forward", "input", "weight")
    )
    timeline = schedules.simulate(schedule, schedules.Costs(forward, inputs, weight))
    predicted = schedules.makespan(timeline) + max(rank["rest"] for rank in of_ranks)
    measured = max(rank["ms"] for rank in of_ranks)
    shares = f"{predicted:>14.1f}{measured:>13.1f}{measured / predicted:>8.3f}"
    print(f"{name:<16}{count:>4}{shares}", flush=True)


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

    def loss(weights, x):
        for of_stage in weights:
            for w in of_stage:
                x = jnp.tanh(x @ w)
            x = mpmd.mark_stage_end(x)
        return jnp.mean(x**2)

    def step(weights, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule=schedule
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
    times = mpmd.collect_task_times_ms(compiled, weights, xs, repeats=5)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        weights, _ = jax.block_until_ready(compiled(weights, xs))
        seconds.append(time.perf_counter() - start)
    rest = sum(ms for task, ms in times.items() if "@" in task)
    ms = 1e3 * statistics.median(seconds[2:])
    return {"costs": costs_of(times), "rest": rest, "ms": ms}


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
