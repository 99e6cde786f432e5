"""Every engine, at every size that it may be used at, equals the unpipelined program."""

import functools
from typing import Any, Literal

import pytest

from harness.contract import Row, check_row, parameters, slow
from harness.product import pairs, pairs_that_never_meet, product
from jaxpipe.autodiff import POLICIES

RANKS = (2, 3, 4, 8)
MANUAL = ("data", "fsdp")
CONTEXT = (("data", 2), ("context", 2))


def rows() -> list[Row]:
    return [
        *twins(),
        *meshes(),
        *compositions(),
        *gathers(),
        *explicit(),
        *zero(),
        *many_repeats(),
        *experts(),
        *policies(),
        *in_fp8(),
        *pairs(),
    ]


def twins() -> list[Row]:
    """One device plays every rank: more microbatches than ranks, tied embeddings."""
    in_first_job = [(2, 3, True), (4, 3, True), (8, 1, True)]
    return [
        Row("circular", "mlp", ranks, repeats, 3 * ranks, delay=delay, tied=True,
            job=job((ranks, repeats, delay) in in_first_job))
        for ranks in RANKS
        for repeats in (1, 2, 3, 4)
        for delay in (False, True)
    ]  # fmt: skip


def meshes() -> list[Row]:
    """The same code on a mesh of as many devices as ranks, with dropout."""
    in_first_job = [
        (2, 1, 1, True),
        (2, 2, 2, False),
        (3, 4, 2, True),
        (4, 2, 2, False),
        (8, 4, 1, False),
    ]
    return [
        Row("circular", "mlp", ranks, repeats, rounds * ranks, axes=(), delay=delay, dropout=0.2,
            job=job((ranks, repeats, rounds, delay) in in_first_job))
        for ranks in RANKS
        for repeats in (1, 2, 3, 4)
        for rounds in (1, 2)
        for delay in (False, True)
        if not (delay and repeats > 1 and rounds == 1)  # refused: see test_circular.py
    ]  # fmt: skip


def compositions() -> list[Row]:
    """A transformer with everything on: other mesh axes, tied, dropout, packed, several layers."""
    fsdp, tensor, both = (("fsdp", 2),), (("tensor", 2),), (("fsdp", 2), ("tensor", 2))
    row = functools.partial(Row, "circular", "llama")
    full = functools.partial(row, tied=True, dropout=0.1, packed=True, layers_per_stage=2)
    in_slow_job = [
        *(full(2, 1, 4, axes=axes) for axes in (fsdp, tensor, both, CONTEXT)),
        *(full(2, 3, 4, axes=axes) for axes in (tensor, both, CONTEXT)),
        *(full(3, 2, 6, axes=axes) for axes in (fsdp, tensor)),
        *(full(4, 1, 8, axes=axes) for axes in (fsdp, tensor, (("data", 2),))),
        *(full(4, 2, 8, axes=axes) for axes in (fsdp, (("data", 2),))),
        row(4, 2, 8, axes=fsdp, delay=True),
        row(4, 2, 4, axes=fsdp, packed=True),
        row(3, 1, 9, axes=None, packed=True, dropout=0.1),
        full(4, 2, 8, axes=tensor),
        row(1, 2, 2, axes=fsdp, packed=True),
        # What a llama has, and norms of heads.
        Row("circular", "qwen3", 2, 2, 4, axes=both, delay=True, tied=True),
        *layers_that_differ(),
    ]
    return [
        full(2, 3, 4, axes=fsdp),
        full(8, 1, 16, axes=()),
        *slow(in_slow_job),
    ]


