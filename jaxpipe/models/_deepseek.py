"""DeepSeek-V2 and V3: latent attention, a few dense layers, then mixtures of experts.

The dense layers run before the pipeline, in `embed`. Layers with experts run in the pipeline, but
the last ones may run after it, in `loss`. V3's multi-token prediction is not implemented.

b sequences, T tokens, D embed.
DeepSeek-AI, 2024, arXiv 2405.04434 and 2412.19437.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ..autodiff.staged_model import run_layers
from ..sharding import Constrain
from ._boundary import boundary_weights, embed_tokens, next_token_loss
from ._deepseek_config import DeepseekConfig
from .layers._attention import Attention
from .layers._common import ACTIVATION, Rope, dropout, rms_norm, rope, swiglu, swiglu_weights
from .layers._latent_attention import (
    LatentAttentionSettings,
    latent_attention,
    latent_attention_weights,
)
from .layers._moe import moe, moe_weights
from .layers._projection import Projection, projection
from .layers._routed_experts import Experts
from .weights._abstract import scale, stack_weights

Remat = Callable[[Callable], Callable]


def deepseek_weights(
    config: DeepseekConfig, dtype: Any = jnp.float32, *, layers_after: int = 0
) -> dict[str, Any]:
    """Returns the abstract weights of a DeepSeek model.

    The pipeline has `base_num_decoder_layers - first_num_dense_layers - layers_after` layers.

    Args:
        config: The sizes of the model.
        dtype: The dtype in which weights are stored.
        layers_after: The number of last layers that run after the pipeline, with the loss. Their
            weights are `["head"]["layers"]`, stacked. (MaxText runs the first layers before its
            pipeline instead; the model is the same.)

    Returns:
        `{"embed", "layer", "head"}`: trees of `Weight`. "layer" is one layer with experts,
        unstacked.
    """
    D, dense_layers = config.base_emb_dim, config.first_num_dense_layers
    branches = 2 * config.base_num_decoder_layers
    boundary = boundary_weights(D, config.vocab_size, tied=False, dtype=dtype)
    layer = _half_weights(D, config.attention, branches, dtype)
    if dense_layers:
        mlp = swiglu_weights(D, config.base_mlp_dim, branches=branches, dtype=dtype)
        boundary["embed"]["layers"] = stack_weights(
            layer | {"mlp": mlp}, (dense_layers,), ("layers",)
        )
    layer["moe"] = moe_weights(config.moe, branches=branches, dtype=dtype)
    if layers_after:
        boundary["head"]["layers"] = stack_weights(layer, (layers_after,), ("layers",))
    return boundary | {"layer": layer}


def _half_weights(
    D: int, attention: LatentAttentionSettings, branches: int, dtype: Any
) -> dict[str, Any]:
    """Returns the weights that dense layers and layers with experts have in common."""
    return {
        "attention_norm": scale(D, dtype),
        "attention": latent_attention_weights(attention, branches=branches, dtype=dtype),
        "mlp_norm": scale(D, dtype),
    }


def deepseek(
    config: DeepseekConfig,
    *,
    attention: Attention,
    experts: Experts,
    constrain: Constrain,
    dtype: Any = jnp.float32,
    dropout_rate: float = 0.0,
    num_vocab_tiling: int = 1,
    outside_remat: Remat = lambda f: f,
    project: Projection = projection,
    rotate: Rope = rope,
    z_loss_multiplier: float = 0.0,
) -> tuple[Callable, Callable, Callable]:
    """Returns `(embed, layer, loss)` of a DeepSeek model, pure functions of one microbatch.

    `batch_inputs` has what that of `llama` has. `layer` returns load-balance losses, which engines
    add to the loss; `loss` adds those of layers after the pipeline.

    Args:
        config: The sizes of the model.
        attention: `(q, k, v, segment_ids) -> out`.
        experts: `(weights, x, chosen, shares) -> y`, as `routed_experts` returns it.
        constrain: Shards an activation by its logical axes.
        dtype: The dtype in which layers compute. Norms, angles, routers and the loss use float32.
        dropout_rate: Dropped fraction of each residual branch in a layer that gets a key, else 0.
        num_vocab_tiling: The number of chunks of tokens in which the logits are computed.
        outside_remat: Wraps one layer before or after the pipeline; engines remat stages alone.
        project: The products of attention and of dense and shared MLPs, as `projection`.
        rotate: Rotary positions: `rope`, or `rope_by_product` for TPUs.
        z_loss_multiplier: The factor of the z-loss, see `next_token_loss`. 0 omits it.

    Returns:
        `(embed, layer, loss)` as `llama` returns them.
    """
    epsilon, sizes = config.normalization_layer_epsilon, config.attention
    how = {"constrain": constrain, "project": project}
    attend = latent_attention(sizes, attention=attention, rotate=rotate, **how)
    mix = moe(config.moe, experts=experts, **how)

    def add(x, branch, key):
        return constrain(x + dropout(branch, dropout_rate, key), ACTIVATION)

    def dense_layer(w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, _):
        x = checkpoint_name(x, "decoder_layer_input")
        h = rms_norm(x, w["attention_norm"], epsilon)
        x = add(x, attend(w["attention"], h, batch_inputs), ())
        y = swiglu(w["mlp"], rms_norm(x, w["mlp_norm"], epsilon), constrain, project)
        return add(x, y, ()), {}

    def layer(w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree, key):
        first, second = (key, key) if isinstance(key, tuple) else jax.random.split(key)
        x = checkpoint_name(x, "decoder_layer_input")
        h = rms_norm(x, w["attention_norm"], epsilon)
        x = add(x, attend(w["attention"], h, batch_inputs), first)
        y, aux = mix(w["moe"], rms_norm(x, w["mlp_norm"], epsilon), batch_inputs)
        return add(x, y, second), aux

    def embed(weights: PyTree, batch_inputs: PyTree) -> Float[Array, "b T D"]:
        x = embed_tokens(weights["table"], batch_inputs["tokens"], constrain=constrain, dtype=dtype)
        if "layers" in weights:
            x, _ = run_layers(outside_remat(dense_layer), weights["layers"], x, batch_inputs)
        return x

    token_loss = partial(next_token_loss, epsilon=epsilon, z_loss_multiplier=z_loss_multiplier)
    token_loss = partial(token_loss, constrain=constrain, num_chunks=num_vocab_tiling)

    def loss(boundary: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree):
        if "layers" not in boundary["head"]:
            return token_loss(boundary, x, batch_inputs)
        x, aux = run_layers(outside_remat(layer), boundary["head"]["layers"], x, batch_inputs)
        loss, metrics = token_loss(boundary, x, batch_inputs)
        metrics["load_balance_loss_after"] = aux["load_balance_loss"]
        return loss + aux["loss"], metrics

    return embed, layer, loss
