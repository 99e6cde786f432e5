"""The mixture of experts of examples/equinox_mixture.py at sizes that a team of JAX publishes.

    pip install "jaxpipe[train,equinox,aot]"
    python benchmarks/mixture.py tpus [row ...]

    pip install "jaxpipe[train,equinox,aot-gpu]"
    JAX_PLATFORMS=cpu python benchmarks/mixture.py gpus [row ...]

    python benchmarks/mixture.py plans

Compiles a train step of every row through `jaxpipe.pipeline` for devices that are not there, one
after the other, some minutes each on two cores. Everything here is compiled, and none of it ever
ran: times of TPUs are sums of XLA:TPU's own estimates of cycles, to which kernels add their
products at half of the peak, and those of GPUs a roofline of the program, which is a lower bound.
`hidden` is the share of the time of collectives beside which a device computes.

Sizes and measurements are those of Marin's reports, which ran on devices: marin-community/marin,
issues 6532 and 7024, pull request 6534 and experiments/grug/moe_pipeline/README.md; the sizes of
`6.1B` and `40B` are the defaults of the scripts of pull request 6534. Their models have more: gated
norms, quantile balancing of experts. `6.1B` and `40B` are their names: with three matrices for an
expert these have 3.3 and 20.3 billion parameters.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import equinox as eqx
import equinox_mixture as example  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe.models.layers import GroupedMatmul, megablox, pallas_gpu_grouped_matmul
from jaxpipe.xla import compile_only_devices, totals
from jaxpipe.xla.compile_report import CompileReport

LARGE = example.Sizes(
    vocab=128_256,
    width=2560,
    layers=26,
    heads=20,
    kv_heads=5,
    head_width=128,
    experts=256,
    chosen=4,
    expert_width=1280,
    shared_width=2560,
    window=2048,
    dtype=jnp.bfloat16,
)
SMALL = example.Sizes(
    vocab=32_768,
    width=1536,
    layers=24,
    heads=8,
    kv_heads=8,
    head_width=192,
    experts=8,
    chosen=2,
    expert_width=3072,
    shared_width=3072,
    dtype=jnp.bfloat16,
)
MIDDLE = example.Sizes(
    vocab=32_768,
    width=2048,
    layers=24,
    heads=8,
    kv_heads=8,
    head_width=256,
    experts=32,
    chosen=2,
    expert_width=4096,
    shared_width=4096,
    dtype=jnp.bfloat16,
)


@dataclass(frozen=True)
class Row:
    """What is compiled: a model, the devices, and how they are used."""

    sizes: example.Sizes
    devices: str
    mesh: dict[str, int]
    schedule: str | None
    rows: int
    tokens: int
    microbatches: int
    dcn: dict[str, int] = field(default_factory=dict)  # the axes whose devices are in other slices
    optimizer: str = "muon"
    options: dict[str, Any] = field(default_factory=dict)


# A stage stores the inputs of its layers, and computes one of them at a time again.
BY_LAYER = {"remat": "none", "layer_remat": "full"}
V_SHAPE = 1, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 1  # layers of stages, as Marin has them
LARGE_ROWS = Row(LARGE, "h100:8x8", {"stage": 8, "expert": 8}, "dualpipev", 256, 8192, 32)
SMALL_ROWS = Row(SMALL, "h100:8", {"stage": 8}, "1f1b", 64, 1024, 8)
MIDDLE_ROWS = Row(
    MIDDLE,
    "v6e:2x4",
    {"expert": 8},
    "1f1b",
    64,
    1024,
    8,
    dcn={"stage": 4},
    options=BY_LAYER | {"compiler_options": {}},  # libtpu's own, with which compiling takes less
)
ROW_WISE = {"row_wise": True}  # the rows of a device do not affect those of others
# The default of Marin's library; the reports do not say what was measured with.
ROOM = replace(LARGE, room=1.25)
GPUS = {
    "67B dualpipev, adamw": replace(
        LARGE_ROWS, sizes=ROOM, optimizer="adamw", options={"layers_per_stage": V_SHAPE}
    ),
    "67B zero bubble": replace(LARGE_ROWS, sizes=ROOM, schedule="zero_bubble_h1", options=BY_LAYER),
    "67B 1f1b": replace(LARGE_ROWS, sizes=ROOM, schedule="1f1b", options=BY_LAYER),
    "67B 1f1b, none dropped": replace(LARGE_ROWS, schedule="1f1b", options=BY_LAYER),
    "6.1B pp 8": SMALL_ROWS,
    "6.1B pp 4, fsdp 2": replace(
        SMALL_ROWS, mesh={"stage": 4, "fsdp": 2}, options=ROW_WISE | {"gather": "once"}
    ),
    "6.1B pp 2, ep 4": replace(SMALL_ROWS, mesh={"stage": 2, "expert": 4}, options=BY_LAYER),
}
TPUS = {
    "40B 1f1b": MIDDLE_ROWS,
    "40B zero bubble": replace(MIDDLE_ROWS, schedule="zero_bubble_h1"),
    "40B circular": replace(MIDDLE_ROWS, schedule="circular"),
}
MEASURED = {
    "67B": "JaxPP's DualPipeV on 64 H100: 59.2 GB, 3.48 s, 603,327 tokens/s, 19.46% MFU, AdamW",
    "6.1B": "8 H100: FSDP and EP 57,056 tokens/s; GPipe from the host 8,077 (pp 8, M 8), "
    "7,987 (pp 8, M 16), 12,150 (pp 4, fsdp 2, M 8)",
    "40B": "v6e-32: a pipeline in one program has 1.22 times the throughput of FSDP",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="a mixture of experts, compiled ahead of time")
    parser.add_argument("what", choices=("gpus", "tpus", "plans"))
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(GPUS | TPUS)}")
    args = parser.parse_args()
    known = {"gpus": GPUS, "tpus": TPUS, "plans": {}}[args.what]
    if unknown := [name for name in args.rows if name not in known]:
        rows = ", ".join(known) or "none"
        parser.error(f"{unknown} are no rows of {args.what}. Its rows are {rows}.")
    for line in plans() if args.what == "plans" else of_devices(known, args.rows):
        print(line, flush=True)


def of_devices(rows: dict[str, Row], names: list[str]) -> Iterator[str]:
    yield "GB (1e9 bytes) of a device: peak, results of collectives, and those between hosts or"
    yield "slices (far); seconds of a step"
    yield (
        f"{'row':<23}{'chips':>5} {'batch':<11}{'M':>3}{'peak':>7}{'busy':>7}{'kernels':>8}"
        f"{'exposed':>8}{'bubble':>7}{'step':>7}{'tokens/s':>10}  {'AG / RS / AR / CP':<25}"
        f"{'far':>6}{'hidden':>8}{'compiled':>10}"
    )
    for name in names or rows:
        yield line(name, rows[name])
    yield from measured(names or rows)


def line(name: str, row: Row) -> str:
    """Compiles the train step of a row. Returns its line."""
    pipe, params = make(row)
    batch = {"tokens": jax.ShapeDtypeStruct((row.rows, row.tokens + 1), jnp.int32)}
    optimizer = optax.adamw(1e-3) if row.optimizer == "adamw" else example.muon(1e-3)
    start = f"{name:<23}{pipe.mesh.size:>5} {f'{row.rows} x {row.tokens}':<11}{row.microbatches:>3}"
    try:
        report = pipe.compile(params, batch, optimizer=optimizer)
    except jax.errors.JaxRuntimeError as error:  # XLA:TPU refuses what does not fit
        return f"{start}  {' '.join(str(error).split())[:120]}"
    peak = f"{report.memory.peak_bytes / 1e9:>7.1f}"
    return f"{start}{peak}{figures(row, report)}{report.compile_seconds:>8.0f} s"


def figures(row: Row, report: CompileReport) -> str:
    moved, time = totals(report.audit), report.step_time
    assert time is not None
    hidden = 1 - time.exposed / sum(time.transfer_seconds.values())
    kernels = time.busy_seconds["kernels"]
    return (
        f"{time.busy - kernels:>7.2f}{kernels:>8.2f}{time.exposed:>8.2f}"
        f"{time.bubble_seconds:>7.2f}{time.seconds:>7.2f}"
        f"{row.rows * row.tokens / time.seconds:>10,.0f}  {gigabytes(moved):<25}"
        f"{across(moved):>6.1f}{hidden:>8.0%}"
    )


def gigabytes(moved: dict[str, Any]) -> str:
    kinds = "all-gather", "reduce-scatter", "all-reduce", "collective-permute"
    sizes = [moved[kind].result_bytes / 1e9 if kind in moved else 0.0 for kind in kinds]
    return " ".join(f"{size:5.1f}" for size in sizes)


def across(moved: dict[str, Any]) -> float:
    """Returns the GB that cross the network between hosts of GPUs or slices of TPUs."""
    return sum(total.across_slices_bytes for total in moved.values()) / 1e9


def measured(names: Iterable[str]) -> Iterator[str]:
    for model in dict.fromkeys(name.split()[0] for name in names):
        yield f"{model}, measured by Marin: {MEASURED[model]}"


def make(row: Row) -> tuple[Any, Any]:
    """Returns the pipeline of a row, and its parameters as shapes."""
    devices = compile_only_devices(row.devices, math.prod(row.dcn.values()))
    mesh = jp.make_mesh(row.mesh, row.dcn, devices=devices)
    shards = row.mesh.get("expert", 1)
    kernel = on_share(pallas_gpu_grouped_matmul() if "h100" in row.devices else megablox(), shards)
    decoder = eqx.filter_eval_shape(example.make_decoder, row.sizes, mesh, kernel)
    model, params = example.make_model(decoder)
    how = {"schedule": row.schedule, "microbatches": row.microbatches} | row.options
    return jp.pipeline(model, mesh=mesh, param_specs=expert_spec, **how), params


def expert_spec(path: str, leaf: Any) -> P | None:
    """As the example's, with `fsdp`: it gathers one dim of each expert where a layer reads it."""
    return P("expert", "fsdp") if leaf.ndim == 3 else None


