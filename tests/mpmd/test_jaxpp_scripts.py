"""Programs as JaxPP's users write them, but for one line: `import jaxpipe.mpmd.jaxpp as jaxpp`.

They call what JaxPP's README, its tutorial and its examples call, in the same way.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe.mpmd.jaxpp as jaxpp
from mpmd.small import TOLERANCE, assert_close, on_host

WIDTH, LAYERS, MICROBATCHES, ROWS = 8, 4, 4, 2


class Layer(nn.Module):
    """Returns a tuple, as layers of Hugging Face's BERT do."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return (x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x))),)


class ManualStages(nn.Module):
    """Marks the end of every stage, the last one too."""

    num_stages: int | None

    def setup(self) -> None:
        self.layers = [Layer(name=f"layer_{i}") for i in range(LAYERS)]

    def __call__(self, hidden_states: Any) -> Any:
        for i, layer in enumerate(self.layers):
            outs = layer(hidden_states)
            hidden_states = outs[0]
            if self.num_stages and (i + 1) % (LAYERS // self.num_stages) == 0:
                hidden_states = jaxpp.pipeline_enter_stage(hidden_states)
        return hidden_states


def loss_of(model: ManualStages) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        res = model.apply(params, batch)
        return jnp.mean((res - batch) ** 2) / MICROBATCHES, (res, 4)

    return loss


def plain_step(optimizer: Any) -> Any:
    """Gradient accumulation by hand, in plain JAX on one device."""

    @jax.jit
    def step(opt_state: Any, params: Any, batch: Any) -> Any:
        grad_of = jax.value_and_grad(loss_of(ManualStages(None)), has_aux=True)
        losses, preds, total = [], [], None
        for microbatch in batch:
            (loss, (pred, _)), grads = grad_of(params, microbatch)
            losses.append(loss)
            preds.append(pred)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        updates, opt_state = optimizer.update(total, opt_state, params)
        params = optax.apply_updates(params, updates)
        return opt_state, params, jnp.array(losses), jnp.array(preds)

    return step


@pytest.fixture(autouse=True)
def jax_as_it_comes():
    """Scripts of users do not ask for strict promotion of dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("axes", [("mpmd", "data", "model"), ("stages",)], ids=len)
def test_the_train_step_of_the_readme_and_of_the_basic_example(axes: tuple[str, ...], capsys):
    """A decorator, losses and predictions by microbatch without an operation, and by keyword."""
    shape = (2, 1, 2) if len(axes) == 3 else (2,)
    jax_mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), axes)
    mpmd_mesh = jaxpp.MpmdMesh(jax_mesh, axes[0])
    print(mpmd_mesh.lowering_mesh().shape)
    assert capsys.readouterr().out == f"{jax_mesh.shape | {axes[0]: 1}}\n"

    model = ManualStages(num_stages=2)
    optimizer = optax.adam(learning_rate=0.005)
    batch = jax.random.uniform(jax.random.PRNGKey(0), (MICROBATCHES, ROWS, WIDTH))

    @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh)
    def pp_train_step(opt_state: Any, params: Any, batch: Any) -> Any:
        mubatch_grad = partial(jax.value_and_grad(loss_of(model), has_aux=True), params)
        (losses, (pred, _)), grad = jaxpp.treduce(
            mubatch_grad, batch, schedule=jaxpp.Std1F1B(mpmd_mesh.mpmd_dim)
        )
        (updates, opt_state) = optimizer.update(grad, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        return opt_state, new_params, jnp.asarray(jnp.array(losses)), jnp.array(pred)

    params = model.init(jax.random.PRNGKey(0), batch[0])
    opt_state = optimizer.init(params)
    state, true_state = (opt_state, params), (opt_state, params)
    plain = plain_step(optimizer)
    for _ in range(3):
        *state, losses, pred = pp_train_step(*state, batch=batch)
        *true_state, true_losses, true_pred = plain(*true_state, batch)
        assert losses.shape == (MICROBATCHES,) and pred.shape == batch.shape
        assert_close((losses, pred), (true_losses, true_pred))
    is_close = partial(np.allclose, rtol=1e-3, atol=TOLERANCE)
    close = jax.tree.map(
        lambda a, b: is_close(a, b.to_mpmd_local_array), tuple(true_state), tuple(state)
    )
    assert all(jax.tree.leaves(close))
    assert np.isclose(losses.to_mpmd_local_array.sum(), np.array(true_losses).sum())
    assert f"{float(jnp.sum(true_losses)):.3f}" == f"{losses.to_mpmd_local_array.sum():.3f}"


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_weights_that_are_made_on_all_devices_move_to_their_groups_and_gradients_back(
    axis_type: AxisType,
):
    """The reshard example: weights divided over the groups too, on a mesh of `jax.make_mesh`, whose
    axes are explicit by default."""
    spmd_mesh = jax.make_mesh((2, 2, 2), ("stage", "fsdp", "tensor"), (axis_type,) * 3)
    assert jax.make_mesh((8,), ("x",)).axis_types == (AxisType.Explicit,)
    mpmd_mesh = jaxpp.MpmdMesh(spmd_mesh, "stage")
    shardings = [
        NamedSharding(spmd_mesh, P(("stage", "fsdp"), "tensor")),
        NamedSharding(spmd_mesh, P("tensor", ("stage", "fsdp"))),
        NamedSharding(spmd_mesh, P("fsdp", None, None)),
    ]

    @partial(jax.jit, out_shardings=shardings)
    def init_fn(key: Any) -> Any:
        shapes = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (MICROBATCHES, ROWS, WIDTH)
        return [jax.random.normal(key, shape) for shape in shapes]

    weights_and_x = init_fn(jax.random.PRNGKey(0))
    true_weights_and_x = on_host(weights_and_x)
    W1, W2, x = weights_and_x

    @jax.grad
    def forward_fn(weights: Any, x: Any) -> Any:
        W1, W2 = weights
        h1 = jaxpp.pipeline_enter_stage(x @ W1)
        h2 = jaxpp.pipeline_enter_stage(h1 @ W2)
        return ((x - h2) ** 2).sum()

    @partial(
        jaxpp.mpmd_jit_with_loop,
        mpmd_mesh=mpmd_mesh,
        in_shardings=(*(s.spec for s in shardings), shardings[-1].spec),
        out_shardings=tuple(s.spec for s in shardings[:2]),
    )
    def accumulation_loop(W1: Any, W2: Any, x: Any, unused: Any) -> Any:
        return jaxpp.treduce(
            partial(forward_fn, (W1, W2)),
            x,
            schedule=jaxpp.Std1F1B(mpmd_mesh.mpmd_dim),
            operation=jaxpp.Add,
        )

    jitted = accumulation_loop.compile(W1, W2, x, x)
    args_mpmd_shardings, kwargs_mpmd_shardings = jitted.in_shardings
    assert not kwargs_mpmd_shardings
    assert [s.mesh_ids for s in args_mpmd_shardings] == [{0}, {1}, {0, 1}, set()]
    assert [s.spec for s in args_mpmd_shardings[:2]] == [P("fsdp", "tensor"), P("tensor", "fsdp")]

    _W1, _W2, _x, _unused = jaxpp.spmd_to_mpmd_reshard(
        mpmd_mesh, [W1, W2, x, x], list(args_mpmd_shardings)
    )
    assert W1.is_deleted() and W2.is_deleted() and x.is_deleted()
    assert _W1.is_partially_addressable and _W2.is_partially_addressable
    first = _W1.first_mpmd_replica
    assert first is not None and first.sharding.mesh == mpmd_mesh.unstack[0]
    gradients = jitted(_W1, _W2, _x, _unused)
    dW1, dW2 = jaxpp.mpmd_to_spmd_reshard(mpmd_mesh, list(gradients), shardings[:2])
    assert (dW1.sharding, dW2.sharding) == (shardings[0], shardings[1])
    true_W1, true_W2, true_x = true_weights_and_x
    true = jax.vmap(lambda x: forward_fn((true_W1, true_W2), x))(true_x)
    assert_close((dW1, dW2), jax.tree.map(lambda g: g.sum(0), true))


def test_a_state_without_a_final_mark_trains_and_prints():
    """Functional tests of JaxPP: TrainStates, inputs that are trees, a loss that is formatted."""
    mesh = jaxpp.MpmdMesh(
        Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("stage", "data", "model")), "stage"
    )
    from flax.training.train_state import TrainState

    model = ManualStages(num_stages=None)
    x = jax.random.uniform(jax.random.key(0), (1, ROWS, WIDTH))
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(1), x[0]), tx=optax.adam(1e-3)
    )

    def train_step(state: Any, inputs: Any, targets: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            (x, y), targets = batch
            return jnp.mean((state.apply_fn(params, x + y) - targets) ** 2)

        value, grads = jaxpp.treduce(
            partial(jax.value_and_grad(loss), state.params),
            (inputs, targets),
            schedule=jaxpp.Std1F1B(1),
            operation=jaxpp.Add,
        )
        return state.apply_gradients(grads=grads), value

    step, true = jaxpp.mpmd_jit_with_loop(train_step, mpmd_mesh=mesh), state
    for _ in range(2):
        state, loss = step(state, (x, x), x)
        true, true_loss = jax.jit(train_step)(true, (x, x), x)
        loss.to_mpmd_local_array.block_until_ready()
        assert f"{loss:.3f}" == f"{true_loss:.3f}"
    assert_close(state.params, true.params)
    assert int(state.step) == 2


def test_equations_of_a_compiled_step_can_be_walked():
    """`closed_jaxpr.eqns`: tasks, what groups exchange, and what is deleted, with parameters."""
    mesh = jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")

    def step(weights: Any, xs: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = jaxpp.mark_stage_end(jnp.tanh(x @ w), name="layer")
            return jnp.sum(x)

        return jaxpp.treduce(
            partial(jax.grad(loss), weights), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add
        )

    compiled = jaxpp.mpmd_jit_with_loop(step, mesh).compile([jnp.eye(4)] * 2, jnp.ones((2, 3, 4)))
    eqns = compiled.closed_jaxpr.eqns
    assert isinstance(eqns, list) and compiled.closed_jaxpr.jaxpr.eqns == eqns
    tasks = [e.params for e in eqns if e.primitive.name == "task"]
    names = [params["task_name"] for params in tasks if params["mpmd_idx"] == 0]
    assert [name for name in names if "__" in name] == [
        "fwd_0__0",
        "fwd_0__1",
        "bwd_0__0",
        "bwd_0__1",
    ]
    assert {e.primitive.name for e in eqns} == {"task", "send", "recv", "delete"}
    sent = [e.params for e in eqns if e.primitive.name == "send"]
    assert {(p["mpmd_idx"], p["tgt_mpmd_idx"]) for p in sent} == {(0, 1), (1, 0)}
    assert all(len(e.invars) + len(e.outvars) > 0 for e in eqns)
    assert str(compiled.closed_jaxpr).count("task_name=") == len(tasks)
