"""MaxText's own config and decoder layers in a pipeline, beside its own pipeline and a plain loop.

They need MaxText 0.2.5, which needs Python 3.12 and jax 0.11.
"""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from harness import frontends
from jaxpipe import nnx as pipelines

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "run_name": "test",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "log_config": False,
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "enable_dropout": False,
    "per_device_batch_size": 1.0,
    "max_target_length": 8,
    "max_prefill_predict_length": 4,
    "vocab_size": 64,
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 32,
    "head_dim": 8,
    "base_num_decoder_layers": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "megablox": False,
    "sparse_matmul": True,
}
LATENT = {
    "shared_experts": 1,
    "first_num_dense_layers": 0,
    "routed_score_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "attention_type": "mla",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "yarn",
}
WINDOW = {"sliding_window_size": 4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama2": ("llama2.LlamaDecoderLayer", {}, {}),
    "mistral": ("mistral.MistralDecoderLayer", {}, {}),
    "gemma": ("gemma.GemmaDecoderLayer", {}, {}),
    "gemma2": ("gemma2.Gemma2DecoderLayer", WINDOW | {"attn_logits_soft_cap": 50.0}, {}),
    "gemma3": (
        "gemma3.Gemma3DecoderLayer",
        WINDOW | {"model_name": "gemma3-4b", "override_model_config": True},
        {},
    ),
    "gpt3": ("gpt3.Gpt3DecoderLayer", {"fused_qkv": True, "mlp_activations": ["gelu"]}, {}),
    "qwen2": ("qwen2.Qwen2DecoderLayer", {"attention_bias": True}, {"quant": None}),
    "qwen3": ("qwen3.Qwen3DecoderLayer", {"use_qk_norm": True}, {"quant": None}),
    "qwen3_moe": ("qwen3.Qwen3MoeDecoderLayer", EXPERTS | {"use_qk_norm": True}, {"quant": None}),
    "olmo3": ("olmo3.Olmo3DecoderLayer", WINDOW, {"attention_type": "LOCAL_SLIDING"}),
    "llama4": (
        "llama4.Llama4DecoderLayer",
        EXPERTS | {"num_experts_per_tok": 1, "shared_experts": 1, "chunk_attn_window_size": 4},
        {"is_moe_layer": True},
    ),
    "gpt_oss": (
        "gpt_oss.GptOssDecoderLayer",
        EXPERTS | WINDOW | {"attention_sink": True, "mlp_activations_limit": 7.0},
        {"attention_type": "LOCAL_SLIDING"},
    ),
    "mixtral": ("mixtral.MixtralDecoderLayer", EXPERTS, {}),
    "deepseek": ("deepseek.DeepSeekMoELayer", EXPERTS | LATENT, {}),
}
"""The class of the layer, fields of the config, and arguments of the class."""
PIPELINES = {
    "2 ranks": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 4},
    "4 ranks": {"ici_pipeline_parallelism": 4, "ici_fsdp_parallelism": 2},
    "per repeat": {
        "ici_pipeline_parallelism": 2,
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 2,
        "pipeline_fsdp_ag_per_repeat": True,
    },
    "explicit": {
        "ici_pipeline_parallelism": 2,
        "ici_fsdp_parallelism": 4,
        "shard_mode": "explicit",
    },
    "fp8": {
        "ici_pipeline_parallelism": 2,
        "ici_fsdp_parallelism": 4,
        "quantization": "fp8",
    },
}
FP8 = ("llama2", "mistral", "gemma", "gpt3", "qwen3")
CASES = [
    ("llama2", "2 ranks"),
    ("llama2", "per repeat"),
    ("llama2", "explicit"),
    ("mixtral", "2 ranks"),
    ("deepseek", "4 ranks"),
    ("deepseek", "explicit"),
    *((model, "fp8") for model in FP8),
    *((model, "4 ranks") for model in MODELS if model not in ("llama2", "mixtral", "deepseek")),
]
WITHOUT_THEIRS = {
    ("llama2", "explicit"),
    ("deepseek", "explicit"),
    ("mixtral", "2 ranks"),
    *((model, "fp8") for model in FP8),
}
"""Cases in which MaxText's own pipeline fails, called like this, with jax 0.11 and 0.12."""


def config_of(fields: dict[str, Any]) -> Any:
    maxtext = pytest.importorskip("maxtext", reason="MaxText is not installed")
    pyconfig = pytest.importorskip("maxtext.configs.pyconfig")
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    return pyconfig.initialize(["test", base], **(SIZES | fields))


def layer_class(model: str) -> Any:
    """The class of a family's layer, called with a config, a mesh and streams."""
    name, _, arguments = MODELS[model]
    module, _, kind = name.partition(".")
    types = pytest.importorskip("maxtext.common.common_types").AttentionType
    if "attention_type" in arguments:
        arguments = {"attention_type": types[arguments["attention_type"]]}
    layer = partial(getattr(pytest.importorskip(f"maxtext.models.{module}"), kind), **arguments)
    quantizations = pytest.importorskip("maxtext.layers.quantizations")

    def make(config: Any, **more: Any) -> Any:
        quant = quantizations.configure_quantization(config)
        return layer(config=config, **(more if quant is None else more | {"quant": quant}))

    return make


