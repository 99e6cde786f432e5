"""The table of compiler flags: what each does, what accepted it, and the measurement behind it.

A row is set by default only for a reason of correctness, or because llama2-7b takes less time with
it by the played schedule, and at most 3% more memory. The other rows are candidates: `jaxpipe
compile --probe-flags` shows what they do to a step. `compile_xla_flags` wins over the table.
"""

from collections.abc import Mapping
from typing import Any

from ...devices import HARDWARE, Hardware, find_hardware
from ._flag import CompilerFlag, Predicate, StepTraits, never

# Versions of JAX whose XLA:CPU or XLA:GPU took the option, and versions of libtpu.
_JAX = ("0.10.2", "0.11.2", "0.12.0.1")
_LIBTPU = ("0.0.48.1",)


def _vmem_kib(row: Hardware) -> int:
    """Returns three quarters of a core's vector memory, which others set on v5p and v6e."""
    return row.vmem_bytes // 1024 * 3 // 4


_WITH_SPARSE_CORES = tuple(
    name for row in HARDWARE.values() if row.sparse_cores for name in row.device_kinds
)
LARGE_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""The option that lets one instruction use more of a core's vector memory."""

_DEFAULT_VMEM_KIB = 16_384

ADDS_IN_PRODUCTS = ("v5p",)
"""Kinds of TPUs on which, with large tiles, XLA adds a product to a sum in the time of the product.

Circular with weights gathered once takes 3.32 s on v5p instead of 3.41, and without large tiles
4.16 instead of 4.00; on v6e 0.632 instead of 0.588.
"""


def adds_in_products(device_kind: str, options: Mapping[str, Any]) -> bool:
    """Returns whether a program with these options had better add products where it makes them."""
    row = find_hardware(device_kind)
    has_large_tiles = int(options.get(LARGE_VMEM, 0)) > _DEFAULT_VMEM_KIB
    return has_large_tiles and row is not None and row.kind in ADDS_IN_PRODUCTS


_WITH_LARGE_VMEM = tuple(
    name
    for row in HARDWARE.values()
    if _vmem_kib(row) > _DEFAULT_VMEM_KIB
    for name in row.device_kinds
)


def _was_measured(traits: StepTraits) -> bool:
    """Returns whether gains were measured: on v5p and v6e, for one program of all ranks."""
    return not traits.program_per_rank and _kind(traits) in ("v5p", "v6e")


def _gains_by_a_queue(traits: StepTraits) -> bool:
    """Returns whether a queue of the SparseCores was faster: not for dense models on v5p."""
    return _was_measured(traits) and (traits.has_experts or _kind(traits) == "v6e")


def _has_windows(traits: StepTraits) -> bool:
    """Returns whether XLA would cut products into windows that take longer than whole ones."""
    scatters_by_itself = not traits.pipelines and _kind(traits) in ("v6e", "tpu7x")
    return traits.sequence_parallel or scatters_by_itself


def _kind(traits: StepTraits) -> str:
    row = find_hardware(traits.device_kind)
    return "" if row is None else row.kind


