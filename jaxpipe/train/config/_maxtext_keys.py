"""Keys of MaxText that jaxpipe does not have, and what to write instead.

A key is here if a MaxText user would plausibly set it. Keys whose meaning is the same have
MaxText's own name in base.yml and are not here.
"""

import re

_NO_DROPPING = "Experts here drop no tokens, whatever their load: leave it out."
_LEAVE_STACKED = (
    "Layers are always stacked: leave it out. `scan_layers_per_stage`, `scan_pipeline_iterations` "
    "and `scan_pipeline_repeats` say which loops are written out."
)
_LARGE_MOE = (
    "logical_axis_rules=[[embed,[fsdp,expert]],[embed_no_exp,[fsdp]],[q_lora,[fsdp]],"
    "[kv_lora,[fsdp]]]"
)

INSTEAD: dict[str, str] = {
    # The run
    "base_output_directory": "Write `output_dir=FOLDER`; the run's folder is `run_name` inside it.",
    "hardware": "JAX finds the devices; `emulate_devices=N` emulates some on a CPU.",
    "compile_topology": "Run `jaxpipe compile --topology v5p:2x2x1 KEY=...`.",
    "compile_topology_num_slices": "Run `jaxpipe compile --topology v5p:2x2x1 --num-slices N`.",
    "compiled_trainstep_file": "Write `jax_cache_dir=FOLDER`: compiled programs are kept there.",
    "num_slices": "Sizes across slices are the keys `dcn_*_parallelism`.",
    "reuse_example_batch": "Write `dataset_type=synthetic`.",
    "skip_step_on_spikes": "Write `max_gradient_norm=X bad_step_policy=skip`.",
    "jax_distributed_initialization_timeout": "Processes are started by `jaxpipe launch`.",
    "skip_jax_distributed_system": "Write `distributed=false`, which is the default.",
    # The model
    "scan_layers": _LEAVE_STACKED,
    "param_scan_axis": _LEAVE_STACKED,
    "force_unroll": _LEAVE_STACKED,
    "override_model_config": "Keys given after `model_name` always override its preset.",
    "override_logical_axis_rules": "`logical_axis_rules` replaces the rules of the names it has.",
    "capacity_factor": _NO_DROPPING,
    "ragged_buffer_factor": _NO_DROPPING,
    "sparse_matmul": "Experts are always a grouped matmul; `megablox` chooses the kernel.",
    "mlp_activations": "Layers multiply with a SiLU gate, as llama's: leave it out.",
    "attention_type": "The attention follows from `decoder_block`: leave it out.",
    "fused_qkv": "Projections are separate: leave it out.",
    "fused_mlp": "Projections are separate: leave it out.",
    "matmul_precision": "Write `dtype=float32` for products in float32.",
    "float32_qk_product": "Write `dtype=float32` for products in float32.",
    "grad_dtype": "Gradients add up in float32 and have `weight_dtype`.",
    "mtp_num_layers": "No model here predicts further tokens: leave it out.",
    "use_qwix_quantization": "Write `quantization=fp8`.",
    "moe_expert_input_dim": "Experts are as wide as `base_emb_dim`: leave it out.",
    "wsd_decay_steps_fraction": "Write `learning_rate_schedule=wsd`.",
    # The data
    "tokenizer_type": "It follows from the file that `tokenizer_path` names.",
    "dataset_path": "Write `data_files=FILES` and a `dataset_type` that says what they hold.",
    "dataset_name": "Write `data_files=FILES` and a `dataset_type` that says what they hold.",
    "train_split": "Write `data_files=FILES` for training and `eval_files=FILES` for evaluation.",
    "eval_split": "Write `eval_files=FILES`, or `eval_split_fraction=0.01`.",
    "eval_dataset_name": "Write `eval_files=FILES`.",
    "train_data_columns": "Write `text_field=NAME`.",
    "eval_data_columns": "Write `text_field=NAME`.",
    "eval_per_device_batch_size": "Evaluation has the batches of training: leave it out.",
    "num_epoch": "Write `steps=N`; rows come in a new order every epoch.",
    "tokenize_train_data": "Write `dataset_type=tokens` for ids, as `jaxpipe tokenize` makes them.",
    # The optimizer
    "lr_schedule_type": "Write `learning_rate_schedule=cosine`.",
    "opt_type": "The optimizer is AdamW: leave it out.",
    "adamw_mask": "Write `weight_decay_exclude=[PATTERNS]`.",
    "mu_dtype": "Moments have `weight_dtype`: leave it out.",
    "cosine_learning_rate_final_fraction": "Write `learning_rate_final_fraction`.",
    # The devices
    "custom_mesh_and_rule": (
        f"Dense models need none; for `pipeline-large-moe` write `{_LARGE_MOE}`, see "
        "docs/training.md."
    ),
    "mesh_axes": "The axes are data, stage, fsdp, tensor, expert and context, in that order.",
    "data_sharding": "Rows are split over data, fsdp and expert, microbatches over stage.",
    "allow_split_physical_axes": "Meshes may split physical axes: leave it out.",
    "optimizer_memory_host_offload": "The optimizer's state stays on devices: leave it out.",
    "parameter_memory_host_offload": "Weights stay on devices: leave it out.",
    "use_iota_embed": "The embedding is looked up by index: leave it out.",
    # The pipeline and what it keeps
    "using_pipeline_parallelism": "It follows from `ici_pipeline_parallelism`.",
    "model_fsdp_ag_once": "Write `pipeline_fsdp_ag_once`.",
    "mlpwi": "Write `mlpwi_0` and `mlpwi_1`.",
    "qkv_proj": "Write `query_proj`, `key_proj` and `value_proj`.",
    "kv_proj": "Write `key_proj` and `value_proj`.",
    # Checkpoints and reports
    "load_parameters_path": "Write `init_from=FOLDER`: of a run, or of `jaxpipe convert`.",
    "load_full_state_path": "A run resumes from its folder: repeat `run_name` and `output_dir`.",
    "max_num_checkpoints_to_keep": "Write `max_to_keep=N`.",
    "save_checkpoint_on_completion": "The last step is always saved: leave it out.",
    "save_checkpoint_on_start": "Checkpoints begin with `checkpoint_period`: leave it out.",
    "metrics_file": "Metrics are in `metrics.jsonl` of the run's folder: leave it out.",
    "gcs_metrics": "Metrics are in `metrics.jsonl` of the run's folder: leave it out.",
    "profiler": "Write `profile_steps=10:12`.",
    "profiler_steps": "Write `profile_steps=10:12`.",
    "skip_first_n_steps_for_profiler": "Write `profile_steps=10:12`.",
    "wandb_project_name": "Write `wandb_project=NAME`.",
    "wandb_run_name": "It is `run_name`.",
    "dump_hlo": "Run `jaxpipe compile --dump-hlo FOLDER KEY=...`.",
}
"""For each key, what to write instead."""

