"""What every rematerialisation policy keeps of a stage, and what it cannot be asked for."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe import models, sharding
from jaxpipe.autodiff import POLICIES, remat_by_name
from jaxpipe.autodiff.backward import OFFLOADED, TENSORS, check_offload, pullback
from jaxpipe.kernels import dot_product_attention
from jaxpipe.models.layers import routed_experts
from jaxpipe.models.weights import stack_weights, weight_shapes
from small_models import small_deepseek, small_llama, stack

L, b, T, D, H, K, C, F = 3, 2, 5, 16, 4, 2, 8, 32  # no tensor's shape is that of a weight
TINY = small_llama(
    base_emb_dim=D,
    base_num_decoder_layers=L,
    base_num_query_heads=H,
    base_num_kv_heads=K,
    base_mlp_dim=F,
    head_dim=C,
)
SHAPES = {
    "x": (b, T, D),
    "decoder_layer_input": (L, b, T, D),
    "query_proj": (L, b, T, H, C),
    "key_proj": (L, b, T, K, C),
    "value_proj": (L, b, T, K, C),
    "context": (L, b, T, H, C),
    "out_proj": (L, b, T, D),
    "mlpwi_0": (L, b, T, F),
    "mlpwi_1": (L, b, T, F),
    "mlpwo": (L, b, T, D),
}
KEPT = {
    "full": "x",
    "save_out_proj": "x out_proj",
    "save_qkv_proj": "x query_proj key_proj value_proj",
    "save_dot_except_mlp": "x query_proj key_proj value_proj out_proj",
    "save_dot_except_mlpwi": "x query_proj key_proj value_proj out_proj mlpwo",
    "save_dot_with_context_except_mlp": "x query_proj key_proj value_proj context out_proj",
    "minimal": "x query_proj key_proj value_proj out_proj mlpwi_0 mlpwi_1 mlpwo",
    "minimal_with_context": (
        "x query_proj key_proj value_proj context out_proj mlpwi_0 mlpwi_1 mlpwo"
    ),
    "qkv_proj_offloaded": "x query_proj* key_proj* value_proj*",
    "minimal_offloaded": ("x query_proj* key_proj* value_proj* out_proj* mlpwi_0* mlpwi_1* mlpwo*"),
    # The first layer's input is x, so that x itself is not needed.
    "custom": "decoder_layer_input context* mlpwi_0",
}
"""Tensors that stay for the backward of a llama stage; those with a star in the host's memory."""
PLACES = {"decoder_layer_input": "device", "context": "offload", "mlpwi_0": "device"}


def residuals(wrap: Any, layer_remat: Any = lambda f: f) -> list[tuple[tuple[int, ...], bool]]:
    """The shape of each residual of a tick, and whether it is offloaded."""
    _, layer, _ = models.llama(
        TINY,
        attention=dot_product_attention,
        constrain=sharding.no_constraint,
    )
    stage = stack(layer_remat(layer))
    layers = stack_weights(models.llama_weights(TINY)["layer"], (L,), ("layers",))
    ids = jax.ShapeDtypeStruct((b, T), jnp.int32)
    batch_inputs = {"positions": ids, "segment_ids": ids}
    visit = weight_shapes(layers), jax.ShapeDtypeStruct((b, T, D), jnp.float32), batch_inputs, ()
    forward = pullback(wrap(stage), *visit).forward
    avals = jax.make_jaxpr(lambda *args: forward(*args)[1])(*visit).out_avals
    host = jax.memory.Space.Host
    return sorted((x.shape, x.memory_space == host) for x in avals)  # pyright: ignore


def expected(kept: str) -> list[tuple[tuple[int, ...], bool]]:
    mean_squares = (L, b, T), False  # of the inputs of layers, which every policy keeps
    named = [(SHAPES[name.strip("*")], name.endswith("*")) for name in kept.split()]
    return sorted([mean_squares, *named])


@pytest.mark.parametrize("policy", KEPT)
def test_a_policy_keeps_exactly_the_tensors_that_it_names(policy: str):
    assert residuals(remat_by_name(policy, PLACES)) == expected(KEPT[policy])


def test_the_table_has_every_policy_that_leaves_something_out():
    assert {*KEPT, "none"} == {*POLICIES}


def test_without_rematerialisation_weights_are_not_kept_either():
    layer = weight_shapes(models.llama_weights(TINY)["layer"])
    weights = {(L, *leaf.shape) for leaf in jax.tree.leaves(layer)}
    kept = {shape for shape, _ in residuals(remat_by_name("none"))}
    assert not weights & kept


def test_a_policy_on_layers_keeps_the_input_of_each():
    wrap = remat_by_name("save_qkv_proj")
    kept = residuals(lambda stage: stage, layer_remat=wrap)
    wanted = expected("decoder_layer_input query_proj key_proj value_proj")
    assert [shape for shape in kept if shape[0][0] == L] == wanted


def test_a_policy_on_ticks_decides_what_is_kept_of_layers_that_have_one_too():
    wrap = remat_by_name("save_qkv_proj")
    assert residuals(remat_by_name("full"), layer_remat=wrap) == expected("x")


def test_models_name_every_tensor_that_a_policy_can_keep():
    config = small_deepseek()
    _, layer, _ = models.deepseek(
        config,
        attention=dot_product_attention,
        experts=routed_experts(sharding.DEFAULT_RULES),
        constrain=sharding.no_constraint,
    )
    layers = stack_weights(models.deepseek_weights(config)["layer"], (L,), ("layers",))
    ids, shares = (jax.ShapeDtypeStruct((b, T), dtype) for dtype in (jnp.int32, jnp.float32))
    batch_inputs = {"positions": ids, "segment_ids": ids, "target_weights": shares}
    x = jax.ShapeDtypeStruct((b, T, D), jnp.float32)
    program = str(jax.make_jaxpr(stack(layer))(weight_shapes(layers), x, batch_inputs, ()))
    assert {name for name in TENSORS if f"name={name}]" in program} == {*TENSORS}


def test_names_that_do_not_exist_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"`remat_policy` is 'ful'\. Give one of full, none, min"):
        remat_by_name("ful")
    with pytest.raises(
        ValueError, match=r"No tensor is called 'query'\. Give locations for decoder_"
    ):
        remat_by_name("custom", {"query": "device"})
    with pytest.raises(ValueError, match=r"`context` is 'host'\. Give 'remat', 'device' or 'offl"):
        remat_by_name("custom", {"context": "host"})


@pytest.mark.parametrize("policy", OFFLOADED)
def test_offload_is_refused_without_pinned_memory(policy: str):
    memories = [SimpleNamespace(kind="device"), SimpleNamespace(kind="unpinned_host")]
    device = SimpleNamespace(platform="odd", addressable_memories=lambda: memories)
    with pytest.raises(ValueError, match="odd devices have the memories device, unpinned_host al"):
        check_offload(policy, None, [device])
    check_offload("minimal", None, [device])
    check_offload(policy, None, jax.devices())
