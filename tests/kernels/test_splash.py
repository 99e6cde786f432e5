"""Splash attention in Pallas's interpreter, against the attention of `jax.nn`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from harness.contract import assert_close
from jaxpipe.autodiff import StagedModel, unpipelined
from jaxpipe.kernels import dot_product_attention, splash_attention
from jaxpipe.models import initialize, initialize_layers, llama, llama_weights
from jaxpipe.sharding import DEFAULT_RULES, Constrain, make_mesh, override_rules
from jaxpipe.spmd import circular_engine
from small_models import small_llama, stack

LENGTH, ROWS = 256, 4


def heads(seed: int, count: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (ROWS, LENGTH, count, 64))


QKV = heads(0, 4), heads(1, 2), heads(2, 2)
# Two documents in a row, cut elsewhere in each, not at a block's edge.
SEGMENTS = jnp.where(
    jnp.arange(LENGTH) < jnp.array([[100], [200], [30], [129]], jnp.int32), 1, 2
).astype(jnp.int32)


def outputs_and_gradients(attention: Callable):
    def loss(q, k, v):
        out = attention(q, k, v, SEGMENTS)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*QKV)


def check(attention: Callable) -> None:
    (_, out), gradients = outputs_and_gradients(attention)
    (_, true_out), true_gradients = outputs_and_gradients(dot_product_attention)
    assert_close(out, true_out, "output")
    for name, gradient, true in zip("qkv", gradients, true_gradients, strict=True):
        assert_close(gradient, true, f"gradient of {name}")


def test_splash_is_dot_product_attention_on_one_device():
    check(splash_attention(DEFAULT_RULES, interpret=True))


def test_splash_is_dot_product_attention_on_a_mesh():
    with jax.set_mesh(make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4])):
        check(splash_attention(DEFAULT_RULES, interpret=True))


def test_splash_is_dot_product_attention_where_rules_leave_devices_with_copies():
    rules = override_rules((("activation_batch", ()),))
    with jax.set_mesh(make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4])):
        check(splash_attention(rules, interpret=True))


def in_a_pipeline(attention: Callable) -> Callable:
    """Half of the rows on each rank, then scaled by a weight that the ranks share."""

    def rank(q, k, v, segments):
        out = attention(q, k, v, segments)
        assert jax.typeof(out) == jax.typeof(q), "it must vary over the ranks as q does"
        return out

    spec = P("stage")
    return jax.shard_map(rank, axis_names={"stage"}, in_specs=(spec,) * 4, out_specs=spec)


@pytest.mark.parametrize("axes", [{"stage": 2}, {"stage": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_splash_is_dot_product_attention_inside_a_pipeline(axes: dict[str, int]):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    with jax.set_mesh(make_mesh(axes, devices=devices)):
        check(in_a_pipeline(splash_attention(DEFAULT_RULES, interpret=True)))


def test_a_sequence_that_is_no_multiple_of_128_is_refused():
    x, segments = jnp.ones((1, 200, 2, 64)), jnp.ones((1, 200), jnp.int32)
    message = r"has 200 tokens of a sequence in a row\. .* blocks of 128 tokens: give a multiple of"
    with pytest.raises(ValueError, match=message):
        splash_attention(DEFAULT_RULES, interpret=True)(x, x, x, segments)


def test_a_sequence_that_two_axes_split_is_refused():
    rules = override_rules((("activation_length", ("context", "expert")),))
    message = r"rule of 'activation_length' splits them over \['context', 'expert'\]"
    mesh = make_mesh({"context": 2, "expert": 4})
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        splash_attention(rules, interpret=True)(*QKV, SEGMENTS)


def test_query_heads_split_without_their_key_heads_are_refused():
    rules = override_rules((("activation_kv_heads", ()),))
    message = (
        r"'activation_heads' splits over \['tensor'\] and that of 'activation_kv_heads' .*\[\]"
    )
    with jax.set_mesh(make_mesh({"tensor": 8})), pytest.raises(ValueError, match=message):
        splash_attention(rules, interpret=True)(*QKV, SEGMENTS)


def test_a_llama_with_splash_in_the_circular_pipeline_is_the_unpipelined_llama():
    config = small_llama(base_num_decoder_layers=4, base_num_query_heads=2, head_dim=64)
    tree, key, dims = llama_weights(config), jax.random.key(0), (2, 2, 1)
    weights = initialize({name: tree[name] for name in ("embed", "head")}, key)
    flat = weights | {"stages": initialize_layers(tree["layer"], key, (4, 1))}
    staged = weights | {"stages": initialize_layers(tree["layer"], key, dims)}
    shape = (2, 2, 128)
    tokens = jax.random.randint(key, shape, 0, 32)
    batch_inputs = dict.fromkeys(("tokens", "targets"), tokens) | {
        "positions": jnp.broadcast_to(jnp.arange(128), shape),
        "segment_ids": jnp.broadcast_to(jnp.arange(128) // 50, shape),
        "target_weights": jnp.full(shape, 1 / (2 * 2 * 128)),
    }

    def model(attention: Callable) -> StagedModel:
        embed, layer, loss = llama(config, attention=attention, constrain=Constrain())
        return StagedModel(embed, stack(layer), loss)

    mesh = make_mesh({"stage": 2, "fsdp": 2}, devices=jax.devices()[:4])
    pipelined = model(splash_attention(DEFAULT_RULES, interpret=True))
    with jax.set_mesh(mesh):
        (loss, _), gradients = jax.jit(
            lambda w: circular_engine.circular_value_and_grad(pipelined, w, batch_inputs, mesh=mesh)
        )(staged)
    plain = model(dot_product_attention)
    (true_loss, _), true = jax.jit(lambda w: unpipelined.value_and_grad(plain, w, batch_inputs))(
        flat
    )
    assert_close(loss, true_loss, "loss")
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(true), strict=True
    ):
        assert_close(jnp.reshape(x, y.shape), y, jax.tree_util.keystr(path))
