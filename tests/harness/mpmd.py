"""Rows of the engine `mpmd`: any schedule, as programs of every rank, in one process."""

import functools

from harness.contract import Row, slow
from harness.scheduled import EVEN, chunks
from jaxpipe.schedules import FAMILIES

REFUSED = ("seq1f1b",)
"""Slices of sequences take no dropout, which these rows have: tests/api/test_slices.py."""

mpmd = functools.partial(Row, "mpmd")


def names() -> list[str]:
    return [name for name in FAMILIES if name not in REFUSED]


def every_family() -> list[Row]:
    """One row for each, one device per rank, with what differs between schedules: how often each
    number of ranks, and whether something is kept for the backward. In `make test` the compiler's
    own tests are in small what these are in large."""
    rows = [
        mpmd("mlp", 2 + i % 3, chunks(name, 2), 2 * (2 + i % 3), axes=(), schedule=name,
             tied=True, dropout=0.1, remat=("full", "none")[i % 2],
             job="test" if name == "interleaved_1f1b" else "slow")
        for i, name in enumerate(name for name in names() if name not in EVEN)
    ]  # fmt: skip
    return rows + [
        mpmd("mlp", 4, 1, 8, axes=(), schedule=name, tied=True, dropout=0.1, remat="none")
        for name in EVEN
    ]


def compositions() -> list[Row]:
    """Transformers on groups of several devices, and on many ranks."""
    llama = functools.partial(mpmd, "llama", tied=True, dropout=0.1, packed=True)
    fsdp, tensor, both = (("fsdp", 2),), (("tensor", 2),), (("fsdp", 2), ("tensor", 2))
    in_slow_job = [
        llama(2, 1, 4, axes=both, schedule="1f1b", layers_per_stage=2),
        llama(2, 1, 4, axes=both, schedule="zero_bubble_h1", remat="none"),
        llama(3, 1, 6, axes=fsdp, schedule="eager_1f1b", remat="minimal"),
        llama(2, 2, 4, axes=fsdp, schedule="zbv", remat="minimal"),
        llama(4, 1, 8, axes=tensor, schedule="zero_bubble_h1"),
        llama(2, 2, 4, axes=tensor, schedule="interleaved_1f1b", remat="none"),
        llama(8, 1, 8, axes=(), schedule="gpipe"),
        mpmd("llama", 2, 2, 4, axes=(("data", 2),), schedule="dualpipev"),
        llama(2, 1, 4, axes=both, schedule="dualpipe", layers_per_stage=2),
        llama(4, 1, 8, axes=fsdp, schedule="dualpipe", remat="minimal"),
        mpmd("deepseek", 4, 1, 8, axes=fsdp, schedule="dualpipe", packed=True),
        llama(8, 1, 16, axes=(), schedule="dualpipe"),
        mpmd("deepseek", 2, 1, 4, axes=(("fsdp", 2), ("expert", 2)), schedule="1f1b",
             packed=True),
        mpmd("deepseek", 2, 1, 4, axes=(("expert", 2),), schedule="zero_bubble_h1",
             remat="minimal", dropout=0.1),
        mpmd("deepseek", 2, 2, 4, axes=fsdp, schedule="interleaved_zero_bubble", remat="none"),
        mpmd("deepseek", 3, 1, 3, axes=(), schedule="gpipe"),
        mpmd("mixtral", 2, 1, 4, axes=(("expert", 2), ("tensor", 2)), schedule="1f1b",
             packed=True, tied=True),
        mpmd("qwen3_moe", 2, 2, 4, axes=fsdp, schedule="zbv", remat="minimal", packed=True),
        mpmd("qwen3", 2, 1, 4, axes=(("data", 2), ("context", 2)), schedule="1f1b",
             remat="minimal", tied=True, dropout=0.1, packed=True),
        mpmd("gemma3", 2, 2, 4, axes=fsdp, schedule="zbv", remat="minimal", packed=True),
        mpmd("gemma3", 2, 2, 4, axes=tensor, schedule="interleaved_1f1b", remat="none",
             layers_per_stage=2),
        mpmd("gemma3", 4, 1, 8, axes=(), schedule="zero_bubble_h1", dropout=0.1, remat="none"),
        mpmd("gemma3", 2, 1, 4, axes=(("data", 2), ("context", 2)), schedule="1f1b",
             remat="minimal", tied=True, dropout=0.1, packed=True),
        mpmd("gpt_oss", 2, 1, 4, axes=(("expert", 2), ("tensor", 2)), schedule="1f1b",
             packed=True, tied=True),
        mpmd("llama4", 2, 2, 4, axes=(("expert", 2),), schedule="interleaved_1f1b",
             packed=True, tied=True),
        mpmd("gpt_oss", 2, 2, 4, axes=fsdp, schedule="zbv", remat="minimal", packed=True),
    ]  # fmt: skip
    return slow(in_slow_job)


def product() -> list[Row]:
    """Every schedule x ranks x chunks x rematerialisation x dense, experts x fsdp, tensor."""
    return [
        row
        for name in names()
        for ranks in ((2, 4, 8) if name in EVEN else (2, 3, 4, 8))
        for repeats in sorted({chunks(name, wanted) for wanted in (1, 2, 3)})
        for remat in ("full", "none", "minimal")
        for row in _of_every_model(name, ranks, repeats, remat)
    ]


def _of_every_model(name: str, ranks: int, repeats: int, remat: str) -> list[Row]:
    """On 8 devices 8 ranks leave none to divide weights over, the others have 2."""
    sizes = ranks, repeats, 2 * ranks
    fsdp, tensor = [(("fsdp", 2),), (("tensor", 2),)] if ranks < 8 else [(), ()]
    row = functools.partial(mpmd, schedule=name, remat=remat, job="product")
    return [
        row("mlp", *sizes, axes=(), tied=True, dropout=0.1),
        row("llama", *sizes, axes=fsdp, packed=True),
        row("llama", *sizes, axes=tensor, tied=True, dropout=0.1),
        row("deepseek", *sizes, axes=fsdp, packed=True),
    ]
