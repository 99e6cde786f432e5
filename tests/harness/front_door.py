"""The contract of the front door: `jp.pipeline` computes what the user's own program computes.

The judge is a program that shares nothing with jaxpipe: a loop over layers on one device, on the
whole batch, or, for models that mix rows, on each microbatch, whose losses are averaged. A row says
which engine runs which model over which mesh. `check_row` compares loss, metrics, every gradient
leaf and three steps of an optimizer in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpipe as jp

TOLERANCE = 1e-5
V, D, H, T = 24, 16, 2, 6


@dataclass(frozen=True)
class Case:
    """A model as its user has it.

    Attributes:
        model: The functions.
        init: From the number of layers to parameters.
        mixes_rows: Whether its plain program is a mean over microbatches.
        specs: How parameters are sharded over other axes, by a part of their path.
    """

    model: jp.Model
    init: Callable[[int], Any]
    mixes_rows: bool = False
    specs: tuple[tuple[str, P], ...] = ()


@dataclass(frozen=True)
class Row:
    """One engine, schedule, model and mesh."""

    model: str
    schedule: str | None
    ranks: int
    axes: tuple[tuple[str, int], ...] = ()
    engine: str = "auto"
    chunks: int | None = None
    layers: tuple[int, ...] | int = 8
    microbatches: int = 4
    tx: str = "adamw"
    rows: int = 16
    # With 24 layers the plain program in float32 is itself 9e-6 from that in float64.
    float64: bool = False

    def __str__(self) -> str:
        axes = "x".join(f"{axis}{size}" for axis, size in self.axes) or "alone"
        layers = "uneven" if isinstance(self.layers, tuple) else f"L{self.layers}"
        engine = self.engine if self.engine != "auto" else "one_program"
        ids = engine, self.schedule, self.model, f"S{self.ranks}", axes, layers, self.tx
        return "-".join(map(str, ids))


def numbers(seed: int) -> Callable[..., jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 400))
    return lambda *shape: jax.random.normal(next(keys), shape) / shape[0] ** 0.5


def batch(rows: int, step: int) -> dict[str, jax.Array]:
    """Rows that differ, with unequal numbers of masked tokens."""
    tokens = jax.random.randint(jax.random.key(100 + step), (rows, T + 1), 0, V)
    mask = jax.random.bernoulli(jax.random.key(200 + step), 0.6, (rows, T)).at[:, 0].set(True)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": mask.astype(jnp.float32)}


def token_losses(logits: jax.Array, batch: Any) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], axis=-1)
    return -picked[..., 0]


def attention(w: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.reshape(x @ w[name], (*x.shape[:2], H, D // H)) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (D // H) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape) @ w["o"]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def gpt_layer(w: Any, x: Any, batch: Any) -> Any:
    x = x + attention(w, norm(x, w["scale"]))
    return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def gpt_init(num_layers: int) -> Any:
    normal = numbers(0)

    def layer() -> Any:
        w = {name: normal(D, D) for name in "qkvo"}
        dense = {"up": normal(D, 2 * D), "bias": normal(2 * D), "down": normal(2 * D, D)}
        return w | dense | {"scale": 1 + 0.1 * normal(D)}

    layers = [layer() for _ in range(num_layers)]
    return {"embed": {"table": normal(V, D)}, "layers": layers, "head": {"scale": jnp.ones(D)}}


def embed(w: Any, batch: Any) -> Any:
    return w["table"][batch["x"]]


def tied_loss(w: Any, x: Any, batch: Any) -> Any:
    losses = token_losses(norm(x, w["head"]["scale"]) @ w["embed"]["table"].T, batch)
    return jnp.mean(losses), {"largest": jnp.mean(jnp.max(losses, axis=-1))}


def weighted_loss(w: Any, x: Any, batch: Any) -> Any:
    losses = token_losses(norm(x, w["head"]["scale"]) @ w["embed"]["table"].T, batch)
    return jp.Weighted(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))


def expert_layer(w: Any, x: Any, batch: Any) -> Any:
    """Experts with a capacity, which rows of a microbatch share, and a loss that balances them."""
    tokens = x.reshape(-1, D)
    gates = jax.nn.softmax(tokens @ w["router"])
    choice = jax.nn.one_hot(jnp.argmax(gates, axis=-1), gates.shape[-1])
    place = (jnp.cumsum(choice, axis=0) - 1) * choice
    capacity = tokens.shape[0] // gates.shape[-1]
    kept = choice * (place < capacity)
    outputs = jnp.einsum("nd,edf->nef", tokens, w["up"])
    outputs = jnp.einsum("nef,efd->ned", jnp.tanh(outputs), w["down"])
    mixed = jnp.einsum("ned,ne->nd", outputs, kept * gates)
    balance = jnp.sum(jnp.mean(choice, axis=0) * jnp.mean(gates, axis=0)) * gates.shape[-1]
    return x + mixed.reshape(x.shape), {"loss": 0.01 * balance}


def expert_init(num_layers: int) -> Any:
    normal = numbers(1)

    def layer() -> Any:
        return {"router": normal(D, 4), "up": normal(4, D, D), "down": normal(4, D, D)}

    layers = [layer() for _ in range(num_layers)]
    return {"embed": {"table": normal(V, D)}, "layers": layers, "head": {"scale": jnp.ones(D)}}


def batch_norm_layer(w: Any, x: Any, batch: Any) -> Any:
    # Statistics of four rows of one position are too small to be exact in float32.
    centred = (x - jnp.mean(x, axis=(0, 1))) * jax.lax.rsqrt(jnp.var(x, axis=(0, 1)) + 0.1)
    return x + jnp.tanh(centred @ w["up"] + w["bias"]) @ w["down"]


def contrastive_loss(w: Any, x: Any, batch: Any) -> Any:
    summary = norm(jnp.mean(x, axis=1), w["head"]["scale"])
    words = norm(jnp.mean(w["embed"]["table"][batch["y"]], axis=1), jnp.ones(D))
    scores = jax.nn.log_softmax(summary @ words.T)
    return -jnp.mean(jnp.diagonal(scores))


EXPERTS = (("up", P("expert")), ("down", P("expert")))
CASES: dict[str, Case] = {
    "gpt": Case(jp.Model(embed, gpt_layer, tied_loss, tied=True), gpt_init),
    "weighted": Case(jp.Model(embed, gpt_layer, weighted_loss, tied=True), gpt_init),
    "experts": Case(
        jp.Model(embed, expert_layer, tied_loss, tied=True), expert_init, True, EXPERTS
    ),
    "batch_norm": Case(jp.Model(embed, batch_norm_layer, tied_loss, tied=True), gpt_init, True),
    "contrastive": Case(jp.Model(embed, gpt_layer, contrastive_loss, tied=True), gpt_init, True),
}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.chain(
        # With an eps of 1e-8 the plain program of 24 layers in float32 is 1.5e-4 off that in
        # float64: Adam divides gradients of the size of their rounding errors by themselves.
        optax.clip_by_global_norm(0.5),
        optax.adamw(1e-3, eps=1e-5, weight_decay=0.1, mask=matrices),
    ),
    "muon": lambda: optax.contrib.muon(1e-3, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=9),
    "lamb": lambda: optax.lamb(1e-3),
}


def plain(case: Case, params: Any, batch: Any) -> Any:
    """The user's program: (loss, metrics) of all the rows that it is given."""
    x, balance = embed(params["embed"], batch), 0.0
    layer, loss = PLAIN[id(case.model)]
    for w in params["layers"]:
        returned = layer(w, x, batch)
        x, aux = returned if isinstance(returned, tuple) else (returned, {})
        balance = balance + aux.get("loss", 0.0)
    found = loss({"embed": params["embed"], "head": params["head"]}, x, batch)
    value, metrics = found if isinstance(found, tuple) else (found, {})
    if isinstance(value, jp.Weighted):
        value = value.total / value.weight
    return value + balance, metrics


