"""An Equinox mixture of experts as a pipeline: one program, ring expert parallelism, muon.

    python examples/equinox_mixture.py

trains a tiny one on four emulated devices of the CPU, two stages by two shards of experts, under
several schedules, and prints every loss beside that of the plain program: the same module on one
device. The module knows of no pipeline. It says how a layer runs on the mesh axis `expert`, if
there is one: each device has its own rows of x and its own experts. Before the experts all devices
gather the tokens of all (`all_gather`); each runs its experts on the tokens that chose them
(`ragged_dot`); and each token's results are summed on the device that it is from (`psum_scatter`).

b rows, T tokens of a row, n tokens of all rows, D width, H heads, K heads of keys and values,
C channels of a head, E experts, e experts of a device, k experts of a token, F width of an expert.
"""

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
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

import jaxpipe as jp
from jaxpipe.models.layers import GroupedMatmul, ragged_dot, rms_norm


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, by default of a tiny one."""

    vocab: int = 128
    width: int = 32  # D
    layers: int = 4
    heads: int = 4  # H
    kv_heads: int = 2  # K
    head_width: int = 8  # C
    experts: int = 4  # E
    chosen: int = 2  # k
    expert_width: int = 32  # F
    shared_width: int = 32  # of the expert that has every token
    window: int | None = None  # tokens that a query sees back to
    dtype: Any = jnp.float32


def normal(key: PRNGKeyArray, *shape: int, dtype: Any) -> Array:
    """Returns a matrix, or a stack of them, that keeps the size of its input."""
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


class Attention(eqx.Module):
    """Grouped-query attention with rotary positions."""

    query: Float[Array, "D HC"]
    key: Float[Array, "D KC"]
    value: Float[Array, "D KC"]
    out: Float[Array, "HC D"]
    head_width: int = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, sizes: Sizes, key: PRNGKeyArray):
        keys, C = jax.random.split(key, 4), sizes.head_width
        matrix = partial(normal, dtype=sizes.dtype)
        self.query = matrix(keys[0], sizes.width, sizes.heads * C)
        self.key = matrix(keys[1], sizes.width, sizes.kv_heads * C)
        self.value = matrix(keys[2], sizes.width, sizes.kv_heads * C)
        self.out = matrix(keys[3], sizes.heads * C, sizes.width)
        self.head_width, self.window = C, sizes.window

    def __call__(self, x: Float[Array, "b T D"]) -> Float[Array, "b T D"]:
        q, k, v = (
            (x @ w).reshape(*x.shape[:2], -1, self.head_width)
            for w in (self.query, self.key, self.value)
        )
        mixed = jp.attention(rotary(q), rotary(k), v, window=self.window)
        return mixed.reshape(*x.shape[:2], -1) @ self.out


def rotary(x: Float[Array, "b T H C"]) -> Float[Array, "b T H C"]:
    """Turns pairs of channels by angles that grow with the position."""
    T, half = x.shape[1], x.shape[3] // 2
    angles = jnp.arange(T)[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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
    grouped_matmul: GroupedMatmul = eqx.field(static=True)

    def __init__(self, sizes: Sizes, grouped_matmul: GroupedMatmul, key: PRNGKeyArray):
        keys = jax.random.split(key, 6)
        D, E, F, S = sizes.width, sizes.experts, sizes.expert_width, sizes.shared_width
        matrix = partial(normal, dtype=sizes.dtype)
        self.router = normal(keys[0], D, E, dtype=jnp.float32)
        self.bias = jnp.zeros(E)
        self.gate, self.up = matrix(keys[1], E, D, F), matrix(keys[2], E, D, F)
        self.down = matrix(keys[3], E, F, D)
        self.shared_up, self.shared_down = matrix(keys[4], D, S), matrix(keys[5], S, D)
        self.chosen, self.grouped_matmul = sizes.chosen, grouped_matmul

    def __call__(self, x: Float[Array, "n D"]) -> tuple[Float[Array, "n D"], Float[Array, ""]]:
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ self.router)
        # The bias affects the choice alone: shares are of the scores without it.
        chosen = lax.top_k(lax.stop_gradient(scores + self.bias), self.chosen)[1]
        shares = jnp.take_along_axis(scores, chosen, axis=1)
        shares = (shares / shares.sum(axis=1, keepdims=True)).astype(x.dtype)
        y = jax.nn.silu(x @ self.shared_up) @ self.shared_down
        return y + self.ring(x, chosen, shares), self.surplus_term(chosen)

    def ring(
        self, x: Float[Array, "n D"], chosen: Int[Array, "n k"], shares: Float[Array, "n k"]
    ) -> Float[Array, "n D"]:
        """Runs the experts of all devices on the tokens of all."""
        if not is_on_shards():
            return self.run(x, chosen, shares)
        gather = partial(lax.all_gather, axis_name="expert", tiled=True)
        first = lax.axis_index("expert") * self.gate.shape[0]
        y = self.run(gather(x), gather(chosen) - first, gather(shares))
        return lax.psum_scatter(y, "expert", tiled=True)

    def run(
        self, x: Float[Array, "n D"], chosen: Int[Array, "n k"], shares: Float[Array, "n k"]
    ) -> Float[Array, "n D"]:
        """Runs this device's experts, 0 to e - 1, on the tokens that chose them."""
        e, k = self.gate.shape[0], chosen.shape[1]
        group = jnp.where((chosen >= 0) & (chosen < e), chosen, e).reshape(-1)
        order = jnp.argsort(group)  # tokens of an expert are neighbours, those of others last
        sizes = jnp.sum(group[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32)
        rows = x[order // k]  # results of rows after the last group are zeros
        hidden = jax.nn.silu(self.grouped_matmul(rows, self.gate, sizes))
        hidden *= self.grouped_matmul(rows, self.up, sizes)
        out = self.grouped_matmul(hidden, self.down, sizes)[jnp.argsort(order)]
        return jnp.sum(out.reshape(-1, k, x.shape[1]) * shares[..., None], axis=1)

    def surplus_term(self, chosen: Int[Array, "n k"]) -> Float[Array, ""]:
        """Returns 0, with each expert's share of tokens beyond 1 / E as the bias's gradient.

        So an optimizer lowers the bias of experts that have too many tokens.
        """
        E = self.bias.shape[0]
        load = jnp.mean(chosen.reshape(-1, 1) == jnp.arange(E), axis=0, dtype=jnp.float32)
        load = lax.pmean(load, "expert") if is_on_shards() else load
        return jnp.sum((load - 1 / E) * (self.bias - lax.stop_gradient(self.bias)))


class Block(eqx.Module):
    """A layer of the decoder."""

    attention: Attention
    mixture: Mixture
    attention_norm: Float[Array, " D"]
    mixture_norm: Float[Array, " D"]
    mesh: Mesh | None = eqx.field(static=True)

    def __init__(
        self, sizes: Sizes, mesh: Mesh | None, grouped_matmul: GroupedMatmul, key: PRNGKeyArray
    ):
        keys = jax.random.split(key)
        self.mesh = mesh
        self.attention = Attention(sizes, keys[0])
        self.mixture = Mixture(sizes, grouped_matmul, keys[1])
        self.attention_norm = jnp.ones(sizes.width, sizes.dtype)
        self.mixture_norm = jnp.ones(sizes.width, sizes.dtype)

    def __call__(self, x: Float[Array, "b T D"]) -> tuple[Float[Array, "b T D"], Float[Array, ""]]:
        return on_own_rows(Block.run, self.mesh, self, x, out_specs=(ROWS, P()))

    def run(self, x: Float[Array, "b T D"]) -> tuple[Float[Array, "b T D"], Float[Array, ""]]:
        x = x + self.attention(rms_norm(x, self.attention_norm, 1e-6))
        y, term = self.mixture(rms_norm(x, self.mixture_norm, 1e-6).reshape(-1, x.shape[2]))
        return x + y.reshape(x.shape), term


class Head(eqx.Module):
    """The loss of every token."""

    norm: Float[Array, " D"]
    matrix: Float[Array, "D V"]
    mesh: Mesh | None = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "b T D"], targets: Int[Array, "b T"]
    ) -> Float[Array, "b T"]:
        return on_own_rows(Head.run, self.mesh, self, x, targets, out_specs=ROWS)

    def run(self, x: Float[Array, "b T D"], targets: Int[Array, "b T"]) -> Float[Array, "b T"]:
        logits = (rms_norm(x, self.norm, 1e-6) @ self.matrix).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