def fields_of(model: str) -> dict[str, Any]:
    return {"decoder_block": model} | MODELS[model][1]


def flat(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}


def replaced(state: Any, arrays: dict[str, Any]) -> Any:
    """`state` with other arrays, each in the shape that is there."""
    return nnx.from_flat_state(
        [
            (path, v.replace(jnp.reshape(arrays[".".join(map(str, path))], v.get_value().shape)))
            for path, v in nnx.to_flat_state(state)
        ]
    )


def batch_of(config: Any) -> tuple[Any, ...]:
    rows, length = config.micro_batch_size_to_train_on, config.max_target_length
    x = jax.random.normal(jax.random.key(1), (rows, length, config.emb_dim))
    segments = jnp.where(jnp.arange(length) < 3, 1, 2)
    batch_inputs = (jnp.broadcast_to(a, (rows, length)) for a in (segments, jnp.arange(length)))
    return (x, *batch_inputs)


def pipelined(pipeline: Any, config: Any, mesh: Any, weights: Any, *specs: bool) -> Any:
    """(outputs, (gradients by path, gradients of x)) of a pipeline, theirs or ours."""
    x, *batch_inputs = batch_of(config)
    graph, params, rest = nnx.split(pipeline, nnx.Param, ...)
    params = params if weights is None else replaced(params, weights)

    def loss(params, x):
        module = nnx.merge(graph, params, rest, copy=True)
        more = (module.get_weight_sharding(),) if specs else ()
        y = module(x, *batch_inputs, True, "train", *more)
        return frontends.scalar(y), y

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, y), (dw, dx) = jax.device_get(run(params, x))
    return y, (flat(dw), dx), jax.device_get(flat(params))


def plain(model: str, config: Any, weights: dict[str, Any]) -> Any:
    """The same of a loop over layers, on one device, a microbatch at a time."""
    x, *batch_inputs = batch_of(config)
    fields = {"per_device_batch_size": float(x.shape[0]), "quantization": config.quantization}
    one = config_of(fields_of(model) | fields)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(one.mesh_axes)), one.mesh_axes)
    count, dims = config.num_pipeline_microbatches, 1 + (config.num_pipeline_repeats > 1)
    with nn.logical_axis_rules(one.logical_axis_rules), jax.set_mesh(mesh):
        make = layer_class(model)
        layer = make(config=one, mesh=mesh, model_mode="train", rngs=nnx.Rngs(0))
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(weights, x):
            layers = {k.removeprefix("layers."): w for k, w in weights.items()}
            layers = {k: w.reshape(-1, *w.shape[dims:]) for k, w in layers.items()}

            def step(x, of_layer, sides):
                module = nnx.merge(graph, replaced(params, of_layer), rest, copy=True)
                return module(x, *sides, True, "train")[0], None

            outs = []
            for m in range(count):
                x_m, *sides = (a.reshape(count, -1, *a.shape[1:])[m] for a in (x, *batch_inputs))
                outs.append(jax.lax.scan(lambda x, w, s=sides: step(x, w, s), x_m, layers)[0])
            y = jnp.concatenate(outs)
            return frontends.scalar(y), y

        arrays = {k: jnp.asarray(w) for k, w in weights.items()}
        run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, y), grads = jax.device_get(run(arrays, jnp.asarray(x)))
        return y, grads


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[" ".join(case) for case in CASES])
def test_maxtexts_layers_have_the_gradients_of_a_plain_loop_and_of_its_own_pipeline(model, layout):
    with jax.numpy_dtype_promotion("standard"):  # MaxText's layers promote
        ranks = PIPELINES[layout]["ici_pipeline_parallelism"]
        config = config_of(
            fields_of(model) | PIPELINES[layout] | {"num_pipeline_microbatches": ranks}
        )
        mesh = pytest.importorskip("maxtext.utils.maxtext_utils").get_mesh_from_config(config)
        theirs = pytest.importorskip("maxtext.layers.pipeline")

        def factory(rngs: nnx.Rngs) -> Any:
            make = layer_class(model)
            return make(config=config, mesh=mesh, model_mode="train", rngs=rngs)

        with nn.logical_axis_rules(config.logical_axis_rules), jax.set_mesh(mesh):
            ours = pipelines.create_pipeline(config, factory, mesh, rngs=nnx.Rngs(0))
            value, grads, weights = pipelined(ours, config, mesh, None)
        true = plain(model, config, weights)
        frontends.assert_trees_close((value, grads), true)
        if (model, layout) in WITHOUT_THEIRS:
            return
        with nn.logical_axis_rules(config.logical_axis_rules), jax.set_mesh(mesh):
            pipeline = theirs.create_nnx_pipeline(config, factory, mesh, rngs=nnx.Rngs(0))
            value, (dw, dx), _ = pipelined(pipeline, config, mesh, weights, True)
        dw = {name: w.reshape(weights[name].shape) for name, w in dw.items()}
        frontends.assert_trees_close((value, (dw, dx)), true)