PLAIN = {
    id(CASES["gpt"].model): (gpt_layer, tied_loss),
    id(CASES["weighted"].model): (gpt_layer, weighted_loss),
    id(CASES["experts"].model): (expert_layer, tied_loss),
    id(CASES["batch_norm"].model): (batch_norm_layer, tied_loss),
    id(CASES["contrastive"].model): (gpt_layer, contrastive_loss),
}
"""The user's functions as they were written: those of a `Model` are wrapped."""


def plain_mean(case: Case, num_microbatches: int, params: Any, batch: Any) -> Any:
    """The user's program on the whole batch, or the mean of it over microbatches."""
    if not case.mixes_rows:
        return plain(case, params, batch)
    rows = len(batch["x"]) // num_microbatches
    pieces = [
        jax.tree.map(lambda x: x[i * rows : (i + 1) * rows], batch)  # noqa: B023
        for i in range(num_microbatches)
    ]
    found = [plain(case, params, piece) for piece in pieces]
    return jax.tree.map(lambda *x: sum(x) / num_microbatches, *found)


def check_close(what: str, got: Any, wanted: Any, tolerance: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted), what
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        error = np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)
        assert error <= tolerance, f"{what}{jax.tree_util.keystr(path)}: {error:.1e}"


def pipeline_of(row: Row, case: Case) -> Any:
    sizes = {"stage": row.ranks, **dict(row.axes)}
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    has_experts = dict(row.axes).get("expert", 1) > 1

    def specs(path: str, leaf: Any) -> P | None:
        return next((s for name, s in case.specs if name in path), None)

    return jp.pipeline(
        case.model,
        schedule=row.schedule,
        mesh=mesh,
        microbatches=row.microbatches,
        chunks=row.chunks,
        engine=row.engine,
        layers_per_stage=row.layers if isinstance(row.layers, tuple) else None,
        param_specs=specs if has_experts else None,
    )


