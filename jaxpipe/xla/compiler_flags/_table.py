"""The table of compiler flags: what each does, what accepted it, and the measurement behind it.

A row is set by default only for a reason of correctness, or because a measurement is better in time
and not worse in memory. The other rows are candidates: `jaxpipe compile --probe-flags` shows what
they do to a step. `compile_xla_flags` wins over the table.
"""

from ...devices import HARDWARE
from ._flag import CompilerFlag, StepTraits, never

# Versions of JAX whose XLA:CPU or XLA:GPU took the option, and versions of libtpu, each on v4, v5e,
# v5p, v6e and tpu7x.
_JAX = ("0.10.2", "0.11.2", "0.12.0.1")
_LIBTPU = ("0.0.42.1", "0.0.48.1", "0.0.50.1")
_V5E = HARDWARE["v5e"].device_kinds
_WITH_SPARSE_CORES = tuple(
    name for kind in ("v5p", "v6e", "tpu7x") for name in HARDWARE[kind].device_kinds
)


def _has_program_per_rank(traits: StepTraits) -> bool:
    return traits.program_per_rank


def _is_deterministic(traits: StepTraits) -> bool:
    return traits.deterministic


def _sparse_cores(group: str, collectives: tuple[str, ...], reason: str) -> list[CompilerFlag]:
    """Returns rows that move collectives from the TensorCore to the SparseCores."""
    return [
        CompilerFlag(
            group,
            f"xla_tpu_enable_sparse_core_collective_offload_{collective}",
            "True",
            "tpu",
            reason,
            _LIBTPU,
            never,
            _WITH_SPARSE_CORES,
        )
        for collective in collectives
    ]


def _collective_fusions() -> list[CompilerFlag]:
    """Returns rows that run gathers as parts of the fusions beside them."""
    options = (
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_enable_async_all_gather",
    )
    reason = (
        "Runs gathers as parts of other fusions. Not measured: libtpu 0.0.48.1 refuses a step with "
        "it on v5p, and names v5e as the generation that has it."
    )
    return [
        CompilerFlag("collective fusion", option, "True", "tpu", reason, _LIBTPU, never, _V5E)
        for option in options
    ]


def _pipelined_permutes() -> list[CompilerFlag]:
    """Returns rows that split permutes into sends and receives of different iterations."""
    options = {
        "xla_gpu_enable_pipelined_p2p": "True",
        "xla_gpu_collective_permute_decomposer_threshold": "0",
    }
    reason = (
        "Makes permutes of loops sends and receives that may be one iteration apart. On h100:4, "
        "two ranks of two repeats with the latency-hiding scheduler, 60% of their bytes overlap "
        "with products, 64% without these flags, and the peak is 2% higher."
    )
    return [
        CompilerFlag("pipelined permutes", option, value, "gpu", reason, _JAX, never)
        for option, value in options.items()
    ]


def _combine_thresholds() -> list[CompilerFlag]:
    """Returns rows that combine the collectives of one layer, and not of two."""
    reason = (
        "Combines collectives up to the bytes of one layer. On h100:4 with gathers once per repeat "
        "23% of gathered bytes overlap with products, 45% without these flags. All reduce-scatters "
        "are asynchronous, none without, but none overlaps. The peak is the same."
    )
    return [
        CompilerFlag(
            "combine thresholds",
            f"xla_gpu_{collective}_combine_threshold_bytes",
            lambda traits: str(traits.layer_bytes),
            "gpu",
            reason,
            _JAX,
            never,
        )
        for collective in ("all_gather", "reduce_scatter", "all_reduce")
    ]


FLAGS: tuple[CompilerFlag, ...] = (
    CompilerFlag(
        "one thread",
        "xla_cpu_parallel_codegen_split_count",
        "1",
        "cpu",
        "Programs of ranks are compiled in parallel. Several threads for each took a quarter more "
        "CPU time for a small transformer.",
        _JAX,
        _has_program_per_rank,
    ),
    CompilerFlag(
        "concurrent order",
        "xla_cpu_enable_concurrency_optimized_scheduler",
        "True",
        "cpu",
        "Orders instructions for concurrency, not for memory. Memory and collectives of a small "
        "step are the same with it.",
        _JAX,
        never,
    ),
    CompilerFlag(
        "deterministic",
        "xla_gpu_deterministic_ops",
        "True",
        "gpu",
        "For `deterministic`: XLA takes kernels alone that give the same bits in every run.",
        _JAX,
        _is_deterministic,
        is_required=True,
    ),
    CompilerFlag(
        "command buffers",
        "xla_gpu_enable_command_buffer",
        "",
        "gpu",
        "No CUDA graphs for programs of ranks: every microbatch calls them with other buffers, and "
        "a graph is updated whenever the addresses of its buffers change.",
        _JAX,
        _has_program_per_rank,
    ),
    CompilerFlag(
        "latency hiding",
        "xla_gpu_enable_latency_hiding_scheduler",
        "True",
        "gpu",
        "Starts collectives early. On h100:8 it changed no byte of `circular` with gathers in "
        "every tick: no gather overlaps with a product, and of permutes 61%, or all with "
        "delayed forwarding.",
        _JAX,
        never,
    ),
    CompilerFlag(
        "no permute motion",
        "xla_disable_hlo_passes",
        "collective-permute-motion",
        "gpu",
        "Keeps XLA from moving permutes to another iteration, which could undo delayed forwarding. "
        "On h100:8 it does not: with delayed forwarding all permuted bytes overlap with products, "
        "with the pass and without it.",
        _JAX,
        never,
    ),
    *_pipelined_permutes(),
    *_combine_thresholds(),
    *_sparse_cores(
        "sparse-core gathers",
        ("all_gather",),
        "Makes all gathers asynchronous, which otherwise none is. On v5p one of the seven of a "
        "llama2-7b layer overlaps with work, at 0.2 GB less; in a small step none does, at 6% more "
        "memory and the same estimated time. Never run on a device.",
    ),
    *_sparse_cores(
        "sparse-core reductions",
        ("reduce_scatter", "all_reduce"),
        "Makes reductions asynchronous, and on v5p turns all-reduces of a small step into "
        "reduce-scatters. Together with the gathers: 7% more memory, and of 3.3 ms 0.1 ms less of "
        "collectives beside which nothing runs. Never run on a device.",
    ),
    *_collective_fusions(),
)
"""The table."""