PREFIXES: dict[str, str] = {
    r"(ici|dcn)_(fsdp_transpose|tensor_transpose)_parallelism": (
        "Write `{0}_fsdp_parallelism` or `{0}_tensor_parallelism`: there is one axis of each."
    ),
    r"(ici|dcn)_(sequence|tensor_sequence|context_\w+)_parallelism": (
        "Write `{0}_context_parallelism`, which splits sequences."
    ),
    r"(ici|dcn)_(autoregressive|diloco)_parallelism": "There is no such axis here: leave it out.",
    r"(grain|hf)_(train|eval)_files": "Write `data_files=FILES` or `eval_files=FILES`.",
    r"(grain|hf|olmo|mmap)_.*": "Write `dataset_type` and `data_files=FILES`.",
    r"dump_(hlo|jaxpr)_.*": "Run `jaxpipe compile --dump-hlo FOLDER KEY=...`.",
    r"(muon|diloco)_.*": "The optimizer is AdamW: leave it out.",
    r"(wi|wo)_tile_.*": "Tiles of grouped matmuls are chosen by the kernel: leave it out.",
    r"checkpoint_storage_.*": "Checkpoints are written with Orbax's own settings: leave it out.",
    r".*quant(ization)?_calibration_method": (
        "`quantization=fp8` has scales of its own: leave it out."
    ),
}
"""For each regular expression of keys, what to write instead; `{0}` is its first group."""


def instead_of(key: str) -> str | None:
    """Returns what to write instead of a key of MaxText.

    Args:
        key: The key.

    Returns:
        A sentence; None if the key is not listed here.
    """
    if key in INSTEAD:
        return INSTEAD[key]
    for pattern, text in PREFIXES.items():
        match = re.fullmatch(pattern, key)
        if match:
            return text.format(*match.groups())
    return None
