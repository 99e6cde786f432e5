"""One GPU: what kernels and train steps take, beside what `jaxpipe plan` says of them.

    pip install "jaxpipe[train,cuda]"
    python benchmarks/gpu.py [--seconds N] [attention] [experts] [steps]

`attention` and `experts` time a forward with its backward, in bfloat16: the median of ten calls,
and TFLOP/s. A causal mask halves the products, documents are not subtracted, and a backward counts
as 2.5 forwards. `steps` runs `jaxpipe train` in a process of its own for each row: the median step
of the last five, and the most memory that was in use, beside the step and the memory that are
planned for the same keys. Rows behind `--seconds` are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.devices import find_hardware


def main() -> None:
    parser = argparse.ArgumentParser(description="kernels and train steps on one GPU")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to start no new row")
    parser.add_argument("names", nargs="*", help="tables, or rows of `steps`")
    args = parser.parse_args()
    stop = time.monotonic() + args.seconds
    tables = {"attention": attention, "experts": experts, "steps": steps}
    rows = [name for name in args.names if name not in tables]
    for name in [n for n in args.names if n in tables] or ([] if rows else tables):
        for line in tables[name](stop):
            print(line, flush=True)
        print(flush=True)
    for line in steps(stop, rows) if rows else ():
        print(line, flush=True)


class Shape(NamedTuple):
    """b sequences of T tokens, H query heads, K key and value heads, C channels."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    channels: int
    window: int | None = None
    documents: int = 1


ATTENTION = {
    "llama 8B": Shape(4, 4096, 32, 8, 128),
    "llama 8B, packed": Shape(4, 4096, 32, 8, 128, documents=6),
    "llama 1B": Shape(4, 4096, 32, 8, 64),
    "32,768 tokens": Shape(1, 32768, 16, 4, 128),
    "32,768 tokens, packed": Shape(1, 32768, 16, 4, 128, documents=6),
    "a window of 1,024": Shape(1, 32768, 16, 4, 128, window=1024),
    "gemma, 256 channels": Shape(4, 4096, 8, 4, 256),
    "deepseek, 192 channels": Shape(4, 4096, 16, 16, 192),
}


def attention(stop: float) -> Iterator[str]:
    """Yields the lines of a table: a forward and backward by each kernel that can run."""
    from jaxpipe.kernels import AttentionPlan, Scores
    from jaxpipe.sharding import DEFAULT_RULES

    names = ("cudnn", "pallas", "dot_product")
    yield "attention, forward and backward" + "".join(
        f"{name + ', ms (TFLOP/s)':>26}" for name in names
    )
    for title, shape in ATTENTION.items():
        cells = []
        scores = Scores(window=shape.window)
        for name in names:
            how = partial(
                AttentionPlan, platform="gpu", length=shape.length, packed=shape.documents > 1,
                dtype="bfloat16", head_dim=shape.channels, scores=scores,
            )  # fmt: skip
            is_large = shape.rows * shape.heads * shape.length**2 * 4 > 2**34
            if time.monotonic() > stop or (name == "dot_product" and is_large):
                cells.append("-")
                continue
            try:
                attend = how(name).function(DEFAULT_RULES)
                cells.append(_attention_cell(attend, shape))
            except Exception as error:  # a row that a kernel refuses is a result
                cells.append(type(error).__name__)
        yield f"{title:<31}" + "".join(f"{cell:>26}" for cell in cells)


def _attention_cell(attend: Callable[..., Any], shape: Shape) -> str:
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(1, shape.length, (shape.rows, shape.documents - 1)), axis=1)
    place = np.arange(shape.length)
    segments = jnp.asarray((place[:, None] >= cuts[:, None]).sum(2) + 1, jnp.int32)
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    *qkv, cotangent = (
        jax.random.normal(
            jax.random.key(i), (shape.rows, shape.length, n, shape.channels), jnp.bfloat16
        )
        for i, n in enumerate(counts)
    )

    @jax.jit
    def run(q, k, v, cotangent):
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, segments), q, k, v)
        return out, *pull_back(cotangent)

    seconds = median_seconds(run, *qkv, cotangent)
    pairs = shape.length**2 / 2
    if shape.window is not None:
        pairs = shape.length * shape.window
    flops = 3.5 * 4 * shape.rows * shape.heads * shape.channels * pairs
    return f"{seconds * 1e3:.2f} ({flops / seconds / 1e12:.0f})"


EXPERTS = {
    "deepseek2-16b, 8,192 tokens": (64, 8192 * 6, 2048, 1408),
    "qwen3-30b-a3b, 8,192 tokens": (128, 8192 * 8, 2048, 768),
    "mixtral-8x7b, 4,096 tokens": (8, 4096 * 2, 4096, 14336),
}


