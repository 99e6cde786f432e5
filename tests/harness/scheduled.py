"""Rows of the engine `scheduled`: any schedule, in one program."""

import functools

from harness.contract import Row, slow
from jaxpipe.schedules import FAMILIES

SLICED = ("seq1f1b",)
"""Families with rows of their own: their model has attention."""
EVEN = ("dualpipe",)
"""Families for even numbers of ranks, whose stages are on two ranks each."""

scheduled = functools.partial(Row, "scheduled")


def names() -> list[str]:
    return [name for name in FAMILIES if name not in (*SLICED, "circular")]


def chunks(name: str, wanted: int) -> int:
    """How many stages a rank has in a family, where `wanted` are wanted."""
    return wanted if "chunks" in FAMILIES[name].takes else FAMILIES[name].default_chunks


SLOW = ("eager_1f1b", "interleaved_gpipe", "kimi_k2", "zero_bubble_h2", "v_half", "v_min")
"""Families whose rows are in `make test-slow`: each is a variant of one in `make test`."""


def every_family() -> list[Row]:
    """One row for each, on one device, with what differs between schedules: how often each number
    of ranks, and whether something is kept for the backward."""
    rows = [
        scheduled("mlp", 2 + i % 3, chunks(name, 2 + i % 2), 2 * (2 + i % 3), schedule=name,
                  tied=True, dropout=0.1, remat=("full", "none")[i % 2],
                  job="slow" if name in SLOW else "test")
        for i, name in enumerate(name for name in names() if name not in EVEN)
    ]  # fmt: skip
    return rows + [
        scheduled("mlp", 4, 1, 8, axes=(("fsdp", 2),), schedule=name, tied=True, dropout=0.1)
        for name in EVEN
    ]


def compositions() -> list[Row]:
    """Transformers on meshes, with every moment of gathering."""
    llama = functools.partial(scheduled, "llama", tied=True, dropout=0.1, packed=True)
    fsdp, manual = (("fsdp", 2),), ("data", "fsdp")
    both = (("fsdp", 2), ("tensor", 2))
    in_slow_job = [
        llama(4, 1, 8, axes=fsdp, schedule="zero_bubble_h1", gather="once", remat="none"),
        llama(2, 2, 4, axes=both, schedule="interleaved_1f1b", layers_per_stage=2, remat="none"),
        llama(4, 2, 8, axes=fsdp, schedule="zbv", batch_axes=manual, explicit=True),
        llama(8, 1, 8, axes=(), schedule="gpipe"),
        llama(8, 1, 16, axes=(), schedule="dualpipe"),
        llama(2, 1, 4, axes=fsdp, schedule="dualpipe", batch_axes=manual),
        llama(4, 1, 8, axes=fsdp, schedule="dualpipe", batch_axes=manual, explicit=True),
        llama(2, 1, 4, axes=both, schedule="dualpipe", gather="once", remat="none"),
        llama(4, 1, 8, axes=(), schedule="dualpipe", vocab_parallel=True),
        scheduled("deepseek", 4, 1, 8, axes=fsdp, schedule="dualpipe", packed=True),
        llama(4, 1, 8, axes=(("tensor", 2),), schedule="zero_bubble_h1", vocab_parallel=True),
        llama(2, 1, 4, axes=(("data", 2), ("context", 2)), schedule="1f1b", remat="minimal"),
        scheduled("llama", 2, 1, 4, axes=(("data", 2), ("fsdp", 2)), schedule="1f1b",
                  batch_axes=manual, gather="once", zero=True),
        scheduled("deepseek", 2, 1, 4, axes=(("fsdp", 2), ("expert", 2)), schedule="1f1b",
                  gather="once", batch_axes=manual, packed=True),
        scheduled("deepseek", 2, 1, 4, axes=fsdp, schedule="1f1b", batch_axes=manual,
                  layers_per_stage=2, packed=True),
        scheduled("deepseek", 2, 2, 4, axes=fsdp, schedule="interleaved_zero_bubble",
                  remat="none"),
        scheduled("mixtral", 2, 1, 4, axes=(("expert", 2), ("tensor", 2)), schedule="1f1b",
                  packed=True, tied=True),
        scheduled("qwen3_moe", 4, 1, 8, axes=fsdp, schedule="zero_bubble_h1", batch_axes=manual,
                  gather="once", packed=True, remat="none"),
        scheduled("qwen3_moe", 2, 1, 4, axes=(("fsdp", 2), ("expert", 2)), schedule="dualpipe",
                  packed=True),
        scheduled("qwen3", 2, 2, 4, axes=fsdp, schedule="interleaved_1f1b", vocab_parallel=True,
                  batch_axes=manual, gather="once", packed=True),
        scheduled("gemma3", 2, 2, 4, axes=fsdp, schedule="interleaved_1f1b", vocab_parallel=True,
                  batch_axes=manual, gather="once", packed=True),
        scheduled("gemma3", 4, 1, 8, axes=fsdp, schedule="zero_bubble_h1", gather="once",
                  batch_axes=manual, remat="none", packed=True, layers_per_stage=2),
        scheduled("gemma3", 2, 2, 4, axes=both, schedule="zbv", dropout=0.1, remat="minimal"),
        scheduled("gemma3", 4, 1, 8, axes=fsdp, schedule="dualpipe", explicit=True,
                  batch_axes=manual, packed=True),
        scheduled("gemma3", 3, 1, 6, schedule="eager_1f1b", remat="none", packed=True),
        scheduled("gpt_oss", 2, 1, 4, axes=(("expert", 2), ("tensor", 2)), schedule="1f1b",
                  packed=True, vocab_parallel=True),
        scheduled("gpt_oss", 4, 1, 8, axes=fsdp, schedule="zero_bubble_h1", batch_axes=manual,
                  gather="once", packed=True, remat="none", layers_per_stage=2),
        scheduled("gpt_oss", 2, 2, 4, axes=(("fsdp", 2), ("expert", 2)), schedule="zbv",
                  dropout=0.1, remat="minimal"),
        scheduled("llama4", 2, 1, 4, axes=(("expert", 2), ("tensor", 2)), schedule="1f1b",
                  packed=True, vocab_parallel=True),
        scheduled("llama4", 4, 1, 8, axes=fsdp, schedule="zero_bubble_h1", batch_axes=manual,
                  gather="once", packed=True, remat="none"),
        # The sums over rows that it stores are the same on all devices of these axes.
        scheduled("deepseek", 2, 1, 4, axes=fsdp, schedule="gpipe", batch_axes=manual, packed=True,
                  remat="none"),
        # Loops in halves.
        llama(4, 8, 8, axes=fsdp, schedule="looped_bfs", gather="repeat", batch_axes=manual,
              explicit=True),
        llama(3, 9, 3, axes=fsdp, schedule="looped_bfs", gather="repeat", remat="none"),
        llama(2, 8, 5, axes=both, schedule="looped_bfs", gather="repeat", layers_per_stage=2,
              remat="minimal"),
        scheduled("mlp", 8, 8, 8, axes=(), schedule="looped_bfs", gather="repeat", dropout=0.1),
        scheduled("llama", 2, 8, 4, axes=(("data", 2), ("fsdp", 2)), schedule="looped_bfs",
                  batch_axes=manual, gather="repeat", zero=True, vocab_parallel=True),
        scheduled("deepseek", 2, 8, 4, axes=(("fsdp", 2), ("expert", 2)), schedule="looped_bfs",
                  gather="repeat", batch_axes=manual, packed=True),
    ]  # fmt: skip
    return [
        scheduled("mlp", 2, 8, 4, axes=fsdp, schedule="looped_bfs", gather="repeat", tied=True,
                  dropout=0.1, remat="none"),
        llama(2, 1, 4, axes=both, schedule="1f1b", gather="once", batch_axes=manual,
              layers_per_stage=2),
        llama(3, 2, 6, axes=fsdp, schedule="looped_bfs", gather="repeat", batch_axes=manual),
        *slow(in_slow_job),
    ]  # fmt: skip


