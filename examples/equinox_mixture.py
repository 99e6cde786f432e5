"""An Equinox mixture of experts as a pipeline: one program, ring expert parallelism, muon.

    python examples/equinox_mixture.py

trains a tiny one on four emulated devices of the CPU, two stages by two shards of experts, under
three schedules, and prints every loss beside that of the plain program: the same module on one
device. The module knows no pipeline. It says what its layers do on the mesh axis `expert`, if there
is a mesh: each device has its own rows and its own experts. Before the experts, devices gather the
tokens of all of them (`all_gather`); each runs its experts on the tokens that chose them
(`ragged_dot`); and the results of a token are summed where it is from (`psum_scatter`).

b rows, T tokens of a row, n tokens, D width, H heads, K heads of keys and values, C channels of a
head, E experts, e experts of a device, k experts of a token, F and S widths of experts, V words.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

import jaxpipe as jp
from jaxpipe.models.layers import GroupedMatmul, ragged_dot, rms_norm

ROWS = P("expert")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, by default of a tiny one."""

    vocab: int = 128  # V
    width: int = 32  # D
    layers: int = 4
    heads: int = 4  # H
    kv_heads: int = 2  # K
    head_width: int = 8  # C
    experts: int = 4  # E
    chosen: int = 2  # k
    expert_width: int = 32  # F
    shared_width: int = 32  # S, of the expert that has every token
    window: int | None = None  # tokens that a query sees back to
    room: float | None = None  # for how many times the mean of tokens of a device; None: for all
    dtype: Any = jnp.float32


class Attention(eqx.Module):
    """Grouped-query attention with rotary positions."""

    query: Float[Array, "D HC"]
    key: Float[Array, "D KC"]
    value: Float[Array, "D KC"]
    out: Float[Array, "HC D"]
    head_width: int = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __call__(self, x: Float[Array, "b T D"]) -> Float[Array, "b T D"]:
        shape = *x.shape[:2], -1, self.head_width
        q, k, v = ((x @ w).reshape(shape) for w in (self.query, self.key, self.value))
        mixed = jp.attention(rotary(q), rotary(k), v, window=self.window)
        return mixed.reshape(*x.shape[:2], -1) @ self.out