def experts(stop: float) -> Iterator[str]:
    """Yields the lines of a table: grouped products with their backward."""
    from jaxpipe.models.layers import pallas_gpu_grouped_matmul, ragged_dot

    products = {"jaxpipe's kernel": pallas_gpu_grouped_matmul(), "ragged_dot": ragged_dot}
    yield f"{'grouped products':<31}" + "".join(f"{n + ', ms (TFLOP/s)':>34}" for n in products)
    for title, (groups, num_rows, depth, width) in EXPERTS.items():
        keys = jax.random.split(jax.random.key(0), 3)
        rows = jax.random.normal(keys[0], (num_rows, depth), jnp.bfloat16)
        weights = jax.random.normal(keys[1], (groups, depth, width), jnp.bfloat16) * 0.02
        cotangent = jax.random.normal(keys[2], (num_rows, width), jnp.bfloat16)
        shares = np.random.default_rng(0).dirichlet([8.0] * groups)
        sizes = jnp.asarray(np.random.default_rng(1).multinomial(num_rows, shares), jnp.int32)
        cells = []
        for product in products.values():
            if time.monotonic() > stop:
                cells.append("-")
                continue

            @jax.jit
            def run(rows, weights, sizes, cotangent, product=product):
                out, pull_back = jax.vjp(lambda r, w: product(r, w, sizes), rows, weights)
                return out, *pull_back(cotangent)

            try:
                seconds = median_seconds(run, rows, weights, sizes, cotangent)
                tflops = 3 * 2 * num_rows * depth * width / seconds / 1e12
                cells.append(f"{seconds * 1e3:.2f} ({tflops:.0f})")
            except Exception as error:
                cells.append(type(error).__name__)
        yield f"{title:<31}" + "".join(f"{cell:>34}" for cell in cells)


def median_seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Returns the median time of a call, after two."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


BATCH = {"per_device_batch_size": 4, "max_target_length": 4096, "num_vocab_tiling": 2}
ONE = BATCH | {"pipeline_engine": "none", "num_pipeline_microbatches": 1, "remat_policy": "full"}
LLAMA = ONE | {"model_name": "llama3.2-1b"}
FOUR = LLAMA | {"num_pipeline_microbatches": 4}
LLAMA_8B = ONE | {"model_name": "llama3-8b", "base_num_decoder_layers": 8}
STEPS: dict[str, dict[str, Any]] = {
    "1B, full": LLAMA,
    "1B, minimal_with_context": LLAMA | {"remat_policy": "minimal_with_context"},
    "1B, minimal_offloaded": LLAMA | {"remat_policy": "minimal_offloaded"},
    "1B, M 4": FOUR,
    "1B, M 4, circular": FOUR | {"pipeline_engine": "circular"},
    "1B, M 4, scheduled": FOUR | {"pipeline_engine": "scheduled", "pipeline_schedule": "1f1b"},
    "1B, M 4, mpmd": FOUR | {"pipeline_engine": "mpmd", "pipeline_schedule": "1f1b"},
    "8B, 8 layers": LLAMA_8B,
    "8B, 8 layers, fp8": LLAMA_8B | {"quantization": "fp8"},
    "deepseek2-16b, 4 layers": ONE | {"model_name": "deepseek2-16b", "base_num_decoder_layers": 4},
    "qwen3-30b-a3b, 4 layers": ONE | {"model_name": "qwen3-30b-a3b", "base_num_decoder_layers": 4},
    "gemma3-1b": ONE | {"model_name": "gemma3-1b"},
}


def steps(stop: float, names: list[str] | None = None) -> Iterator[str]:
    """Yields the lines of a table: steps of a run, as measured and as planned."""
    yield (
        f"{'train step':<28}{'step s':>8}{'planned':>9}{'TFLOP/s':>9}{'peak GB':>9}{'planned':>9}"
        f"{'compile s':>11}  loss"
    )
    for name in names or STEPS:
        if time.monotonic() > stop:
            yield f"{name:<28}{'-':>8}"
            continue
        yield f"{name:<28}{_step_cells(STEPS[name])}"


def _step_cells(keys: dict[str, Any]) -> str:
    seconds, gigabytes = planned(keys)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxpipe", "train", f"output_dir={folder}", "steps=8"]
        command += [f"{key}={value}" for key, value in keys.items()]
        command += ["dataset_type=synthetic", "enable_checkpointing=false", "run_name=row"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return "  " + " ".join((done.stderr or done.stdout).strip().splitlines()[-2:])[-300:]
        lines = (Path(folder) / "row" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if "step_time_seconds" in row]
    step = statistics.median(row["step_time_seconds"] for row in rows[-5:])
    tflops = statistics.median(row["tflops_per_second_per_device"] for row in rows[-5:])
    peak = max(row.get("peak_memory_gb", 0.0) for row in rows)
    compiled = next(
        (line.split()[-2] for line in done.stdout.splitlines() if "compiled the train" in line), "-"
    )
    return (
        f"{step:>8.3f}{seconds:>9}{tflops:>9.0f}{peak:>9.2f}{gigabytes:>9}{compiled:>11}  "
        f"{rows[-1]['loss']:.4f}"
    )


def planned(keys: dict[str, Any]) -> tuple[str, str]:
    """Returns the seconds and GB of a step that `jaxpipe plan` says, for a device like this one."""
    hardware = find_hardware(jax.devices()[0].device_kind)
    if hardware is None:
        return "-", "-"
    command = [sys.executable, "-m", "jaxpipe", "plan", "--devices", f"{hardware.kind}:1", "--json"]
    command += [f"{key}={value}" for key, value in keys.items()]
    cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=cpu)
    if done.returncode:
        return "-", "-"
    plan = json.loads(done.stdout)["plans"][0]
    return f"{plan['step_seconds']:.3f}", f"{plan['memory_bytes']['total'] / 1e9:.2f}"


if __name__ == "__main__":
    main()
