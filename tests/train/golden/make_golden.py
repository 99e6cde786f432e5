"""Makes the folders beside it: tiny models as `transformers` saves them, and what they compute.

    pip install torch transformers safetensors
    python tests/train/golden/make_golden.py

Weights are random and saved in bfloat16; logits are those of the saved weights in float32.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "max_position_embeddings": 128,
    "rope_scaling": YARN,
    "rope_theta": 100.0,
}
IN_GROUPS = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
QWEN3: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", **SIZES, "num_key_value_heads": 4},
    "llama3": {
        "model_type": "llama",
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
    },
    "mistral": {
        "model_type": "mistral",
        **SIZES,
        "num_key_value_heads": 2,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    },
    "qwen3": {"model_type": "qwen3", **QWEN3, "tie_word_embeddings": True},
    # Of two stages the first layer of one is local, and that of the other global.
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 7,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        },
        "max_position_embeddings": 128,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        **EXPERTS,
        "num_key_value_heads": 2,
        "intermediate_size": 12,
        "num_local_experts": 8,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **QWEN3,
        **EXPERTS,
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000.0,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
        "max_position_embeddings": 128,
    },
    # Layers with an MLP and with experts in turn; of a block of two the second has no rotary
    # positions in every second block.
    "llama4": {
        "model_type": "llama4_text",
        **SIZES,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 12,
        "intermediate_size_mlp": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "rope_theta": 1_000.0,
        "max_position_embeddings": 128,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": 12, **IN_GROUPS},
    "deepseek_v2_lite": {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "q_lora_rank": 12,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}
POSITIONS = 48


def build(name: str, embed_scale: float = 1.0) -> Any:
    """A model whose every weight matters: of size 1 / sqrt(inputs), norms not 1, biases not 0."""
    torch.manual_seed(len(name))
    sizes = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for path, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in path:
                continue
            noise = torch.randn_like(weight)
            if weight.ndim == 1:
                # Gemma's scales of norms are what they add to 1.
                is_from_0 = "bias" in path or "sinks" in path or name == "gemma3"
                weight.copy_(0.1 * noise if is_from_0 else 1 + 0.2 * noise)
            elif weight.ndim == 0:  # the scale of embeddings
                continue
            elif "embed" in path:
                weight.copy_(embed_scale * noise)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    return model.eval()


def tokens_of(name: str) -> np.ndarray:
    """[2, T] token ids."""
    shape = (2, POSITIONS)
    return np.random.default_rng(len(name)).integers(0, SIZES["vocab_size"], shape, np.int32)


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """[2, T, V] of a saved model in float32. Nothing may be missing there, or unexpected."""
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = [loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")]
    assert not any(problems), problems
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens).long()).logits.numpy()


def generated_by(model: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """[2, count] ids that follow some tokens, each the likeliest."""
    rows = torch.tensor(tokens).long()
    options = {"attention_mask": torch.ones_like(rows), "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(rows, max_new_tokens=count, **options)[:, tokens.shape[1] :].numpy()


def main(folder: Path) -> None:
    """Writes all of them."""
    for name in MODELS:
        build(name).to(torch.bfloat16).save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        tokens = tokens_of(name)
        logits = logits_of(folder / name, tokens)
        assert 0.3 < logits.std() < 10, logits.std()
        np.savez_compressed(folder / name / "expected.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
