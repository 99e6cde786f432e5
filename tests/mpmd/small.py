"""Training steps in small, and that groups with their own programs compute what `jax.jit` does."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxpipe.mpmd import Add, MpmdMesh, mark_stage_end, mpmd_jit_with_loop, treduce
from jaxpipe.mpmd.ir import RunTask, Send
from jaxpipe.sharding import make_mesh

WIDTH = 8
BATCH = 2  # rows of a microbatch
TOLERANCE = 1e-5


def groups(ranks: int, **axes: int) -> MpmdMesh:
    """The first devices, as groups of as many as `axes` say."""
    devices = jax.devices()[: ranks * int(np.prod(list(axes.values()), dtype=int))]
    return MpmdMesh(make_mesh({"stage": ranks, **axes}, devices=devices), "stage")


def numbers(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def layers(count: int, width: int = WIDTH) -> list[dict[str, jax.Array]]:
    """Weights of `layer`."""
    inner = 2 * width
    return [
        {"in": numbers(2 * i, width, inner) / 4, "out": numbers(2 * i + 1, inner, width) / 4}
        for i in range(count)
    ]


def batch(num_microbatches: int, rows: int = BATCH, width: int = WIDTH) -> tuple[Any, Any]:
    """Inputs and targets of all microbatches."""
    shape = num_microbatches, rows, width
    return numbers(100, *shape), numbers(101, *shape)


def layer(w: dict[str, Any], x: Any) -> Any:
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


def squared_error(x: Any, y: Any) -> Any:
    return jnp.mean((x - y) ** 2)


def marked_loss(weights: Sequence[Any], x: Any, y: Any, *, stage: Callable = layer) -> Any:
    """A stage for each item of `weights`."""
    for w in weights:
        x = mark_stage_end(stage(w, x))
    return squared_error(x, y)


def gradients(schedule: Any, loss: Callable = marked_loss) -> Callable[..., Any]:
    """`(weights, inputs, targets) -> (loss, gradients)` of a batch."""

    def step(weights: PyTree, *data: Any) -> Any:
        grad = jax.value_and_grad(loss)
        return treduce(lambda of_m: grad(weights, *of_m), data, schedule=schedule, operation=Add)

    return step


def training(optimizer: Any, schedule: Any, loss: Callable = marked_loss) -> Callable[..., Any]:
    """`(state, inputs, targets) -> (state, loss)`, where a state is (weights, optimizer's)."""

    def step(state: Any, *data: Any) -> Any:
        weights, moments = state
        value, grads = gradients(schedule, loss)(weights, *data)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return step


def runs(program: Any) -> list[RunTask]:
    """Returns the instructions of a program that run tasks, in their order."""
    return [i for i in program.instructions if isinstance(i, RunTask)]


def sends(program: Any) -> list[Send]:
    """Returns the instructions of a program that send a value, in their order."""
    return [i for i in program.instructions if isinstance(i, Send)]


def on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def compare(f: Callable, mesh: MpmdMesh, *args: Any, **options: Any) -> Any:
    """Checks that groups return what `jax.jit` does, and returns that.

    Args:
        f: What to run.
        mesh: The groups.
        args: What `f` is called with.
        options: Of `mpmd_jit_with_loop`.
    """
    result = mpmd_jit_with_loop(f, mesh, **options)(*args)
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], "nothing")):
        true = jax.jit(f, static_argnums=options.get("static_argnums", ()))(*args)
    assert_close(result, true)
    return result


def assert_close(result: PyTree, true: PyTree) -> None:
    """The largest difference, relative to the largest true value of each leaf."""
    assert jax.tree.structure(result) == jax.tree.structure(true)
    leaves = jax.tree_util.tree_leaves_with_path(result)
    for (path, x), y in zip(leaves, jax.tree.leaves(true), strict=True):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(y).all(), f"{name}: the reference is not finite"
        error, scale = np.max(np.abs(x - y)), np.max(np.abs(y))
        assert error <= TOLERANCE * scale, f"{name}: {error:.2e} of {scale:.2e}"


def assert_equal(result: PyTree, true: PyTree) -> None:
    """Every bit."""
    assert jax.tree.structure(result) == jax.tree.structure(true)
    jax.tree.map(np.testing.assert_array_equal, on_host(result), on_host(true))