def _for_sparse_cores(
    group: str,
    options: dict[str, str],
    reason: str,
    gain: str,
    *,
    is_set: Predicate = _was_measured,
    built_in: tuple[str, ...] = HARDWARE["tpu7x"].device_kinds,
) -> list[CompilerFlag]:
    """Returns rows about what SparseCores do beside the work of the TensorCores."""
    return [
        CompilerFlag(
            *(group, f"xla_tpu_{option}", value, "tpu", reason, _LIBTPU, is_set),
            device_kinds=_WITH_SPARSE_CORES,
            gain=gain,
            built_in=built_in,
        )
        for option, value in options.items()
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
        lambda traits: traits.program_per_rank,
        ran_on_device=True,
    ),
    CompilerFlag(
        "memory order",
        "xla_cpu_enable_concurrency_optimized_scheduler",
        "False",
        "cpu",
        "XLA:CPU orders instructions so that many can run at once. On a single core they take "
        "turns, with the data of all of them in its caches.",
        _JAX,
        lambda traits: traits.program_per_rank and traits.cores == 1,
        gain="interleaved 1F1B in two processes with a core each, M 8: 0.865 to 0.800 s",
        ran_on_device=True,
    ),
    CompilerFlag(
        "deterministic",
        "xla_gpu_deterministic_ops",
        "True",
        "gpu",
        "For `deterministic`: XLA takes kernels alone that give the same bits in every run.",
        _JAX,
        lambda traits: traits.deterministic,
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
        lambda traits: traits.program_per_rank,
    ),
    CompilerFlag(
        "latency hiding",
        "xla_gpu_enable_latency_hiding_scheduler",
        "True",
        "gpu",
        "Starts collectives early. On h100:8 with jax 0.11.2 it changes nothing: without it XLA "
        "hides 87 to 91% of gathered bytes of llama2-7b and 77 to 99% of reduce-scattered ones, "
        "and no flag that was tried hides more.",
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
    *_for_sparse_cores(
        "SparseCore gathers",
        {
            "enable_sparse_core_collective_offload_all_gather": "True",
            "enable_sparse_core_collective_offload_2d_all_gather": "True",
        },
        "Runs gathers on the SparseCores, also those over two axes of the torus. Not set on tpu7x, "
        "for which libtpu compiles the same program without it.",
        "With the reductions, circular with gathers in every tick takes 4.04 s on v5p instead of "
        "5.09, of which 0.11 instead of 1.12 are exposed, and 0.67 on v6e instead of 0.92; FSDP "
        "of one microbatch 3.02 s instead of 3.12 on v5p, and 1.11 instead of 1.22 on v6e, both in "
        "1% less memory.",
    ),
    *_for_sparse_cores(
        "SparseCore reductions",
        {
            "enable_sparse_core_collective_offload_reduce_scatter": "True",
            "enable_sparse_core_collective_offload_all_reduce": "True",
            "sparse_core_reduce_scatter_latency_multiplier": "3",
        },
        "Runs reductions on the SparseCores, and tells the scheduler that reduce-scatters take "
        "three times as long, so that it puts more work beside them. Not set on tpu7x, for which "
        "libtpu compiles the same program without it.",
        "FSDP of one microbatch takes 3.73 s on v5p instead of 3.79, at 1% more memory.",
    ),
    *_for_sparse_cores(
        "SparseCore queue",
        {
            "enable_sparse_core_offload_queuing_in_lhs": "True",
            "enable_offloading_scatter_to_sparsecore": "False",
        },
        "Lets the scheduler start an operation on a SparseCore before the one before it has ended, "
        "and leaves scatters to the TensorCores: routers of experts have small ones, which had to "
        "end before a gather of experts began.",
        "With the flags above, two ranks of deepseek2-16b with gathers in every tick expose 0.00 s "
        "of gathers on v5p instead of 0.08, of 2.5 s, at 1% more memory. Circular llama2-7b takes "
        "1.13 s on v6e instead of 1.20, at 3% more memory. Not set for dense models on v5p: "
        "circular llama3.1-70b on v5p:4x4x4 takes 22.2 s instead of 21.4, as permutes wait for "
        "scatters of gradients.",
        is_set=_gains_by_a_queue,
        built_in=(),
    ),
    CompilerFlag(
        "no windows",
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        "1000000",
        "tpu",
        "Keeps whole the gathers and reduce-scatters of sequence parallelism, and reduce-scatters "
        "of gradients that XLA's partitioner makes, as SparseCores run them beside products. "
        "Otherwise XLA cuts products into windows, one for each device, which collective permutes "
        "hand on. On v5p it leaves those of FSDP whole by itself.",
        _LIBTPU,
        _has_windows,
        gain="Four layers of llama3.1-70b on v5p:2x2x2 with `tensor` 4: 1F1B takes 2.42 s instead "
        "of 2.99 (2.62 without sequence parallelism), and without a pipeline 1.60 instead of 1.63. "
        "FSDP takes 0.72 s on v6e:2x4 instead of 0.85, in 0.5% less memory, and of 8 layers 0.50 s "
        "on tpu7x:2x2x1 instead of 0.59, in 4% less.",
    ),
    CompilerFlag(
        "scoped VMEM",
        LARGE_VMEM,
        lambda traits: str(_vmem_kib(HARDWARE[_kind(traits)])),
        "tpu",
        "Lets one instruction use three quarters of a core's vector memory, for larger tiles of "
        "products. Not set on v5e, where FSDP takes 1.49 s instead of 1.72, but eight minutes of "
        "CPU time to compile, nor on tpu7x, where it was not measured.",
        _LIBTPU,
        _was_measured,
        _WITH_LARGE_VMEM,
        gain="With the flags above, circular with gathers in every tick takes 3.42 s on v5p "
        "instead of 4.04, and FSDP 3.10 instead of 3.73; 64 MiB instead of 48 gain 0.02 s more. "
        "On v6e FSDP takes 0.52 s instead of 0.63, at 3% more memory, with the reductions. "
        "Compilation takes at least three to four times as long.",
        slows_compilation=True,
    ),
)
"""The table."""