def on_share(kernel: GroupedMatmul, shards: int) -> GroupedMatmul:
    """Returns a kernel with a name by which its time is estimated: it skips rows of no group."""

    def grouped_matmul(rows: Any, weights: Any, group_sizes: Any) -> Any:
        with jax.named_scope(f"rows_1_of_{shards}"):
            return kernel(rows, weights, group_sizes)

    return grouped_matmul


def plans() -> Iterator[str]:
    """What `jaxpipe.plan` says of the model, and of the trainer's that is most like it.

    The trainer's has no expert that every token has.
    """
    large = replace(LARGE_ROWS, sizes=ROOM)
    for name, row in (("67B", large), ("6.1B", SMALL_ROWS), ("40B", MIDDLE_ROWS)):
        slices = math.prod(row.dcn.values())
        sizes = dict(row.mesh) | row.dcn
        fixed = {f"ici_{AXES[axis]}_parallelism": size for axis, size in row.mesh.items()}
        fixed |= {f"dcn_{AXES[axis]}_parallelism": size for axis, size in row.dcn.items()}
        fixed |= {"num_pipeline_microbatches": row.microbatches}
        keys, batch = trainer_keys(row.sizes), (row.rows, row.tokens)
        yield f"{name}, {row.rows} x {row.tokens} on {slices} x {row.devices}"
        yield f"  own model: {answer(partial(own_plan, row))}"
        like = partial(jp.plan, keys, row.devices, *batch, num_slices=slices, num_plans=1)
        yield f"  trainer's: {answer(like)}"
        layout = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        yield f"  trainer's, {layout}: {answer(partial(like, **fixed))}"