def check_row(row: Row) -> None:
    """Compares loss, metrics, gradients and three steps with those of the plain program."""
    with jax.enable_x64(row.float64):
        _check_row(row, TOLERANCE**2 if row.float64 else TOLERANCE)


def _check_row(row: Row, tolerance: float) -> None:
    def widened(tree: Any) -> Any:
        wide = jnp.float64 if row.float64 else jnp.float32
        return jax.tree.map(lambda x: x.astype(wide) if x.dtype == jnp.float32 else x, tree)

    case = CASES[row.model]
    num_layers = sum(row.layers) if isinstance(row.layers, tuple) else row.layers
    params, tx = widened(case.init(num_layers)), OPTIMIZERS[row.tx]()

    @jax.jit
    def plain_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return plain_mean(case, row.microbatches, params, batch)

        value, grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    pipe = pipeline_of(row, case)
    stored_tx, stored = pipe.optimizer(tx), pipe.shard(params)
    stored_state = stored_tx.init(stored)

    @pipe.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = pipe.value_and_grad(params, batch)
        updates, state = stored_tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    with jax.numpy_dtype_promotion("standard"):  # optax wants it
        state = tx.init(params)
        for i in range(3):
            rows = widened(batch(row.rows, i))
            stored, stored_state, value, grads = step(stored, stored_state, rows)
            params, state, wanted, wanted_grads = plain_step(params, state, rows)
            if i == 0:
                check_close("loss and metrics", jax.tree.map(np.asarray, value), wanted, tolerance)
                check_close(
                    "gradients", jax.device_get(pipe.unshard(grads)), wanted_grads, tolerance
                )
    check_close("parameters", jax.device_get(pipe.unshard(stored)), params, tolerance)