def layers_that_differ() -> list[Row]:
    """Layers of two kinds in one stack, of which a rank has now one and now the other."""
    row, fsdp = functools.partial(Row, "circular", "gemma3", packed=True), (("fsdp", 2),)
    own = {"gather": "repeat", "batch_axes": MANUAL}
    return [
        # The third layer, on the first rank, sees all tokens.
        row(2, 2, 4, axes=(("fsdp", 2), ("tensor", 2)), delay=True, tied=True),
        row(3, 1, 6, axes=None, remat="none", dropout=0.1),
        row(2, 1, 4, axes=CONTEXT, layers_per_stage=2, remat="minimal"),
        row(4, 2, 4, axes=fsdp, layers_per_stage=2, remat="none", **own),
        row(2, 2, 4, axes=(("fsdp", 2), ("tensor", 2)), explicit=True, **own),
        row(2, 2, 4, axes=(("tensor", 2),), vocab_parallel=True, z_loss=0.01, remat="custom"),
        row(4, 1, 4, axes=fsdp, quantization="fp8", **own),
    ]


def gathers() -> list[Row]:
    """Weights gathered once, or per repeat, as XLA likes or by each device with its own rows."""
    return [
        Row("circular", "llama", ranks, repeats, rounds * ranks, axes=(("fsdp", 2),), delay=delay,
            dropout=0.1, packed=True, layers_per_stage=layers, gather=gather, batch_axes=batch_axes,
            job="slow")
        for ranks, repeats, rounds, layers, delay in GATHERED_SIZES
        for gather in ("tick", "once", "repeat")
        for batch_axes in ((), MANUAL)
        if gather != "tick" or batch_axes
    ]  # fmt: skip


GATHERED_SIZES = [(2, 4, 1, 2, False), (3, 3, 2, 1, True), (4, 2, 2, 1, True)]


def explicit() -> list[Row]:
    """Data, stage and fsdp as explicit axes, the others inside a layer automatic."""
    row = functools.partial(Row, "circular", batch_axes=MANUAL, explicit=True)
    llama = functools.partial(row, "llama", dropout=0.1, packed=True)
    # Not slow: JAX's rules about types of explicit axes differ between its versions.
    first = llama(3, 2, 6, axes=(("fsdp", 2),), gather="repeat", delay=True)
    in_slow_job = [
        llama(2, 2, 4, axes=(("fsdp", 2), ("tensor", 2)), gather="once"),
        llama(4, 1, 4, axes=(("data", 2),), layers_per_stage=2),
        row("deepseek", 2, 3, 4, axes=(("expert", 2), ("fsdp", 2)), gather="repeat"),
    ]
    return [first, *slow(in_slow_job)]


def zero() -> list[Row]:
    """ZeRO-1: gradients come out split over data too, as the optimizer takes them."""
    row = functools.partial(Row, "circular", dropout=0.1, batch_axes=MANUAL, zero=True)
    both = (("data", 2), ("fsdp", 2))
    in_slow_job = [
        row("llama", 2, 2, 4, axes=both, gather="repeat", explicit=True),
        row("llama", 4, 2, 4, axes=(("data", 2),), layers_per_stage=2),
        row("deepseek", 2, 1, 4, axes=both, gather="once"),
    ]
    first = row("llama", 3, 1, 3, axes=(("data", 2),), gather="once", packed=True)
    return slow([first, *in_slow_job])


def many_repeats() -> list[Row]:
    """From 8 repeats on, residuals and gradients lie in two halves; 8 ranks gather nothing."""
    fsdp: Any = (("fsdp", 2),)
    in_slow_job = [
        Row("circular", "mlp", 2, 8, 4, delay=True, tied=True),
        Row("circular", "llama", 2, 8, 4, axes=fsdp, gather="repeat", dropout=0.1,
            batch_axes=MANUAL),
        Row("circular", "llama", 2, 8, 4, axes=fsdp, gather="once", packed=True, tied=True,
            batch_axes=MANUAL),
        Row("circular", "llama", 8, 2, 8, axes=(), gather="repeat", batch_axes=MANUAL),
        Row("circular", "llama", 4, 2, 8, axes=fsdp, vocab_parallel=True, delay=True, tied=True),
        Row("circular", "llama", 2, 1, 6, axes=(("tensor", 2),), vocab_parallel=True, z_loss=0.01),
        Row("circular", "llama", 8, 2, 16, axes=(), gather="once", delay=True, explicit=True,
            batch_axes=MANUAL),
    ]  # fmt: skip
    return [
        Row("circular", "mlp", 2, 9, 2, tied=True, job="slow"),
        Row("circular", "llama", 2, 4, 4, axes=fsdp, gather="repeat", packed=True,
            batch_axes=MANUAL, scan_repeats=False, job="slow"),
        *slow(in_slow_job),
    ]  # fmt: skip