AXES = {"stage": "pipeline", "expert": "expert", "fsdp": "fsdp"}


def answer(make_plan: Callable[[], Any]) -> str:
    """Returns a plan in words, or why there is none."""
    try:
        best = make_plan().best
    except ValueError as error:
        return " ".join(str(error).split())
    layout = best.settings.get("mesh") or {
        key.removesuffix("_parallelism"): value
        for key, value in best.settings.items()
        if key.endswith("_parallelism") and value > 1
    }
    keys = "schedule", "pipeline_schedule", "pipeline_engine"
    schedule = next((best.settings[key] for key in keys if best.settings.get(key)), "none")
    axes = ", ".join(f"{axis} {size}" for axis, size in layout.items())
    figures = f"{best.time.seconds:.2f} s, {best.memory.total / 1e9:.1f} GB"
    return f"{figures}, {schedule.replace('none', 'no pipeline')}, {axes}"


def own_plan(row: Row) -> Any:
    def make(mesh: Mesh | None) -> tuple[jp.Model, Any]:
        return example.make_model(eqx.filter_eval_shape(example.make_decoder, row.sizes, mesh))

    tokens = jax.ShapeDtypeStruct((row.rows, row.tokens + 1), jnp.int32)
    fixed: dict[str, Any] = {"mesh": dict(row.mesh) | row.dcn, "microbatches": row.microbatches}
    fixed |= {"param_specs": example.expert_spec, "example": {"tokens": tokens}, "num_plans": 1}
    slices = math.prod(row.dcn.values())
    return jp.plan(make, row.devices, row.rows, num_slices=slices, schedule="1f1b", **fixed)


def trainer_keys(sizes: example.Sizes) -> dict[str, Any]:
    """Returns keys of `jaxpipe train` for a model of these sizes."""
    return {
        "model_name": "qwen3-30b-a3b",
        "base_emb_dim": sizes.width,
        "base_num_decoder_layers": sizes.layers,
        "base_num_query_heads": sizes.heads,
        "base_num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "vocab_size": sizes.vocab,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.chosen,
        "base_mlp_dim": sizes.expert_width,
        "base_moe_mlp_dim": sizes.expert_width,
        "weight_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
