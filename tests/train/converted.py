"""What a converted folder computes, and small models to convert."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import models
from jaxpipe.hugging_face.formats import canonical_weights, read_sizes
from jaxpipe.models.layers import rms_norm
from jaxpipe.models.weights import weight_shapes
from jaxpipe.train import load_config, set_up
from jaxpipe.train.checkpoint import first_state, open_checkpoints, save_checkpoint
from jaxpipe.train.plan import Setup
from small_models import small_deepseek_v2, small_llama

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))
"""Models that transformers has made: folders of `GOLDEN`."""
LLAMA = small_llama(base_num_decoder_layers=3, base_mlp_dim=24, vocab_size=40)
DEEPSEEK = small_deepseek_v2(base_mlp_dim=24, shared_experts=2, qk_nope_head_dim=6, vocab_size=40)


def loaded(folder: Path) -> tuple[Setup, Any]:
    """The model of a folder that `convert` made, in float32, and its weights by `init_from`."""
    settings = ["dtype=float32", "weight_dtype=float32", "pipeline_engine=none"]
    settings += ["ici_fsdp_parallelism=1", f"init_from={folder}"]
    config = load_config([folder / "config.yml"], settings, presets=models.PRESETS)
    setup = set_up(config, jax.devices()[:1])
    return setup, first_state(setup.step, config.init_from)["weights"]


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """[b, T, V] of a folder that `convert` made, in float32."""
    setup, weights = loaded(folder)
    config, model = setup.config, setup.step.pipe.model
    assert callable(model.layer)
    block = config.decoder_block
    rows, length = tokens.shape
    batch_inputs = {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)),
        "segment_ids": jnp.ones((rows, length), jnp.int32),
        "target_weights": jnp.ones((rows, length)),
    }
    x = model.embed(weights["embed"], batch_inputs, ())
    for i in range(setup.state.weights.layout.num_layers):
        layer = jax.tree.map(lambda leaf: leaf[0, 0, i], weights["stages"])  # noqa: B023
        pattern = {"gemma3": config.sliding_window_pattern, "gpt_oss": 2, "llama4": 2}.get(block)
        key = ((), int((i + 1) % pattern == 0)) if pattern else ()
        x, _ = model.layer(layer, x, batch_inputs, key)
    norm = weights["head"]["norm"] + float(block == "gemma3")  # stored as what it adds to 1
    x = rms_norm(x, norm, config.normalization_layer_epsilon)
    matrix = weights["embed"]["table"].T if model.tied else weights["head"]["logits"]
    return np.asarray(x @ matrix)


def make_run(
    folder: Path,
    sizes: Any,
    *,
    layers_after: int = 0,
    dtype: Any = np.float32,
    step: int = 7,
    **metadata: Any,
) -> Any:
    """A run's folder with a checkpoint of random weights, which come back by their paths."""
    block, _ = read_sizes({"model": vars(sizes)})
    tree = weight_shapes(canonical_weights(block, sizes, dtype, layers_after))
    noise = np.random.default_rng(step)
    weights = jax.tree.map(lambda x: noise.standard_normal(x.shape).astype(x.dtype), tree)
    state = {
        "weights": weights,
        "optimizer": {"count": np.array(step, np.int32)},
        "step": np.array(step, np.int32),
    }
    metadata |= {"model": vars(sizes), "layers_after": layers_after}
    with open_checkpoints(folder / "checkpoints", max_to_keep=None, asynchronous=False) as saved:
        save_checkpoint(saved, step, state, metadata)
    return weights


def change(file: Path, **fields: Any) -> None:
    """Sets fields of a JSON file; None removes one."""
    values = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