def slices() -> list[Row]:
    """Seq1F1B: every number of ranks with every number of slices."""
    llama = functools.partial(scheduled, "llama", schedule="seq1f1b", packed=True)
    remats = "full", "none", "minimal"
    rows = [
        llama(ranks, 1, 4, slices=slices, remat=remats[(ranks + slices) % 3],
              tied=bool(slices % 2), layers_per_stage=1 + (ranks == 2))
        for ranks in (2, 3, 4, 8)
        for slices in (1, 2, 3)
    ]  # fmt: skip
    fsdp = (("fsdp", 2),)
    more = [
        llama(2, 1, 4, axes=fsdp, slices=2, batch_axes=("data", "fsdp"), gather="once"),
        llama(4, 1, 4, axes=fsdp, slices=2, batch_axes=("data", "fsdp"), explicit=True),
        scheduled("qwen3", 2, 1, 4, axes=(("tensor", 2),), schedule="seq1f1b", slices=4,
                  vocab_parallel=True, packed=True),
        llama(3, 1, 4, axes=(), slices=2, gather="repeat", layers_per_stage=2),
        scheduled("gemma3", 2, 1, 4, schedule="seq1f1b", slices=3, packed=True, tied=True,
                  layers_per_stage=2, remat="none"),
        scheduled("gemma3", 4, 1, 4, axes=(), schedule="seq1f1b", slices=2, packed=True),
    ]  # fmt: skip
    in_test_job = rows[1:2] + rows[5:6]
    return in_test_job + slow([row for row in rows + more if row not in in_test_job])


def product() -> list[Row]:
    """Every schedule x ranks x chunks x rematerialisation x dense, experts x fsdp, tensor."""
    rows = []
    row = functools.partial(scheduled, job="product")
    for name in names():
        for ranks in (2, 4, 8) if name in EVEN else (2, 3, 4, 8):
            for wanted in (1, 2, 3):
                v = chunks(name, wanted)
                if v != wanted and (wanted > 1 or v != 2):
                    continue
                for remat in ("full", "none"):
                    rows += [
                        row("mlp", ranks, v, 2 * ranks, axes=(), schedule=name, remat=remat,
                            tied=True, dropout=0.1),
                        row("llama", ranks, v, 2 * ranks, schedule=name, remat=remat,
                            axes=(("fsdp", 2),) if ranks < 8 else (), packed=True,
                            gather="once", batch_axes=("data", "fsdp"), layers_per_stage=2),
                        row("llama", ranks, v, 2 * ranks, schedule=name, remat=remat,
                            axes=(("tensor", 2),) if ranks < 8 else (), tied=True,
                            dropout=0.1),
                        row("deepseek", ranks, v, 2 * ranks, schedule=name, remat=remat,
                            axes=(("fsdp", 2),) if ranks < 8 else (), packed=True,
                            batch_axes=("data", "fsdp"), layers_per_stage=2),
                    ]  # fmt: skip
    return rows