def experts() -> list[Row]:
    """Routed experts: split over devices, beside every other axis, and on one device.

    These compile for 12 to 25 seconds each: in the first job are the row of `policies` with split
    experts, and the trainer's runs of DeepSeek through every engine.
    """
    sizes = [(2, 2), (3, 1), (4, 1)]
    meshes = {
        2: [
            (("expert", 2),),
            (("expert", 2), ("fsdp", 2)),
            (("expert", 2), ("tensor", 2)),
            (("context", 2), ("tensor", 2)),
        ],
        3: [(("expert", 2),), (("fsdp", 2),), (("tensor", 2),)],
        4: [(("expert", 2),), (("tensor", 2),)],
    }
    in_slow_job = [
        *(
            Row("circular", "deepseek", ranks, repeats, 2 * ranks, axes=axes, packed=True)
            for ranks, repeats in sizes
            for axes in meshes[ranks]
        ),
        *gathered_experts(),
        *mixtures(),
        Row("circular", "deepseek", 2, 1, 4, axes=(("expert", 4),), delay=True, dropout=0.1),
        Row("circular", "deepseek", 3, 1, 6, axes=None, packed=True, layers_per_stage=2),
    ]
    return slow(in_slow_job)


def mixtures() -> list[Row]:
    """Experts behind the attention of a llama or of Qwen3, in layers and after the pipeline."""
    row, both = functools.partial(Row, "circular"), (("expert", 2), ("fsdp", 2))
    own = {"gather": "repeat", "batch_axes": MANUAL, "packed": True}
    return [
        row("mixtral", 2, 2, 4, axes=(("expert", 2), ("tensor", 2)), packed=True, tied=True),
        row("mixtral", 3, 1, 6, axes=None, packed=True, remat="none", dropout=0.1),
        row("qwen3_moe", 2, 2, 4, axes=both, explicit=True, **own),
        row("qwen3_moe", 2, 1, 4, axes=CONTEXT, packed=True, remat="minimal"),
        row("qwen3_moe", 4, 1, 4, axes=(("fsdp", 2),), layers_per_stage=2, **own),
        row("qwen3", 4, 1, 8, axes=(("fsdp", 2),), quantization="fp8", **own),
        row("gpt_oss", 2, 2, 4, axes=(("expert", 2), ("tensor", 2)), packed=True, tied=True),
        row("gpt_oss", 3, 1, 6, axes=None, packed=True, remat="none", dropout=0.1),
        row("gpt_oss", 2, 1, 4, axes=CONTEXT, packed=True, remat="minimal", layers_per_stage=2),
        row("gpt_oss", 2, 2, 4, axes=both, explicit=True, **own),
        row("gpt_oss", 4, 1, 4, axes=(("fsdp", 2),), layers_per_stage=2, **own),
        row("llama4", 2, 2, 4, axes=(("expert", 2), ("tensor", 2)), packed=True, tied=True),
        row("llama4", 3, 1, 6, axes=None, packed=True, remat="none", dropout=0.1),
        row("llama4", 2, 1, 4, axes=CONTEXT, packed=True, remat="minimal"),
        row("llama4", 2, 2, 4, axes=both, explicit=True, **own),
        row("llama4", 4, 1, 4, axes=(("fsdp", 2),), layers_per_stage=2, **own),
        Row("linen", "mixtral", 2, 2, 4, axes=both, **own),
        Row("nnx", "qwen3_moe", 2, 2, 4, axes=both, packed=True),
    ]


