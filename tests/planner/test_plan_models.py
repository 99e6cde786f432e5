"""What the planner knows of a preset is what its functions have: weights, products and tensors.

The planner describes a layer a second time, by arithmetic. Here every number of that description is
compared with the model itself, or with what its authors published.
"""

import functools
import math
import operator
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from jaxpipe import sharding
from jaxpipe.autodiff.backward import SUM_OVER_CHANNELS, SUM_OVER_DEVICES, TENSORS
from jaxpipe.cost.work import flops_per_token
from jaxpipe.kernels import sliced_dot_product_attention
from jaxpipe.models import MODEL_FAMILIES, PRESETS, matmul_flops_per_token, num_parameters
from jaxpipe.models.layers import routed_experts
from jaxpipe.models.weights import is_weight, weight_shapes
from jaxpipe.planner import Request, parse_devices
from jaxpipe.train.planning import make_request

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # By hand, as it is published with its vision tower alone.
    "llama4-maverick": (
        2 * 202_048 * 5120
        + 5120
        + 48 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 2 * 5120)
        + 24 * (3 * 5120 * 16_384 + 5120 * 128 + 129 * 3 * 5120 * 8192)
    ),
    "deepseek2-16b": 15_706_484_224,
    "deepseek3-671b": 671_026_419_200,
}
ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "llama4-maverick": 17.2e9,
    # They are published without the embedding.
    "gpt-oss-20b": 3.61e9 + 201_088 * 2880,
    "gpt-oss-120b": 5.13e9 + 201_088 * 2880,
}
"""Parameters that a token passes, as they are published."""


@functools.cache
def request_of(name: str) -> Request:
    return make_request({"model_name": name}, parse_devices("v5p-8"))


def sizes_and_weights(name: str) -> tuple[Any, dict[str, Any]]:
    sizes = dict(PRESETS[name])
    family = MODEL_FAMILIES[sizes.pop("decoder_block", "llama")]
    return family.sizes(**sizes), family.weights(family.sizes(**sizes))


def matrix_parameters(tree: Any, num_stacked: int = 0) -> int:
    leaves = jax.tree.leaves(tree, is_leaf=is_weight)
    return sum(
        math.prod(w.shape) for w in leaves if len(w.shape) > 1 + num_stacked and not w.is_bias
    )


def test_every_preset_that_is_a_published_model_is_here():
    assert {*PUBLISHED} == {name for name in PRESETS if not name.endswith("-tiny")}


@pytest.mark.parametrize("name", PRESETS)
def test_the_planner_counts_the_parameters_of_a_model(name: str):
    sizes, weights = sizes_and_weights(name)
    outside = num_parameters((weights["embed"], weights["head"]))
    num_layers = sizes.base_num_decoder_layers - getattr(sizes, "first_num_dense_layers", 0)
    count = outside + num_layers // sizes.layers_per_block * num_parameters(weights["layer"])
    assert request_of(name).work.parameters == count == PUBLISHED.get(name, count)


@pytest.mark.parametrize("name", PRESETS)
def test_the_planner_multiplies_by_every_matrix(name: str):
    weights = sizes_and_weights(name)[1]
    *before, last = request_of(name).work.layers
    products = [
        sum(p.k * p.n * (la.num_experts if p.split == "expert" else 1) for p in la.products)
        for la in (*before, last)
    ]
    dense = weights["embed"].get("layers", {})  # stacked: [layers, ...]
    first = [matrix_parameters(dense, 1) // la.count for la in before]
    assert products == [*first, matrix_parameters(weights["layer"])]


@pytest.mark.parametrize("name", PRESETS)
def test_the_planner_counts_the_operations_that_a_run_reports(name: str):
    work = request_of(name).work
    assert flops_per_token(work, 512) == matmul_flops_per_token(*sizes_and_weights(name), 512)


def test_layers_that_the_planner_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch):
    llama = MODEL_FAMILIES["llama"]

    def without_gate(*arguments: Any, **options: Any) -> dict[str, Any]:
        weights = llama.weights(*arguments, **options)
        del weights["layer"]["mlp"]["gate"]
        return weights

    monkeypatch.setitem(MODEL_FAMILIES, "llama", replace(llama, weights=without_gate))
    with pytest.raises(ValueError, match="does not know the layers of this `decoder_block`"):
        make_request({"model_name": "llama-tiny"}, parse_devices("v5p-8"))


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_passes_the_published_number_of_parameters(name: str):
    sizes = sizes_and_weights(name)[0]
    embedding = sizes.vocab_size * sizes.base_emb_dim
    active = matmul_flops_per_token(*sizes_and_weights(name), 0) / 6 + embedding
    assert active == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
def test_the_planner_knows_the_size_of_every_tensor_that_a_policy_may_keep(name: str):
    length, (sizes, weights) = 8, sizes_and_weights(name)
    family = MODEL_FAMILIES[PRESETS[name].get("decoder_block", "llama")]
    attentions = tuple(
        sliced_dot_product_attention(sharding.DEFAULT_RULES, scores)
        for scores in sizes.attention_scores
    )
    _, layer, _ = family.model(
        sizes,
        attention=attentions if sizes.layer_kinds else attentions[0],
        experts=routed_experts(sharding.DEFAULT_RULES),
        constrain=sharding.no_constraint,
    )
    batch = {key: jnp.zeros((1, length), jnp.int32) for key in ("positions", "segment_ids")}
    batch["target_weights"] = jnp.zeros((1, length))
    x = jnp.zeros((1, length, sizes.base_emb_dim))
    key = ((), jnp.int32(0)) if sizes.layer_kinds else ()
    traced = jax.make_jaxpr(lambda w: layer(w, x, batch, key))(weight_shapes(weights["layer"]))
    named = named_sizes(traced.jaxpr)
    # A number for each expert and two more, whatever the length.
    num_experts = getattr(sizes, "num_experts", 0)
    assert named.pop(SUM_OVER_DEVICES, 0) == (num_experts + 2 if num_experts else 0)
    found = {name: size / length for name, size in named.items()}
    assert found.pop(SUM_OVER_CHANNELS) == getattr(sizes, "layers_per_block", 1)
    assert found.pop("decoder_layer_input") == sizes.base_emb_dim
    planned = make_request({"model_name": name}, parse_devices("h100:8")).model.tensors
    assert found == {name: tensor.channels for name, tensor in planned if tensor.channels}
    # Keys of tensors that a layer does not make are refused.
    of_some = {key for other in MODEL_FAMILIES.values() for key in other.keys} & TENSORS.keys()
    read = {name for name in TENSORS if name in family.keys or name not in of_some}
    assert {*found} == read - {"decoder_layer_input"}


def named_sizes(jaxpr: Any) -> Counter[str]:
    """The sizes of the tensors of a program that have names, of one branch where it branches."""
    sizes: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            sizes[eqn.params["name"]] += eqn.outvars[0].aval.size
        inner = [named_sizes(each) for each in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "cond":
            inner = [functools.reduce(operator.or_, inner)]
        for each in inner:
            sizes += each
    return sizes
