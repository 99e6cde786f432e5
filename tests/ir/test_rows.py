"""The row analysis: whatever it says of a function is judged by the function's own numbers.

Every function of the tables is run on all rows and on each of D blocks of rows. Functions of
`CASES` also say what the analysis should find; `OPERATIONS` are combined at random.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxpipe.ir.rows import Mixed, Relation, RowIds, Rows, Sum, Whole, Zero, compare

B, T, D, V = 8, 3, 4, 5

W = {
    "square": jax.random.normal(jax.random.key(0), (D, D)),
    "table": jax.random.normal(jax.random.key(1), (V, D)),
    "vector": jax.random.normal(jax.random.key(2), (D,)),
    "scalar": jnp.float32(0.7),
    "positions": jax.random.normal(jax.random.key(3), (T, D)),
    "kernel": jax.random.normal(jax.random.key(4), (2, D, D)),
}
ROWS = {
    "x": jax.random.normal(jax.random.key(5), (B, T, D)),
    "tokens": jax.random.randint(jax.random.key(6), (B, T), 0, V),
    "mask": jax.random.bernoulli(jax.random.key(7), 0.6, (B, T)).astype(jnp.float32),
    "label": jax.random.randint(jax.random.key(8), (B,), 0, D),
    "pos": jax.random.uniform(jax.random.key(9), (B, T, D), minval=0.1),
}
KEY = jax.random.key(10)
CONSTANT = np.arange(D, dtype=np.float32)

Function = Callable[[Any, Any, Any], Any]


def relations(function: Function, num_blocks: int, rows: Any = None) -> list[Relation]:
    """Returns what the analysis says of the results of `function(w, rows, key)`."""
    rows = ROWS if rows is None else rows

    def traced(num_rows: int) -> Any:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), rows
        )
        return jax.make_jaxpr(function)(W, shapes, KEY)

    known = [
        *(Whole() for _ in jax.tree.leaves(W)),
        *(Rows(0) for _ in jax.tree.leaves(rows)),
        Whole(),
    ]
    count = len(jax.tree.leaves(rows)[0])
    return compare(traced(count), traced(count // num_blocks), known, num_blocks)


def blocks(tree: Any, num_blocks: int) -> list[Any]:
    size = len(jax.tree.leaves(tree)[0]) // num_blocks
    return [
        jax.tree.map(lambda x: x[k * size : (k + 1) * size], tree)  # noqa: B023
        for k in range(num_blocks)
    ]


def close(got: Any, wanted: Any, text: str) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, text
    both = np.isnan(got) & np.isnan(wanted)
    error = np.abs(np.where(both | (got == wanted), 0, got - wanted)).max(initial=0)
    scale = np.abs(np.where(np.isfinite(wanted), wanted, 0)).max(initial=0)
    assert error <= 2e-5 * max(scale, 1e-3), f"{text}: {error} of {scale}"


def judge(relation: Relation, whole: Any, parts: list[Any], num_blocks: int, text: str) -> None:
    """Checks that numbers have the relation that the analysis claims."""
    whole, parts = np.asarray(whole), [np.asarray(part) for part in parts]
    match relation:
        case Whole(scale):
            for part in parts:
                close(whole, part * float(num_blocks) ** scale, text)
        case Rows(dim, scale, uniform, False):
            close(whole, np.concatenate(parts, dim) * float(num_blocks) ** scale, text)
            if uniform:
                for part in parts:
                    close(part, parts[0], text)
        case Sum(scale):
            close(whole, sum(parts) * float(num_blocks) ** scale, text)
        case Zero():
            assert not whole.any() and not any(part.any() for part in parts), text
        case RowIds(dim, None):
            size = parts[0].shape[dim]
            close(whole, np.concatenate([p + k * size for k, p in enumerate(parts)], dim), text)
        case _:
            raise AssertionError(f"{text}: {relation}")


def judge_gradients(
    function: Function, found: list[Relation], num_blocks: int, text: str, rows: Any = None
) -> None:
    """Checks that gradients of blocks add up to those of all rows, as engines add them up."""
    rows = ROWS if rows is None else rows

    def scalar(w: Any, x: Any, others: Any, cotangents: list[Any]) -> Any:
        outputs = jax.tree.leaves(function(w, others | x, KEY))
        total = jnp.float32(0)
        for relation, output, cotangent in zip(found, outputs, cotangents, strict=True):
            inexact = jnp.issubdtype(output.dtype, jnp.floating)
            if inexact and not isinstance(relation, Mixed | Zero):
                total += jnp.sum(output * cotangent)
        return total

    names = [name for name in ("x", "pos") if name in rows]
    differentiated = {name: rows[name] for name in names}
    others = {name: rows[name] for name in rows if name not in names}
    outputs = jax.tree.leaves(jax.eval_shape(partial(function, W), rows, KEY))
    drawn = [jax.random.normal(jax.random.key(i), y.shape) for i, y in enumerate(outputs)]
    wanted = jax.grad(scalar, (0, 1))(W, differentiated, others, drawn)
    got_w, got_x = jax.tree.map(jnp.zeros_like, W), []
    for k in range(num_blocks):
        shares = []
        for relation, cotangent in zip(found, drawn, strict=True):
            match relation:
                case Rows(dim, scale):
                    share = jnp.split(cotangent, num_blocks, dim)[k] * float(num_blocks) ** scale
                case Sum(scale):
                    share = cotangent * float(num_blocks) ** scale
                case Whole(scale):  # the same in all: the engine takes the mean
                    share = cotangent * float(num_blocks) ** (scale - 1)
                case _:
                    share = cotangent
            shares.append(share)
        x, rest = blocks(differentiated, num_blocks)[k], blocks(others, num_blocks)[k]
        w_grad, x_grad = jax.grad(scalar, (0, 1))(W, x, rest, shares)
        got_w = jax.tree.map(jnp.add, got_w, w_grad)
        got_x.append(x_grad)
    for name in W:
        close(got_w[name], wanted[0][name], f"{text}, gradient of {name}")
    for name in names:
        joined = jnp.concatenate([x[name] for x in got_x])
        close(joined, wanted[1][name], f"{text}, gradient of {name}")


def kind_of(relation: Relation) -> str:
    match relation:
        case Rows():
            return "rows"
        case Sum(0):
            return "sum"
        case Sum(-1):
            return "mean"
        case Whole(0) | Zero():
            return "free"
        case Mixed():
            return "mixed"
        case _:
            return "scaled"


@jax.custom_vjp
def clips_by_batch(x: Any) -> Any:
    return x * 1.0


clips_by_batch.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.max(jnp.abs(g)),))


@jax.custom_vjp
def clips_by_row(x: Any) -> Any:
    return x * 1.0


clips_by_row.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@jax.custom_vjp
def clips_weights(w: Any) -> Any:
    return w * 1.0


clips_weights.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def tangent_of_batch(x: Any) -> Any:
    return x * 2.0


@tangent_of_batch.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0] * 2.0, tangents[0] - jnp.mean(tangents[0])


@jax.custom_jvp
def exponential(x: Any) -> Any:
    return jnp.exp(x)


# The rule reads the result, so the derivative calls the function itself.
exponential.defjvps(lambda g, ans, x: g * ans)


@jax.custom_vjp
def zeros_with_mixing_gradient(x: Any) -> Any:
    return jnp.zeros_like(x)


zeros_with_mixing_gradient.defvjp(lambda x: (x, None), lambda _, g: (g[::-1],))


@jax.custom_vjp
def zero_with_gradient(x: Any) -> Any:
    return jnp.zeros(())


zero_with_gradient.defvjp(
    lambda x: (jnp.zeros(()), x), lambda x, g: (g * jnp.mean(x) * jnp.ones_like(x),)
)


@jax.custom_jvp
def zeros_with_mixing_tangent(x: Any) -> Any:
    return jnp.zeros_like(x)


@zeros_with_mixing_tangent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return jnp.zeros_like(primals[0]), tangents[0][::-1]


def attention(w: Any, r: Any, key: Any) -> Any:
    q, k, v = r["x"] @ w["square"], r["x"], r["x"] + w["positions"]
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), q @ k.swapaxes(1, 2), -jnp.inf)
    return jax.nn.softmax(scores) @ v


def mixture(w: Any, r: Any, key: Any) -> Any:
    """Experts with a capacity over all tokens."""
    x = r["x"].reshape(-1, D)
    chosen = jax.nn.one_hot(jnp.argmax(x @ w["square"], -1), D)
    position = jnp.cumsum(chosen, 0) * chosen
    kept = jnp.where(position <= 2, chosen, 0)
    return (kept @ w["square"]).reshape(r["x"].shape)


def soft_mixture(w: Any, r: Any, key: Any) -> Any:
    """Experts that every token uses by its own weights; tokens are merged into one dim."""
    x = r["x"].reshape(-1, D)
    gates, chosen = lax.top_k(jax.nn.softmax(x @ w["square"]), 2)
    mixed = jnp.einsum("nk,nkd->nd", gates, w["square"][chosen])
    return mixed.reshape(r["x"].shape)


def cross_entropy(w: Any, r: Any) -> Any:
    logits = jax.nn.log_softmax(r["x"] @ w["table"].T)
    return -jnp.take_along_axis(logits, r["tokens"][..., None], -1)[..., 0]


def chunked_loss(w: Any, r: Any, key: Any) -> Any:
    def chunk(total: Any, t: Any) -> Any:
        x = lax.dynamic_index_in_dim(r["x"], t, 1, keepdims=False)
        return total + jnp.sum(jnp.tanh(x @ w["square"])), None

    return lax.scan(chunk, jnp.float32(0), jnp.arange(T))[0] / r["tokens"].size


def by_size(w: Any, r: Any, key: Any) -> Any:
    return r["x"] * (2 if r["x"].shape[0] > 4 else 3)


def one_hot_count(w: Any, r: Any, key: Any) -> Any:
    return jnp.zeros(V).at[r["tokens"].reshape(-1)].add(1.0)


def until_all_rows_are_done(w: Any, r: Any, key: Any) -> Any:
    return lax.while_loop(lambda x: jnp.any(x < 1), lambda x: x * 2, jnp.abs(r["pos"]))


def per_row_loop(w: Any, r: Any, key: Any) -> Any:
    return lax.map(lambda x: jnp.tanh(x @ w["square"]).sum(0), r["x"])


def carried_over_rows(w: Any, r: Any, key: Any) -> Any:
    return lax.scan(lambda c, x: (c + x.sum(), c + x), jnp.float32(0), r["x"])[1]


def mean_of_scanned_rows(w: Any, r: Any, key: Any) -> Any:
    """Adds up rows in a carry, in chunks of one, and counts chunks beside it."""

    def chunk(carry: Any, x: Any) -> Any:
        total, count = carry
        return (total + jnp.sum(jnp.tanh(x @ w["square"])), count + 1.0), None

    zero = jnp.float32(0)
    total, count = lax.scan(chunk, (zero, zero), r["x"])[0]
    return total / r["x"].size + count / r["x"].shape[0]


def squared_carry(w: Any, r: Any, key: Any) -> Any:
    return lax.scan(lambda c, x: (c + c * x.sum(), None), jnp.float32(0), r["x"])[0] / len(r["x"])


CASES: dict[str, tuple[Function, str]] = {
    # Row by row.
    "an embedding": (lambda w, r, k: w["table"][r["tokens"]] + w["positions"], "rows"),
    "take": (lambda w, r, k: jnp.take(w["table"], r["tokens"], axis=0), "rows"),
    "take with a fill": (
        lambda w, r, k: jnp.take(w["table"], r["tokens"], axis=0, mode="fill"),
        "rows",
    ),
    "a matrix product": (lambda w, r, k: jax.nn.gelu(r["x"] @ w["square"]) * w["scalar"], "rows"),
    "layer norm": (
        lambda w, r, k: jax.nn.standardize(r["x"]) * w["vector"] + w["vector"],
        "rows",
    ),
    "variance of a row": (lambda w, r, k: jnp.var(r["x"], axis=(1, 2)), "rows"),
    "attention": (attention, "rows"),
    "the library's attention": (
        lambda w, r, k: jax.nn.dot_product_attention(
            *[r["x"].reshape(-1, T, 2, 2)] * 3, is_causal=True
        ),
        "rows",
    ),
    "rotary positions": (
        lambda w, r, k: r["x"] * jnp.cos(jnp.arange(T)[:, None] * jnp.arange(D)),
        "rows",
    ),
    "positions of every row": (
        lambda w, r, k: r["x"] * jnp.broadcast_to(jnp.arange(1.0 * T)[:, None], r["x"].shape),
        "rows",
    ),
    "rows that are counted along": (
        lambda w, r, k: lax.broadcasted_iota(jnp.float32, r["x"].shape, 1) + r["x"],
        "rows",
    ),
    "a transposition": (lambda w, r, k: jnp.swapaxes(r["x"], 0, 2) * 2, "rows"),
    "merged tokens": (lambda w, r, k: r["x"].reshape(-1, D) @ w["square"], "rows"),
    "merged and cut tokens": (
        lambda w, r, k: (r["x"].reshape(-1, D) @ w["square"]).reshape(-1, T, D),
        "rows",
    ),
    "experts of every token": (soft_mixture, "rows"),
    "a dict of captured constants": (lambda w, r, k: r["x"] * CONSTANT + jnp.eye(D)[0], "rows"),
    "take along": (
        lambda w, r, k: jnp.take_along_axis(r["x"], r["tokens"][..., None] % D, -1),
        "rows",
    ),
    "take along the sequence": (
        lambda w, r, k: jnp.take_along_axis(r["x"], r["tokens"][..., None] % T, 1),
        "rows",
    ),
    "labels by counted rows": (lambda w, r, k: r["x"][jnp.arange(len(r["x"])), 0], "rows"),
    "classes by counted rows": (
        lambda w, r, k: jax.nn.log_softmax(r["x"][:, 0])[jnp.arange(len(r["x"])), r["label"]],
        "rows",
    ),
    "the first token": (lambda w, r, k: r["x"][:, 0] @ w["square"], "rows"),
    "shifted tokens": (lambda w, r, k: r["x"][:, 1:] - r["x"][:, :-1], "rows"),
    "every second token": (lambda w, r, k: r["x"][:, ::2], "rows"),
    "reversed tokens": (lambda w, r, k: r["x"][:, ::-1], "rows"),
    "rolled tokens": (lambda w, r, k: jnp.roll(r["x"], 1, axis=1), "rows"),
    "padded tokens": (lambda w, r, k: jnp.pad(r["x"], ((0, 0), (1, 0), (0, 0))), "rows"),
    "a concatenation": (lambda w, r, k: jnp.concatenate([r["x"], r["pos"]], -1), "rows"),
    "a concatenation with zeros": (
        lambda w, r, k: jnp.concatenate([r["x"], jnp.zeros_like(r["x"])], 1),
        "rows",
    ),
    "a class token": (
        lambda w, r, k: jnp.concatenate(
            [jnp.broadcast_to(w["vector"], (len(r["x"]), 1, D)), r["x"]], 1
        ),
        "rows",
    ),
    "a stack": (lambda w, r, k: jnp.stack([r["x"], r["pos"]]), "rows"),
    "a split": (lambda w, r, k: jnp.split(r["x"], 2, -1)[1], "rows"),
    "a sorted row": (lambda w, r, k: jnp.sort(r["x"], -1), "rows"),
    "the order of a row": (lambda w, r, k: jnp.argsort(r["x"], 1), "rows"),
    "top k": (lambda w, r, k: lax.top_k(r["x"], 2)[0], "rows"),
    "argmax": (lambda w, r, k: jax.nn.one_hot(jnp.argmax(r["x"], -1), D), "rows"),
    "cumsum": (lambda w, r, k: jnp.cumsum(r["x"], 1), "rows"),
    "an associative scan": (
        lambda w, r, k: lax.associative_scan(jnp.multiply, r["x"], axis=1),
        "rows",
    ),
    "a recurrence": (
        lambda w, r, k: jnp.swapaxes(
            lax.scan(
                lambda h, x: (jnp.tanh(h @ w["square"] + x), jnp.tanh(h @ w["square"] + x)),
                jnp.zeros((len(r["x"]), D)),
                jnp.swapaxes(r["x"], 0, 1),
            )[1],
            0,
            1,
        ),
        "rows",
    ),
    "a loop of five": (
        lambda w, r, k: lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ w["square"]), r["x"]),
        "rows",
    ),
    "a loop over rows": (per_row_loop, "rows"),
    "a map over rows": (
        lambda w, r, k: jax.vmap(lambda x, t: jnp.tanh(x @ w["square"])[t % T])(
            r["x"], r["tokens"][:, 0]
        ),
        "rows",
    ),
    "a branch": (
        lambda w, r, k: lax.cond(w["scalar"] > 0, jnp.sin, lambda x: x * 2, r["x"]),
        "rows",
    ),
    "a branch for each row": (
        lambda w, r, k: jax.vmap(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x))(r["x"]),
        "rows",
    ),
    "a checkpoint": (lambda w, r, k: jax.checkpoint(jnp.sin)(r["x"] @ w["square"]), "rows"),
    "relu": (lambda w, r, k: jax.nn.relu(r["x"] @ w["square"]), "rows"),
    "relu6 and a leak": (lambda w, r, k: jax.nn.relu6(r["x"]) + jax.nn.leaky_relu(r["x"]), "rows"),
    "a tangent of the result": (lambda w, r, k: exponential(r["x"]), "rows"),
    "a clipped cotangent": (lambda w, r, k: clips_by_row(r["x"]), "rows"),
    "logsumexp": (lambda w, r, k: jax.nn.logsumexp(r["x"], -1), "rows"),
    "a convolution": (
        lambda w, r, k: lax.conv_general_dilated(
            r["x"], w["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        "rows",
    ),
    "pooling": (
        lambda w, r, k: lax.reduce_window(r["x"], -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "VALID"),
        "rows",
    ),
    "a write": (lambda w, r, k: r["x"].at[:, 0].set(w["vector"]), "rows"),
    "an added write": (lambda w, r, k: r["x"].at[:, 1].add(r["pos"][:, 0]), "rows"),
    "a cache": (
        lambda w, r, k: lax.dynamic_update_slice_in_dim(
            jnp.zeros((len(r["x"]), 2 * T, D)), r["x"], 1, axis=1
        ),
        "rows",
    ),
    "the same noise for every row": (
        lambda w, r, k: r["x"] * jax.random.uniform(k, (T, D)),
        "rows",
    ),
    "an inverse": (
        lambda w, r, k: jnp.linalg.cholesky(r["x"] @ r["x"].swapaxes(1, 2) + 9 * jnp.eye(T)),
        "rows",
    ),
    "a mean over tokens": (lambda w, r, k: r["x"].mean((1, 2)), "rows"),
    "einsum": (lambda w, r, k: jnp.einsum("btd,de,bse->bts", r["x"], w["square"], r["x"]), "rows"),
    # Losses.
    "a mean": (lambda w, r, k: jnp.mean(r["x"] @ w["square"]), "mean"),
    "cross entropy": (lambda w, r, k: cross_entropy(w, r).mean(), "mean"),
    "a sum by a size": (lambda w, r, k: jnp.sum(cross_entropy(w, r)) / r["tokens"].size, "mean"),
    "a sum of shares": (lambda w, r, k: jnp.sum(cross_entropy(w, r) / len(r["x"])), "mean"),
    "a mean with weight decay": (
        lambda w, r, k: jnp.mean(r["x"] @ w["square"]) + jnp.sum(w["square"] ** 2),
        "mean",
    ),
    "a mean of means": (lambda w, r, k: jnp.mean(jnp.max(r["x"], (1, 2))) * w["scalar"], "mean"),
    "a mean in parts": (lambda w, r, k: sum([r["x"].mean(), r["pos"].mean()]), "mean"),
    "a mean of scanned rows": (mean_of_scanned_rows, "mean"),
    "a mean of a dot": (lambda w, r, k: jnp.vdot(r["x"], r["pos"]) / r["x"].size, "mean"),
    "a chunked loss": (chunked_loss, "mean"),
    "a mean of a mask": (lambda w, r, k: jnp.mean(r["mask"] > 0), "mean"),
    "a loss that reads no rows": (lambda w, r, k: jnp.sum(w["square"]), "free"),
    "a mean of one label": (
        lambda w, r, k: jax.nn.log_softmax(r["x"][:, 0])[
            jnp.arange(len(r["x"])), r["label"]
        ].mean(),
        "mean",
    ),
    "a sum": (lambda w, r, k: jnp.sum(cross_entropy(w, r) * r["mask"]), "sum"),
    "a weight": (lambda w, r, k: jnp.sum(r["mask"]), "sum"),
    "a count": (lambda w, r, k: jnp.sum(r["tokens"] > 1), "sum"),
    "counted tokens": (one_hot_count, "sum"),
    "a number of ones": (lambda w, r, k: jnp.ones_like(r["mask"]).sum(), "scaled"),
    "a mean by ones": (lambda w, r, k: r["mask"].sum() / jnp.ones_like(r["mask"]).sum(), "mean"),
    "a sum by the root of a size": (lambda w, r, k: r["x"].sum() / len(r["x"]) ** 0.5, "mixed"),
    # What mixes rows.
    "capacity": (mixture, "mixed"),
    "batch statistics": (lambda w, r, k: r["x"] - r["x"].mean(0), "mixed"),
    "the scale of a batch": (lambda w, r, k: r["x"] / jnp.linalg.norm(r["x"]), "mixed"),
    "a masked mean": (
        lambda w, r, k: jnp.sum(cross_entropy(w, r) * r["mask"]) / jnp.sum(r["mask"]),
        "mixed",
    ),
    "a mean with where": (lambda w, r, k: jnp.mean(r["x"], where=r["x"] > 0), "mixed"),
    "a contrastive loss": (
        lambda w, r, k: -jnp.mean(jnp.diag(jax.nn.log_softmax(r["x"][:, 0] @ r["pos"][:, 0].T))),
        "mixed",
    ),
    "positions of rows": (
        lambda w, r, k: r["x"] + jnp.arange(1.0 * len(r["x"]))[:, None, None],
        "mixed",
    ),
    "a table of rows": (
        lambda w, r, k: r["x"] + np.arange(len(r["x"]), dtype=np.float32)[:, None, None],
        "mixed",
    ),
    "dropout": (
        lambda w, r, k: jnp.where(jax.random.bernoulli(k, 0.5, r["x"].shape), r["x"], 0),
        "mixed",
    ),
    "noise by row": (
        lambda w, r, k: jax.vmap(lambda k: jax.random.normal(k, (T,)))(
            jax.random.split(k, len(r["x"]))
        ),
        "mixed",
    ),
    "root of a mean": (lambda w, r, k: jnp.sqrt(jnp.mean(r["x"] ** 2)), "mixed"),
    "largest of all": (lambda w, r, k: jnp.max(r["x"]), "mixed"),
    "a product of means": (lambda w, r, k: r["x"].mean() * r["pos"].mean(), "mixed"),
    "a standard deviation": (lambda w, r, k: jnp.std(r["x"]), "mixed"),
    "a mean and a sum": (lambda w, r, k: r["x"].mean() + r["pos"].sum(), "mixed"),
    "a mean and a constant of the size": (lambda w, r, k: r["x"].mean() + len(r["x"]), "mixed"),
    "rounded means": (lambda w, r, k: jnp.round(r["x"].mean() * 9), "mixed"),
    "an integer of a mean": (lambda w, r, k: (r["x"].mean() * 9).astype(jnp.int32), "mixed"),
    "scaled by rows": (lambda w, r, k: r["x"] / len(r["x"]), "rows"),  # with a scale
    "another program": (by_size, "mixed"),
    "rolled rows": (lambda w, r, k: jnp.roll(r["x"], 1, axis=0), "mixed"),
    "reversed rows": (lambda w, r, k: r["x"][::-1], "mixed"),
    "the first row": (lambda w, r, k: r["x"] - r["x"][0], "mixed"),
    "all but a row": (lambda w, r, k: r["x"][1:].sum(), "mixed"),
    "sorted rows": (lambda w, r, k: jnp.sort(r["x"], 0), "mixed"),
    "summed rows": (lambda w, r, k: jnp.cumsum(r["x"], 0), "mixed"),
    "ranked rows": (lambda w, r, k: jnp.argsort(jnp.argsort(r["label"])), "mixed"),
    "shuffled rows": (lambda w, r, k: jax.random.permutation(k, r["x"]), "mixed"),
    "rows as tokens": (
        lambda w, r, k: r["x"].swapaxes(0, 1).reshape(-1, D).reshape(-1, T, D),
        "mixed",
    ),
    "merged behind": (lambda w, r, k: r["x"].swapaxes(0, 1).reshape(-1, D), "mixed"),
    "attention over rows": (
        lambda w, r, k: jax.nn.softmax(r["x"][:, 0] @ r["x"][:, 0].T) @ r["x"][:, 0],
        "mixed",
    ),
    "loops until all rows are done": (until_all_rows_are_done, "mixed"),
    "carried over rows": (carried_over_rows, "mixed"),
    "a product in a carry": (squared_carry, "mixed"),
    "a condition on all rows": (
        lambda w, r, k: lax.cond(r["x"].sum() > 0, jnp.sin, jnp.cos, r["x"]),
        "mixed",
    ),
    "chosen by all rows": (lambda w, r, k: jnp.where(r["x"].sum() > 0, r["x"], 0), "mixed"),
    "a cotangent of the batch": (lambda w, r, k: clips_by_batch(r["x"]), "mixed"),
    "clipped weights": (lambda w, r, k: r["x"] @ clips_weights(w["square"]), "mixed"),
    "a tangent of the batch": (lambda w, r, k: tangent_of_batch(r["x"]), "mixed"),
    "zeros with a mixing gradient": (
        lambda w, r, k: r["x"] + zeros_with_mixing_gradient(r["x"]),
        "mixed",
    ),
    "a zero with a mixing gradient": (lambda w, r, k: r["x"] + zero_with_gradient(r["x"]), "mixed"),
    "zeros with a mixing tangent": (
        lambda w, r, k: r["x"] + zeros_with_mixing_tangent(r["x"]),
        "mixed",
    ),
    "a write to a row": (lambda w, r, k: r["x"].at[0].set(0.0), "mixed"),
    "gathered rows": (lambda w, r, k: r["x"][r["label"] % len(r["x"])], "mixed"),
    "a row for each token": (lambda w, r, k: r["x"][jnp.zeros_like(r["label"])], "mixed"),
    "counted tokens of merged rows": (
        lambda w, r, k: r["x"].reshape(-1, D)[jnp.arange(len(r["x"]))],
        "mixed",
    ),
    "zeros of a number of rows": (
        lambda w, r, k: jnp.concatenate(
            [jnp.zeros(len(r["x"])), w["vector"], jnp.zeros(B - len(r["x"]))]
        ),
        "mixed",
    ),
    "a padding of rows": (lambda w, r, k: jnp.pad(w["vector"], (len(r["x"]), 0)), "mixed"),
    "a quantile": (lambda w, r, k: jnp.median(r["x"]), "mixed"),
    "a callback": (
        lambda w, r, k: jax.pure_callback(
            lambda x: np.asarray(x), jax.ShapeDtypeStruct(r["x"].shape, jnp.float32), r["x"]
        ),
        "mixed",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_analysis_says_what_a_function_does_and_numbers_agree(name: str):
    function, wanted = CASES[name]
    for num_blocks in (2, 4, 8):
        found = relations(function, num_blocks)
        if num_blocks == 2:
            assert [kind_of(relation) for relation in found] == [wanted], found
        else:  # for other numbers of rows it may know less, never something else
            assert all(kind_of(r) in (wanted, "mixed") for r in found)
        whole = jax.tree.leaves(function(W, ROWS, KEY))
        parts = [jax.tree.leaves(function(W, r, KEY)) for r in blocks(ROWS, num_blocks)]
        for i, relation in enumerate(found):
            if not isinstance(relation, Mixed):
                text = f"{name}, {num_blocks} blocks, {relation}"
                judge(relation, whole[i], [part[i] for part in parts], num_blocks, text)
        if not any(isinstance(relation, Mixed) for relation in found) and "loop" not in name:
            judge_gradients(function, found, num_blocks, name)


Value = jax.Array
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "where": lambda a, b: jnp.where(a > 0, a, b),
    "tanh": lambda a, b: jnp.tanh(a),
    "div": lambda a, b: a / (1 + b * b),
    "merge": lambda a, b: a.reshape(-1, a.shape[-1]),
    "cut": lambda a, b: a.reshape(-1, 2, *a.shape[1:]) if len(a) % 2 == 0 else a,
    "flatten": lambda a, b: a.reshape(len(a), -1),
    "swap": lambda a, b: jnp.swapaxes(a, 0, -1),
    "swap the last": lambda a, b: jnp.swapaxes(a, -1, -2),
    "mean 0": lambda a, b: a.mean(0),
    "mean -1": lambda a, b: a.mean(-1, keepdims=True),
    "mean": lambda a, b: a.mean(),
    "sum": lambda a, b: a.sum(),
    "sum 1": lambda a, b: a.sum(1),
    "max 0": lambda a, b: a.max(0, keepdims=True),
    "max": lambda a, b: a.max(-1),
    "dot": lambda a, b: a @ b,
    "dot of both": lambda a, b: jnp.einsum("i...,i...->...", a, b),
    "outer": lambda a, b: jnp.einsum("i...,j...->ij", a, b),
    "cumsum 0": lambda a, b: jnp.cumsum(a, 0) / len(a),
    "cumsum -1": lambda a, b: jnp.cumsum(a, -1),
    "sort 0": lambda a, b: jnp.sort(a, 0),
    "sort -1": lambda a, b: jnp.sort(a, -1),
    "concatenate": lambda a, b: jnp.concatenate([a, b], -1),
    "concatenate 0": lambda a, b: jnp.concatenate([a, b], 0),
    "stack": lambda a, b: jnp.stack([a, b], 1),
    "first": lambda a, b: a[0],
    "second of each": lambda a, b: a[:, 1],
    "half": lambda a, b: a[: len(a) // 2],
    "flip": lambda a, b: a[::-1],
    "flip -1": lambda a, b: a[..., ::-1],
    "roll": lambda a, b: jnp.roll(a, 1, 0),
    "scale": lambda a, b: a / a.size,
    "by rows": lambda a, b: a / len(a),
    "root": lambda a, b: a / len(a) ** 0.5,
    "zeros": lambda a, b: jnp.zeros_like(a),
    "ones": lambda a, b: jnp.ones_like(a),
    "iota": lambda a, b: jnp.broadcast_to(jnp.arange(1.0 * a.shape[-1]), a.shape),
    "row ids": lambda a, b: a + jnp.arange(1.0 * a.shape[0]).reshape(-1, *[1] * (a.ndim - 1)),
    "tile": lambda a, b: jnp.tile(a, (2, *[1] * (a.ndim - 1))) / 2,
    "pad": lambda a, b: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(1, 0)]),
    "gather": lambda a, b: a[(jnp.abs(b.reshape(-1)) * 7).astype(jnp.int32) % len(a)],
    "own rows": lambda a, b: a[jnp.arange(len(a)), (jnp.abs(b[:, 0]) * 3).astype(jnp.int32) % 2],
    "loop": lambda a, b: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + a, a),
    "scan": lambda a, b: lax.scan(lambda c, x: (c + x.sum(), x * 2), jnp.float32(0), a)[1],
    "scanned sum": lambda a, b: lax.scan(lambda c, x: (c + x.sum(), None), jnp.float32(0), a)[0],
    "cond": lambda a, b: lax.cond(b.sum() > 0, jnp.sin, jnp.cos, a),
    "map": lambda a, b: lax.map(jnp.tanh, a),
    "vmap": lambda a, b: jax.vmap(lambda x: x * x.sum())(a),
    "softmax": lambda a, b: jax.nn.softmax(a),
    "softmax 0": lambda a, b: jax.nn.softmax(a, 0),
    "scatter": lambda a, b: jnp.zeros(4).at[(jnp.abs(a) * 9).astype(jnp.int32) % 4].add(b),
    "set": lambda a, b: a.at[:, 0].set(b[:, 0]),
    "set 0": lambda a, b: a.at[0].set(0.0),
}


def combined(steps: list[tuple[str, int, int]]) -> Function:
    """Returns a function that applies operations to the values so far; one that fails is left out,
    for all numbers of rows alike."""

    def function(w: Any, rows: Any, key: Any) -> Any:
        values = [rows["x"], rows["pos"], w["square"], w["positions"], rows["mask"], w["vector"]]
        for name, i, j in steps:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            try:
                values.append(OPERATIONS[name](a, b))
            except (TypeError, ValueError, IndexError, ZeroDivisionError):
                continue
        return values[6:]

    return function


STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.integers(0, 7)),
    min_size=1,
    max_size=6,
)


@given(STEPS, st.sampled_from([2, 4, 8]))
@settings(max_examples=120)
def test_what_it_says_of_random_programs_is_what_their_numbers_say(steps: Any, num_blocks: int):
    check_random(steps, num_blocks)


def check_random(steps: Any, num_blocks: int) -> int:
    """Judges one program; returns of how many results the analysis knows something."""
    function = combined(steps)
    found = relations(function, num_blocks)
    whole = function(W, ROWS, KEY)
    parts = [function(W, rows, KEY) for rows in blocks(ROWS, num_blocks)]
    known = [i for i, relation in enumerate(found) if not isinstance(relation, Mixed)]
    for i in known:
        judge(found[i], whole[i], [part[i] for part in parts], num_blocks, f"{steps}: {found[i]}")
    return len(known)