def rotary(x: Float[Array, "b T H C"]) -> Float[Array, "b T H C"]:
    """Turns pairs of channels by angles that grow with the position."""
    T, half = x.shape[1], x.shape[3] // 2
    turns = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(T, dtype=jnp.float32)[:, None, None] * turns
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Mixture(eqx.Module):
    """Routed experts, and one that has every token."""

    router: Float[Array, "D E"]
    bias: Float[Array, " E"]
    gate: Float[Array, "E D F"]
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]
    shared_up: Float[Array, "D S"]
    shared_down: Float[Array, "S D"]
    chosen: int = eqx.field(static=True)
    room: float | None = eqx.field(static=True)
    grouped_matmul: GroupedMatmul = eqx.field(static=True)

    def __call__(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n D"], Float[Array, ""]]:
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ self.router)
        # The bias affects the choice alone: shares are those of the scores without it.
        chosen = lax.top_k(lax.stop_gradient(scores + self.bias), self.chosen)[1]
        shares = jnp.take_along_axis(scores, chosen, axis=1)
        shares = (shares / shares.sum(axis=1, keepdims=True)).astype(x.dtype)
        shared = jax.nn.silu(x @ self.shared_up) @ self.shared_down
        return shared + self.routed(x, chosen, shares), self.surplus(chosen)

    def routed(
        self, x: Float[Array, "n D"], chosen: Int[Array, "n k"], shares: Float[Array, "n k"]
    ) -> Float[Array, "n D"]:
        """Runs the experts of all devices."""
        if not has_own_rows():
            return self.run(x, chosen, shares)
        gather = partial(lax.all_gather, axis_name="expert", tiled=True)
        first = lax.axis_index("expert") * self.gate.shape[0]
        y = self.run(gather(x), gather(chosen) - first, gather(shares))
        return lax.psum_scatter(y, "expert", tiled=True)

    def run(
        self, x: Float[Array, "n D"], chosen: Int[Array, "n k"], shares: Float[Array, "n k"]
    ) -> Float[Array, "n D"]:
        """Runs this device's experts, 0 to e - 1, on the tokens that chose them."""
        e, E, k = self.gate.shape[0], self.bias.shape[0], chosen.shape[1]
        group = jnp.where((chosen >= 0) & (chosen < e), chosen, e).reshape(-1)
        order = jnp.argsort(group)  # tokens of an expert are neighbours, and those of none last
        if self.room is not None:
            order = order[: math.ceil(self.room * group.size * e / E)]  # the rest is dropped
        ends = jnp.sum(group[:, None] <= jnp.arange(e), axis=0, dtype=jnp.int32)
        sizes = jnp.diff(jnp.minimum(ends, order.size), prepend=0)
        rows = x[order // k]
        hidden = jax.nn.silu(self.grouped_matmul(rows, self.gate, sizes))
        hidden *= self.grouped_matmul(rows, self.up, sizes)
        out = self.grouped_matmul(hidden, self.down, sizes)  # zeros for tokens of no expert
        out *= shares.reshape(-1, 1)[order]
        return jnp.zeros_like(x).at[order // k].add(out)

    def surplus(self, chosen: Int[Array, "n k"]) -> Float[Array, ""]:
        """Returns 0; the gradient of the bias is each expert's share of tokens minus 1 / E.

        So an optimizer lowers the bias of the experts that have too many tokens.
        """
        E = self.bias.shape[0]
        load = jnp.mean(chosen.reshape(-1, 1) == jnp.arange(E), axis=0, dtype=jnp.float32)
        load = lax.pmean(load, "expert") if has_own_rows() else load
        return jnp.sum((load - 1 / E) * (self.bias - lax.stop_gradient(self.bias)))


class Block(eqx.Module):
    """A layer of the decoder."""

    attention: Attention
    mixture: Mixture
    attention_norm: Float[Array, " D"]
    mixture_norm: Float[Array, " D"]
    mesh: Mesh | None = eqx.field(static=True)

    def __call__(self, x: Float[Array, "b T D"]) -> tuple[Float[Array, "b T D"], Float[Array, ""]]:
        return on_own_rows(Block.run, self, x, out_specs=(ROWS, P()))

    def run(self, x: Float[Array, "b T D"]) -> tuple[Float[Array, "b T D"], Float[Array, ""]]:
        x = x + self.attention(rms_norm(x, self.attention_norm, 1e-6))
        y, surplus = self.mixture(rms_norm(x, self.mixture_norm, 1e-6).reshape(-1, x.shape[2]))
        return x + y.reshape(x.shape), surplus


class Head(eqx.Module):
    """The loss of every token."""

    norm: Float[Array, " D"]
    matrix: Float[Array, "D V"]
    mesh: Mesh | None = eqx.field(static=True)

    def __call__(self, x: Float[Array, "b T D"], targets: Int[Array, "b T"]) -> Float[Array, "b T"]:
        return on_own_rows(Head.run, self, x, targets, out_specs=ROWS)

    def run(self, x: Float[Array, "b T D"], targets: Int[Array, "b T"]) -> Float[Array, "b T"]:
        logits = (rms_norm(x, self.norm, 1e-6) @ self.matrix).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


class Decoder(eqx.Module):
    """A language model: the loss of every token, and the sum of what else layers return."""

    embedding: Float[Array, "V D"]
    blocks: list[Block]
    head: Head

    def __call__(self, batch: PyTree) -> tuple[Float[Array, "b T"], Float[Array, ""]]:
        x, total = self.embedding[batch["tokens"][:, :-1]], jnp.zeros(())
        for block in self.blocks:
            x, surplus = block(x)
            total += surplus
        return self.head(x, batch["tokens"][:, 1:]), total


def loss(outputs: tuple[Array, Array], batch: PyTree) -> Float[Array, ""]:
    losses, surplus = outputs
    return losses.mean() + surplus


def has_own_rows() -> bool:
    """Returns whether a device has its own rows and experts where this is called."""
    return "expert" in jax.sharding.get_abstract_mesh().manual_axes


def expert_spec(path: str, leaf: Any) -> P | None:
    """Returns how a parameter is sharded: stacks of matrices are experts."""
    return P("expert") if leaf.ndim == 3 else None


def on_own_rows(run: Callable, module: Block | Head, *rows: Array, out_specs: Any) -> Any:
    """Runs a method of a module on the rows and experts of each device, if there is a mesh."""
    if module.mesh is None:
        return run(module, *rows)
    of_module = jax.tree.map(lambda leaf: expert_spec("", leaf) or P(), module)
    specs = of_module, *(ROWS for _ in rows)
    # JAX cannot differentiate a `jax.shard_map` inside of another, which a pipeline is. Of one that
    # is given the pipeline's `mesh` jaxpipe makes the derivative. Kernels want `check_vma=False`.
    how = {"mesh": module.mesh, "in_specs": specs, "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(run, **how)(module, *rows)


def make_decoder(
    sizes: Sizes, mesh: Mesh | None = None, grouped_matmul: GroupedMatmul = ragged_dot
) -> Decoder:
    """Returns a decoder with random parameters, the same for every mesh."""
    keys = iter(jax.random.split(jax.random.key(0), 10 * sizes.layers + 2))
    D, C, V, S = sizes.width, sizes.head_width, sizes.vocab, sizes.shared_width
    E, F, HC, KC = sizes.experts, sizes.expert_width, sizes.heads * C, sizes.kv_heads * C

    def matrix(*shape: int, dtype: Any = sizes.dtype) -> Array:
        return jax.random.normal(next(keys), shape, dtype) * shape[-2] ** -0.5

    def block() -> Block:
        weights = matrix(D, HC), matrix(D, KC), matrix(D, KC), matrix(HC, D)
        attention = Attention(*weights, C, sizes.window)
        router = matrix(D, E, dtype=jnp.float32), jnp.zeros(E)
        experts = matrix(E, D, F), matrix(E, D, F), matrix(E, F, D), matrix(D, S), matrix(S, D)
        mixture = Mixture(*router, *experts, sizes.chosen, sizes.room, grouped_matmul)
        return Block(attention, mixture, jnp.ones(D, sizes.dtype), jnp.ones(D, sizes.dtype), mesh)

    embedding = jax.random.normal(next(keys), (V, D), sizes.dtype)
    blocks = [block() for _ in range(sizes.layers)]
    return Decoder(embedding, blocks, Head(jnp.ones(D, sizes.dtype), matrix(D, V), mesh))


def make_model(decoder: Decoder) -> tuple[jp.Model, PyTree]:
    """Returns the model of a decoder for `jaxpipe.pipeline`, and the decoder's parameters."""
    return jp.equinox.model(
        decoder, layers="blocks", loss=loss, call=lambda decoder, batch: decoder(batch), vmap=False
    )


def muon(rate: float) -> optax.GradientTransformation:
    """Returns muon for the matrices of blocks, each expert's by itself, and AdamW for the rest."""

    def dimensions(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        if "blocks" not in jax.tree_util.keystr(path) or leaf.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    by_path = partial(jax.tree_util.tree_map_with_path, dimensions)
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=by_path)


def make_batch(sizes: Sizes, step: int) -> dict[str, Array]:
    """Returns 16 rows that count upwards, each from another number."""
    start = jax.random.randint(jax.random.key(step), (16, 1), 0, sizes.vocab)
    return {"tokens": (start + jnp.arange(17)) % sizes.vocab}


def train(jit: Callable, value_and_grad: Callable, tx: Any, params: PyTree, sizes: Sizes) -> Any:
    """Trains for eight steps. Returns the loss of each."""

    @jit
    def train_step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, Array]:
        value, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for step in range(8):
        params, state, value = train_step(params, state, make_batch(sizes, step))
        losses.append(float(value))
    return losses


def train_plain(sizes: Sizes) -> list[float]:
    decoder = make_decoder(sizes)

    def forward(params: PyTree, batch: PyTree) -> Array:
        return loss(eqx.combine(params, decoder)(batch), batch)

    params = eqx.filter(decoder, eqx.is_inexact_array)
    return train(jax.jit, jax.value_and_grad(forward), muon(1e-2), params, sizes)


def train_pipelined(sizes: Sizes, schedule: str) -> list[float]:
    mesh = jp.make_mesh({"stage": 2, "expert": 2})
    model, params = make_model(make_decoder(sizes, mesh))
    pipe = jp.pipeline(model, schedule=schedule, mesh=mesh, microbatches=4, param_specs=expert_spec)

    def value_and_grad(params: PyTree, batch: PyTree) -> tuple[Array, PyTree]:
        (value, _), grads = pipe.value_and_grad(params, batch)
        return value, grads

    tx = pipe.optimizer(muon(1e-2))
    return train(pipe.jit, value_and_grad, tx, pipe.shard(params), sizes)


def main() -> None:
    jp.emulate_devices(4)  # on a CPU; leave it out where there are four devices
    plain = train_plain(Sizes())
    print(f"{'plain':<15}", *(f"{value:.5f}" for value in plain))
    for schedule in ("1f1b", "zero_bubble_h1", "circular"):
        losses = train_pipelined(Sizes(), schedule)
        error = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
        print(f"{schedule:<15}", *(f"{value:.5f}" for value in losses), f"off by {error:.0e}")
        assert error <= 1e-5, error


if __name__ == "__main__":
    main()