def policies() -> list[Row]:
    """Every rematerialisation policy, on devices with their own rows and on one device."""
    of_llama = [
        Row("circular", "llama", 2, 1, 4, axes=(("fsdp", 2),), packed=True, layers_per_stage=2,
            batch_axes=MANUAL, remat=policy, job=job(policy in ("none", "custom")))
        for policy in POLICIES
    ]  # fmt: skip
    of_deepseek = [
        Row("circular", "deepseek", 2, 1, 4, axes=(("expert", 2),) if on_mesh else None,
            packed=True, remat=policy, job=job(policy == "minimal"))
        for policy in POLICIES
        for on_mesh in [policy in ("none", "minimal", "custom") or "offloaded" in policy]
    ]  # fmt: skip
    schedules = [
        Row("scheduled", model, 2, 2, 4, axes=axes, packed=True, schedule=schedule, remat=policy,
            layers_per_stage=layers, job=job(policy == "custom"))
        for policy in ("minimal_offloaded", "custom")
        for model, axes, schedule, layers in (
            ("llama", (("fsdp", 2),), "interleaved_1f1b", 2),
            ("llama", (), "zbv", 1),
            ("deepseek", (("expert", 2),), "interleaved_1f1b", 1),
        )
    ]  # fmt: skip
    return [*of_llama, *of_deepseek, *schedules]


def gathered_experts() -> list[Row]:
    """Routed experts whose other weights are gathered, and whose balance concerns all devices."""
    expert, fsdp, both = (("expert", 2),), (("fsdp", 2),), (("fsdp", 2), ("expert", 2))
    sizes = [(2, 2, 1, 2, both), (3, 3, 2, 1, fsdp), (4, 2, 2, 1, fsdp)]
    base = [
        Row("circular", "deepseek", ranks, repeats, rounds * ranks, axes=axes, delay=rounds > 1,
            packed=True, layers_per_stage=layers, gather=gather, batch_axes=batch_axes)
        for ranks, repeats, rounds, layers, axes in sizes
        for gather in ("tick", "once", "repeat")
        for batch_axes in ((), MANUAL)
    ]  # fmt: skip
    manual = {"gather": "repeat", "batch_axes": MANUAL, "packed": True}
    return [
        *base,
        Row("circular", "deepseek", 2, 2, 4, axes=(("data", 2), ("fsdp", 2)), **manual),
        Row("circular", "deepseek", 2, 1, 4, axes=(("fsdp", 2), ("tensor", 2)), **manual),
        Row("circular", "deepseek", 3, 2, 6, axes=expert, **manual),
        Row("circular", "deepseek", 4, 1, 4, axes=expert, layers_per_stage=2, **manual),
    ]


def in_fp8() -> list[Row]:
    """Matrix products in FP8, beside every moment of gathering.

    What is rounded must be the same to the last bit, or nearly always: few layers, and rows on a
    device that XLA:CPU treats alike. Tensor shards split FP8 products' sums, whose terms are so
    short that float32 holds most of them exactly in any order; a deeper model would show it.
    """
    fp8 = functools.partial(Row, "circular", packed=True, quantization="fp8")
    fsdp: Any = (("fsdp", 2),)
    in_slow_job = [
        fp8("llama", 2, 2, 4, axes=fsdp, batch_axes=MANUAL, dropout=0.1),
        fp8("llama", 4, 2, 4, axes=fsdp, gather="repeat", batch_axes=MANUAL, explicit=True),
        fp8("llama", 3, 1, 6, axes=fsdp, gather="once", batch_axes=MANUAL, delay=True),
        fp8("llama", 4, 1, 4, axes=fsdp, gather="once"),
        fp8("llama", 2, 1, 4, axes=(("tensor", 2),)),
        fp8("deepseek", 2, 1, 4, axes=fsdp, batch_axes=MANUAL),
    ]
    first = fp8("llama", 2, 2, 4, axes=fsdp, gather="repeat")
    return slow([first, *in_slow_job])


def job(first: bool) -> Literal["test", "slow"]:
    """The first job, `make test`, or the second."""
    return "test" if first else "slow"


@pytest.mark.parametrize("row", parameters([*rows(), *product()]))
def test_the_engine_equals_the_unpipelined_program(row: Row):
    check_row(row)


def test_any_two_choices_meet_in_a_row():
    assert pairs_that_never_meet() == set()
