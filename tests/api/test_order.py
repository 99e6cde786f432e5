"""Layers of several kinds in any order are those of the plain program, in every engine."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp

B, D, V = 16, 8, 12


def local(w: Any, x: Any, batch: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def wide(w: Any, x: Any, batch: Any) -> Any:
    """Other parameters than `local`, and an auxiliary loss."""
    hidden = jax.nn.gelu(x @ w["gate"]) * (x @ w["up"])
    return x + hidden @ w["down"], {"loss": 0.01 * jnp.mean(hidden**2), "width": jnp.mean(hidden)}


def turning(w: Any, x: Any, batch: Any) -> Any:
    """The parameters of `local`."""
    return x + jnp.sin(x @ w["up"]) @ w["down"]


KINDS = {"local": local, "wide": wide, "turning": turning}
SIZES = {"local": {"up": (D, 2 * D), "down": (2 * D, D)}}
SIZES |= {"turning": SIZES["local"], "wide": {"gate": (D, 3), "up": (D, 3), "down": (3, D)}}
LETTERS = {"L": "local", "W": "wide", "T": "turning"}


def model(pattern: str) -> tuple[Any, Any]:
    order = [LETTERS[letter] for letter in pattern]
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def layer(kind: str) -> Any:
        sizes = SIZES[kind].items()
        return {n: jax.random.normal(next(keys), s) / s[0] ** 0.5 / 2 for n, s in sizes}

    params = {
        "embed": jax.random.normal(next(keys), (V, D)),
        "layers": [layer(kind) for kind in order],
        "head": jax.random.normal(next(keys), (D, V)) / 2,
    }
    own = jp.Model(
        embed=lambda w, batch: w[batch["x"]],
        layer={kind: KINDS[kind] for kind in dict.fromkeys(order)},
        loss=lambda w, x, batch: optax.softmax_cross_entropy_with_integer_labels(
            x @ w, batch["y"]
        ).mean(),
        order=order,
    )
    return own, params


def plain(params: Any, batch: Any, pattern: str) -> Any:
    """The program without jaxpipe, as a user writes it."""
    x, aux = params["embed"][batch["x"]], 0.0
    for letter, w in zip(pattern, params["layers"], strict=True):
        returned = KINDS[LETTERS[letter]](w, x, batch)
        x, found = returned if isinstance(returned, tuple) else (returned, {"loss": 0.0})
        aux += found["loss"]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"])
    return losses.mean() + aux


def batch() -> Any:
    x, y = jax.random.randint(jax.random.key(1), (2, B), 0, V)
    return {"x": x, "y": y}


ROWS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "stages alike, circular": ("LLWLLW", {"stage": 2}, {"schedule": "circular"}),
    "stages alike, 1f1b": ("LWLW", {"stage": 2, "fsdp": 2}, {}),
    "in turn": ("LTLTLTLT", {"stage": 4}, {}),
    "others, circular": ("LLWLLWLL", {"stage": 4}, {"schedule": "circular"}),
    "others, 1f1b, fsdp": ("LLWLLWLL", {"stage": 2, "fsdp": 2}, {"gather": "layer"}),
    "others, zero bubble": ("WLLTLWLT", {"stage": 4}, {"schedule": "zero_bubble_h1"}),
    "others, interleaved": ("LWTLLWTL", {"stage": 2}, {"schedule": "interleaved_1f1b"}),
    "uneven": ("LTWLTWL", {"stage": 2}, {"layers_per_stage": (3, 4)}),
    "mpmd": ("LLWLLWLL", {"stage": 4}, {"engine": "mpmd"}),
    "mpmd, dualpipev": ("LWTLLWTL", {"stage": 2}, {"engine": "mpmd", "schedule": "dualpipev"}),
    "no pipeline": ("LWLT", {"stage": 1, "fsdp": 2}, {"schedule": None}),
}


SLOW = (
    "stages alike, circular",
    "others, circular",
    "others, zero bubble",
    "others, interleaved",
    "uneven",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ROWS]
)
def test_the_numbers_are_those_of_the_plain_program(name: str):
    pattern, sizes, options = ROWS[name]
    own, params = model(pattern)
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    pipe = jp.pipeline(own, mesh=mesh, **{"schedule": "1f1b", "microbatches": 8} | options)
    value, grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params), batch())
    wanted, plain_grads = jax.value_and_grad(plain)(params, batch(), pattern)
    np.testing.assert_allclose(value[0], wanted, rtol=1e-5)
    grads = pipe.unshard(grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        grads,
        plain_grads,
    )
    pipe.check(params, batch(), optimizer=optax.adamw(1e-3, eps=1e-4), steps=2)


@pytest.mark.parametrize("engine", ["circular", "mpmd"])
def test_a_kind_may_have_no_parameters(engine: str):
    def rolled(w: Any, x: Any, batch: Any) -> Any:
        return 1.1 * jnp.roll(x, 1, -1)

    own, params = model("LLLL")
    layers = {"local": local, "none": rolled}
    own = dataclasses.replace(own, layer=layers, order=["local", "none", "none", "local"])
    params["layers"] = [params["layers"][0], {}, {}, params["layers"][3]]
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    schedule = "circular" if engine == "circular" else "1f1b"
    pipe = jp.pipeline(own, schedule=schedule, engine=engine, mesh=mesh, microbatches=4)
    pipe.check(params, batch())