class Decoder(eqx.Module):
    """A language model: the loss of every token, and the sum of the layers' terms of the loss."""

    embedding: Float[Array, "V D"]
    blocks: list[Block]
    head: Head

    def __init__(
        self,
        sizes: Sizes,
        key: PRNGKeyArray,
        mesh: Mesh | None = None,
        grouped_matmul: GroupedMatmul = ragged_dot,
    ):
        keys, (V, D) = jax.random.split(key, sizes.layers + 2), (sizes.vocab, sizes.width)
        self.embedding = jax.random.normal(keys[0], (V, D), sizes.dtype)
        self.blocks = [Block(sizes, mesh, grouped_matmul, key) for key in keys[2:]]
        head = normal(keys[1], D, V, dtype=sizes.dtype)
        self.head = Head(jnp.ones(D, sizes.dtype), head, mesh)

    def __call__(self, batch: PyTree) -> tuple[Float[Array, "b T"], Float[Array, ""]]:
        x, terms = self.embedding[batch["tokens"][:, :-1]], jnp.zeros(())
        for block in self.blocks:
            x, term = block(x)
            terms += term
        return self.head(x, batch["tokens"][:, 1:]), terms


def loss(outputs: tuple[Array, Array], batch: PyTree) -> Float[Array, ""]:
    losses, terms = outputs
    return losses.mean() + terms


