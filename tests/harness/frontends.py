"""Shared parts of the tests of both front ends: config, batch, the plain loop over layers, rows."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness.contract import assert_close
from jaxpipe import sharding

EMBED, HEADS, MLP, ROWS, LENGTH = 16, 2, 32, 2, 4
FIELDS = {
    "once": {"pipeline_fsdp_ag_once": True},
    "repeat": {"pipeline_fsdp_ag_per_repeat": True},
    "delay": {"pipeline_delay_activation_forwarding": True},
    "flat": {"scan_pipeline_repeats": False},
    "unrolled": {"scan_pipeline_iterations": False},
    "rows": {"pipeline_batch_axes": ("fsdp",)},
    "remat": {
        "set_remat_policy_on_layers_per_stage": True,
        "set_remat_policy_on_pipeline_iterations": False,
    },
}


@dataclass(frozen=True)
class Row:
    """S ranks, R repeats, L layers of a stage, names of `FIELDS`, and whether on a mesh."""

    ranks: int
    repeats: int
    layers: int
    fields: str = ""
    fsdp: int = 0

    def __str__(self) -> str:
        mesh = f"fsdp{self.fsdp}" if self.fsdp else "twin"
        return f"S{self.ranks}-R{self.repeats}-L{self.layers}-{mesh}-{self.fields or 'plain'}"

    @property
    def dims(self) -> tuple[int, ...]:
        """Of stacked variables, as MaxText has them: [R, S, ...], or [S, ...] with one repeat."""
        return (self.repeats, self.ranks) if self.repeats > 1 else (self.ranks,)

    @property
    def microbatches(self) -> int:
        return self.ranks * (2 if "delay" in self.fields else 1)

    def config(self, **more: Any) -> SimpleNamespace:
        fields: dict[str, Any] = {
            "ici_pipeline_parallelism": self.ranks,
            "num_pipeline_repeats": self.repeats,
            "num_layers_per_pipeline_stage": self.layers,
            "num_pipeline_microbatches": self.microbatches,
        }
        for name in self.fields.split():
            fields |= FIELDS[name]
        return SimpleNamespace(**fields | more)

    def mesh(self) -> Any:
        if not self.fsdp:
            return None
        sizes = {"stage": self.ranks, "fsdp": self.fsdp}
        return sharding.make_mesh(sizes, devices=jax.devices()[: self.ranks * self.fsdp])

    def batch(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(inputs [batch, T, D], segment_ids [batch, T], positions [batch, T])"""
        shape = (self.microbatches * ROWS, LENGTH)
        inputs = jax.random.normal(jax.random.key(3), (*shape, EMBED))
        segments = jnp.broadcast_to(jnp.array([1, 1, 2, 2], jnp.int32), shape)
        return inputs, segments, jnp.broadcast_to(jnp.arange(LENGTH), shape)


EXACT = [
    Row(2, 2, 2, fsdp=2),
    Row(3, 2, 1, "delay flat"),
    Row(4, 2, 1, "repeat", fsdp=2),
    Row(2, 1, 2, "once remat"),
    Row(2, 2, 1, "repeat unrolled"),
]
BY_HAND = [
    Row(ranks, repeats, 1, fields)
    for ranks in (2, 3, 4)
    for repeats in (1, 2)
    for fields in ("delay", "repeat delay")
]
BY_HAND += [Row(3, 2, 1), Row(3, 2, 1, "repeat"), Row(2, 1, 1)]


def attention(q, k, v, segment_ids, positions):
    """Of one microbatch, [b, T, D] each: causal, and inside documents."""
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    logits = jnp.einsum("bqhc,bkhc->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    seen &= positions[:, None, :, None] >= positions[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e9))
    return jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(*q.shape[:2], -1)


def by_stage(row: Row, weights: Any) -> Any:
    """Stacked leaves as [stages, ...] leaves, in the order in which stages run."""
    return jax.tree.map(lambda w: w.reshape(-1, *w.shape[len(row.dims) :]), weights)


def plain_loop(stage: Any, row: Row, weights: Any, *batch: Any) -> Any:
    """Every stage of every microbatch, one after the other: `stage(w, x, seg, pos, s, m)`."""
    flat = by_stage(row, weights)
    numbers = jnp.arange(int(np.prod(row.dims)))

    def microbatch(of):
        (x, *batch_inputs), m = of
        step = lambda x, of: (stage(of[0], x, *batch_inputs, of[1], m), None)  # noqa: E731
        return jax.lax.scan(step, x, (flat, numbers))[0]

    split = [x.reshape(row.microbatches, ROWS, *x.shape[1:]) for x in batch]
    return jax.lax.map(microbatch, (split, jnp.arange(row.microbatches))).reshape(batch[0].shape)


def scalar(y: jax.Array) -> jax.Array:
    """Something to differentiate in which every output counts differently."""
    return jnp.sum(jnp.sin(y) * jnp.linspace(0.5, 1.5, y.size).reshape(y.shape))


def assert_trees_close(tree: Any, true: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(true)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), true_leaf in zip(leaves, jax.tree.leaves(true), strict=True):
        assert_close(leaf, true_leaf, jax.tree_util.keystr(path))


REFUSED = {
    "gathers": (
        {"pipeline_fsdp_ag_once": True, "pipeline_fsdp_ag_per_repeat": True},
        "`pipeline_fsdp_ag_once` and `pipeline_fsdp_ag_per_repeat` are both on",
    ),
    "no layers": (
        {"pipeline_parallel_layers": 0, "num_decoder_layers": 4},
        "`pipeline_parallel_layers` is 0. Give at least 1 and at most all of the 4",
    ),
    "too many layers": (
        {"pipeline_parallel_layers": 8, "num_decoder_layers": 4},
        "`pipeline_parallel_layers` is 8",
    ),
    "layers that do not divide": (
        {"num_decoder_layers": 5},
        "^`num_decoder_layers` is 5, not a multiple of ranks x",
    ),
    "pipelined layers that do not divide": (
        {"num_decoder_layers": 8, "pipeline_parallel_layers": 5},
        "^`pipeline_parallel_layers` is 5, not a multiple of ranks x",
    ),
    "microbatches that do not divide": (
        {"num_pipeline_microbatches": 3},
        "not a multiple of the 2 ranks.*make `num_pipeline_microbatches` a multiple of 2",
    ),
    "too few microbatches for the delay": (
        {"num_pipeline_repeats": 2, "pipeline_delay_activation_forwarding": True}
        | {"num_pipeline_microbatches": 2},
        "at least 4, or `pipeline_delay_activation_forwarding` False",
    ),
    "rows that do not divide": (
        {"micro_batch_size_to_train_on": 7},
        "`micro_batch_size_to_train_on` is 7, not a multiple",
    ),
    "remat policy": ({"remat_policy": "fulll"}, "`remat_policy` is 'fulll'. Give one of full"),
    "shard mode": ({"shard_mode": "both"}, "`shard_mode` is 'both'. Give 'auto' or 'explicit'"),
    "batch axes without a mesh": (
        {"pipeline_batch_axes": ("fsdp",)},
        "are no axes that `mesh` has beside 'stage'. It has none.",
    ),
    "a text for a flag": ({"pipeline_fsdp_ag_once": "false"}, "Give True or False"),
    "no ranks": ({"ici_pipeline_parallelism": 0}, "`ici_pipeline_parallelism` is 0"),
}