ROWS = P("expert")


def is_on_shards() -> bool:
    """Returns whether each device has its own rows and experts here."""
    return "expert" in jax.sharding.get_abstract_mesh().manual_axes


def spec_of(leaf: Any) -> P:
    """Returns how a parameter is sharded: stacks of experts over `expert`, others not at all."""
    return P("expert") if leaf.ndim == 3 else P()


def on_own_rows(
    run: Callable, mesh: Mesh | None, module: eqx.Module, *rows: Array, out_specs: Any
) -> Any:
    """Runs a method on the rows and the experts of each device of the axis `expert`."""
    if mesh is None:
        return run(module, *rows)
    specs = jax.tree.map(spec_of, module), *(ROWS for _ in rows)
    # With `mesh` jaxpipe gives it a derivative that is right inside of a pipeline. JAX alone cannot
    # differentiate a `jax.shard_map` inside of another one, with or without `check_vma`.
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs)(module, *rows)


def muon(rate: float) -> optax.GradientTransformation:
    """Returns muon for the matrices of blocks, each expert's by itself, and AdamW for the rest."""

    def dimensions(params: PyTree) -> PyTree:
        def of(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
            if "blocks" not in jax.tree_util.keystr(path) or leaf.ndim < 2:
                return None
            return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(rate, muon_weight_dimension_numbers=dimensions)


def make_pipeline(
    decoder: Decoder, mesh: Mesh, *, microbatches: int, **options: Any
) -> tuple[jp.PipelinedModel, PyTree]:
    """Returns the pipeline of a decoder, and the decoder's parameters."""
    model, params = jp.equinox.model(
        decoder, layers="blocks", loss=loss, call=lambda decoder, batch: decoder(batch), vmap=False
    )
    options |= {"param_specs": lambda path, leaf: spec_of(leaf) if leaf.ndim == 3 else None}
    return jp.pipeline(model, mesh=mesh, microbatches=microbatches, **options), params


def make_batch(sizes: Sizes, step: int) -> dict[str, Array]:
    """Returns 16 rows that count upwards, each from another number."""
    start = jax.random.randint(jax.random.key(step), (16, 1), 0, sizes.vocab)
    return {"tokens": (start + jnp.arange(17)) % sizes.vocab}


def train_plainly(sizes: Sizes, steps: int) -> list[float]:
    """Trains the module on one device. Returns the loss of every step."""
    decoder = Decoder(sizes, jax.random.key(0))
    params, tx = eqx.filter(decoder, eqx.is_inexact_array), muon(1e-2)

    @jax.jit
    def train_step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, Array]:
        def forward(params: PyTree) -> Array:
            return loss(eqx.combine(params, decoder)(batch), batch)

        value, grads = jax.value_and_grad(forward)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return train(train_step, params, tx.init(params), sizes, steps)


def train_pipelined(sizes: Sizes, steps: int, schedule: str) -> list[float]:
    """The same as a pipeline of two stages by two shards of experts."""
    mesh = jp.make_mesh({"stage": 2, "expert": 2})
    decoder = Decoder(sizes, jax.random.key(0), mesh)
    pipe, params = make_pipeline(decoder, mesh, microbatches=4, schedule=schedule)
    params, tx = pipe.shard(params), pipe.optimizer(muon(1e-2))

    def train_step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, Array]:
        (value, _), grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return train(pipe.jit(train_step), params, tx.init(params), sizes, steps)


def train(
    train_step: Callable, params: PyTree, state: PyTree, sizes: Sizes, steps: int
) -> list[float]:
    losses = []
    for step in range(steps):
        params, state, value = train_step(params, state, make_batch(sizes, step))
        losses.append(float(value))
    return losses


def main() -> None:
    jp.emulate_devices(4)  # on a CPU; leave it out where there are four devices
    sizes = Sizes()
    plain = train_plainly(sizes, steps=8)
    print(f"{'plain':<16}" + "".join(f"{value:>9.5f}" for value in plain))
    for schedule in ("1f1b", "zero_bubble_h1", "circular"):
        losses = train_pipelined(sizes, 8, schedule)
        error = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
        print(f"{schedule:<16}" + "".join(f"{x:>9.5f}" for x in losses) + f"  {error:.0e}")
        assert error <= 1e-5


if __name__ == "__main__":
    main()
