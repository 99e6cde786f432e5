"""MaxText's keys that jaxpipe does not have, with advice on what to write instead.

Every key of MaxText 0.2.5 is listed, except those with the same name and meaning in `_keys.py`.
"""

import re

_LARGE_MOE = (
    "logical_axis_rules=[[embed,[fsdp,expert]],[embed_no_exp,[fsdp]],[q_lora,[fsdp]],"
    "[kv_lora,[fsdp]]]"
)

SAME_KEYS = {
    "base_output_directory": "output_dir",
    "wandb_project": "tracker_project",  # jaxpipe's own, before there were other trackers
    "wandb_project_name": "tracker_project",
}
"""Keys of MaxText that have another name here and the same values."""

ADVICE: dict[str, str] = {
    # The run
    "hardware": "JAX finds the devices; `emulate_devices=N` emulates some on a CPU.",
    "compile_topology_num_slices": "Run `jaxpipe compile --devices v5p:2x2x1 --num-slices N`.",
    "compiled_trainstep_file": "Write `jax_cache_dir=FOLDER`: compiled programs are kept there.",
    "num_slices": "Sizes across slices are the keys `dcn_*_parallelism`.",
    "reuse_example_batch": "Write `dataset_type=synthetic`.",
    "jax_distributed_initialization_timeout": "Processes are started by `jaxpipe launch`.",
    "skip_jax_distributed_system": "Write `distributed=false`, which is the default.",
    # The model
    "override_model_config": "Keys given after `model_name` always override its preset.",
    "override_logical_axis_rules": "`logical_axis_rules` replaces the rules of the names it has.",
    "sparse_matmul": "Experts are always a grouped matmul; `megablox` chooses the kernel.",
    "mlp_activations": "MLPs are `silu(gate) * linear`, which is [silu, linear]: leave it out.",
    "attention_type": "The attention follows from `decoder_block`: leave it out.",
    "grad_dtype": "Gradients add up in float32 and have `weight_dtype`.",
    "use_iota_embed": "The embedding is looked up by index, not multiplied: leave it out.",
    "use_qwix_quantization": "Write `quantization=fp8`.",
    "moe_expert_input_dim": "Experts are as wide as `base_emb_dim`: leave it out.",
    "wsd_decay_steps_fraction": (
        "`learning_rate_schedule=wsd` falls in the last 20% of its steps: leave it out."
    ),
    "wsd_decay_style": "`learning_rate_schedule=wsd` falls linearly: leave it out.",
    # The data
    "tokenizer_type": "It follows from the file that `tokenizer_path` names.",
    "train_split": "Write `data_files=FILES` for training and `eval_files=FILES` for evaluation.",
    "eval_split": "Write `eval_files=FILES`, or `eval_split_fraction=0.01`.",
    "eval_dataset_name": "Write `eval_files=FILES`.",
    "eval_per_device_batch_size": (
        "A batch of evaluation has as many rows as a step of training: leave it out, and choose "
        "`eval_steps`."
    ),
    "num_epoch": "Write `steps=N`; rows come in a new order every epoch.",
    "tokenize_train_data": "Write `dataset_type=tokens` for ids, as `jaxpipe tokenize` makes them.",
    # The optimizer
    "lr_schedule_type": "Write `learning_rate_schedule=cosine`.",
    "opt_type": "Write `optimizer=NAME`, which optax knows: adamw, muon, sgd, ...",
    "adamw_mask": "Write `weight_decay_exclude=[PATTERNS]`.",
    "mu_dtype": "Write `optimizer_arguments`, a mapping: {mu_dtype: bfloat16}.",
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
    "save_checkpoint_on_completion": (
        "With `enable_checkpointing` the last step is always saved: leave it out."
    ),
    "save_checkpoint_on_start": "Checkpoints begin with `checkpoint_period`: leave it out.",
    "wandb_run_name": "It is `run_name`.",
}
"""For each key, what to write instead."""

_KEYS_BY_ADVICE: dict[str, str] = {
    # The run
    "It belongs to a service of Google Cloud or to Pathways: leave it out.": (
        "save_config_to_gcs enable_goodput_recording goodput_job_name monitor_goodput "
        "goodput_upload_interval_seconds enable_pathways_goodput monitor_step_time_deviation "
        "step_deviation_interval_seconds use_vertex_tensorboard enable_autocheckpoint "
        "enable_checkpoint_cloud_logger colocated_python_checkpointing "
        "colocated_python_data_input enable_single_controller subslice_shape "
        "report_heartbeat_metric_for_gcp_monitoring heartbeat_reporting_interval_in_seconds "
        "report_performance_metric_for_gcp_monitoring enable_gcp_goodput_metrics "
        "enable_gcp_step_deviation_metrics upload_all_profiler_results"
    ),
    "There is no other backend or implementation of the model: leave it out.": (
        "use_m3_model use_lineage use_sequential_layers"
    ),
    "Every run writes its config into its folder: leave it out.": "log_config",
    "Write `bad_step_policy=stop`, which is the default, or `bad_step_policy=ignore`.": (
        "abort_on_nan_loss abort_on_inf_loss"
    ),
    "Write `max_gradient_norm=X bad_step_policy=skip`.": (
        "skip_step_on_spikes skip_step_interval skip_step_scaling_factor"
    ),
    "`jaxpipe compile KEY=...` says what a step needs: leave it out.": "write_estimator_result",
    "Set `JAX_DEBUG_LOG_MODULES` in the environment.": "jax_debug_log_modules",
    "Set `JAX_DEBUG_NANS=1` in the environment to find a NaN; nothing else is checked.": (
        "max_checkify"
    ),
    "Metrics are in `metrics.jsonl` of the run's folder: leave it out.": (
        "enable_mllog mllog_file record_internal_nn_metrics log_step_diagnostics "
        "moe_log_max_load_ratio log_required_ragged_buffer_factor hide_profiler_step_metric "
        "prometheus_port metrics_file gcs_metrics"
    ),
    "The step is compiled before the first one runs: leave it out.": (
        "warmup_programs_in_init block_state_before_run_start warm_input_reshard_before_run_start "
        "max_inflight_computations"
    ),
    "A run has as many processes and devices as it started with; `jaxpipe launch --max-restarts N` "
    "starts it again.": (
        "elastic_enabled elastic_backup_kind elastic_timeout_seconds elastic_max_retries "
        "elastic_min_slice_count"
    ),
    "Write `profile_steps=10:12`.": (
        "profile_cleanly profile_periodically_period enable_jax_profiler jax_profiler_port "
        "enable_tpu_profiling_options tpu_num_chips_to_profile_per_task "
        "tpu_num_sparse_core_tiles_to_trace tpu_num_sparse_cores_to_trace profile_power_events "
        "profiler profiler_steps skip_first_n_steps_for_profiler"
    ),
    "Run `jaxpipe compile --dump-hlo FOLDER KEY=...`.": "dump_hlo dump_step dump_jaxpr",
    "Run `jaxpipe compile --devices v5p:2x2x1 KEY=...`.": (
        "compile_topology internal_compile internal_compile_num_devices"
    ),
    # The model
    "Logits, the loss, softmax, norms and routers are float32 in any case: leave it out.": (
        "logits_dot_in_fp32 cast_logits_to_fp32 float32_logits float32_gate_logits "
        "float32_weight_sum"
    ),
    "Write `dtype=float32` for activations in float32.": "activations_in_float32",
    "Write `dtype=float32` for products in float32.": "matmul_precision float32_qk_product",
    "Projections are separate: leave it out.": "fused_qkv fused_mlp",
    "Layers are always stacked: leave it out. `scan_layers_per_stage`, `scan_pipeline_iterations` "
    "and `scan_pipeline_repeats` say which loops are written out.": (
        "scan_layers param_scan_axis force_unroll"
    ),
    "Every model of `decoder_block=gpt_oss` has it, and no other: leave it out.": (
        "attention_bias attention_sink mlp_bias mlp_activations_limit"
    ),
    "No model here has it: leave it out.": (
        "global_parameter_scale dense_init_scale attention_output_dim global_head_dim "
        "global_num_kv_heads normalize_embedding_logits "
        "first_num_hash_layers inhomogeneous_layer_cycle_interval share_kv_projections "
        "causal_block_size attn_logits_soft_cap final_logits_soft_cap use_post_attn_norm "
        "use_post_ffw_norm v_norm_with_scale qk_norm_with_scale use_qk_clip "
        "qk_clip_threshold hidden_size_per_layer_input vocab_size_per_layer_input "
        "num_kv_shared_layers use_double_wide_mlp moba moba_chunk_size moba_topk use_indexer "
        "o_lora_rank o_groups compress_ratios compressed_rope_max_timescale "
        "csa_qk_head_chunk_size use_csa_streamindex_kernel indexer_cutoff_threshold "
        "use_untrainable_positional_embedding trainable_position_size partial_rotary_factor "
        "sinkhorn_iterations enable_mhc_lite use_mhc_pallas_kernel engram use_random_routing "
        "use_qk_norm_in_gdn weight_sparsity_n weight_sparsity_m weight_sparsity_update_step "
        "weight_sparsity_start_step"
    ),
    "Models read text alone: leave it out.": (
        "use_multimodal use_audio freeze_vision_encoder_params freeze_audio_encoder_params "
        "dtype_mm image_path video_path audio_path image_placeholder video_placeholder "
        "audio_placeholder use_audio_in_video max_num_images_per_example vision_output_length "
        "use_mrope mrope_section position_id_per_seconds train_image_column eval_image_column "
        "video_max_grid_t video_max_grid_h video_max_grid_w"
    ),
    "Rotary angles follow from `rope_type`, `rope_max_timescale`, `rope_factor` and `mscale`: "
    "leave it out.": (
        "rope_use_scale rope_min_timescale "
        "global_rope_max_timescale global_rope_proportion local_rope_proportion rope_truncate "
        "rope_attention_scaling"
    ),
    "Rotary angles turn the halves of a head against each other; `jaxpipe convert` reorders the "
    "weights of models that turn neighbouring channels: leave it out.": (
        "rope_interleave rope_pairwise"
    ),
    "Any length is possible: write `max_target_length`.": "max_position_embeddings",
    "`attention=splash` chooses its own blocks and layouts: leave it out.": (
        "use_max_logit_estimate cost_estimate_flops_fwd cost_estimate_flops_bwd "
        "dq_reduction_steps use_splash_scheduler local_use_splash_scheduler use_tokamax_splash "
        "use_jax_splash force_q_layout ring_scan_unroll experimental_sa_quant_q_fp8 "
        "experimental_sa_quant_k_fp8"
    ),
    "Write `attention=dot_product` or a kernel, such as `attention=splash`; none has options.": (
        "enable_padding_causal_mask mla_naive_kvcache use_sliced_mla_proj use_mla_absorbed_mqa "
        "mla_qk_head_chunk_size"
    ),
    "No model here predicts further tokens: leave it out.": (
        "mtp_num_layers mtp_loss_scaling_factor mtp_eval_target_module mtp_reuse_input_embedding"
    ),
    "`quantization=fp8` has scales of its own and no other option: leave it out.": (
        "constant_bound_config replicate_quant_scale quant_cfg_path quantize_mtp "
        "quantize_router_proj quantize_logits_proj use_manual_quantization "
        "quantization_local_shard_count unquantized_modules weight_block_size "
        "checkpoint_is_quantized save_quantized_params_path"
    ),
    # Experts
    "Experts here drop no tokens, whatever their load: leave it out.": (
        "eval_ragged_buffer_factor moe_dropless_fallback retry_dropless_first_steps "
        "first_phase_ragged_buffer_factor te_ep_overflow_check_every_n_steps capacity_factor "
        "ragged_buffer_factor"
    ),
    "Experts are a grouped matmul that `megablox` chooses; rows are exchanged as "
    "`ici_expert_parallelism` says: leave it out.": (
        "num_moe_token_chunks moe_chunk_barrier use_custom_sort_vjp router_topk_matmul_vjp "
        "use_ring_of_experts moe_topk_before_ep_all_gather te_moe_block te_gmm_quantization "
        "te_comm_gemm_overlap moe_quantize_token_all_gather moe_quantize_combine_bwd_method "
        "num_moe_emb_chunks moe_dispatch_no_expert_sharding use_ragged_sort "
        "moe_use_direct_token_gather use_gather_mosaic_kernel merge_gating_gmm use_tokamax_gmm "
        "use_gmm_v2 use_gmm_v2_heuristic_tiling defer_small_all_reduces return_routed_experts "
        "use_batch_split_schedule batch_split_factor"
    ),
    "The loss of an uneven load is that of `load_balance_loss_weight`, in every layer: leave it "
    "out.": "moe_use_megatron_seq_aux_loss",
    "Write `logical_axis_rules` for what splits weights; the names of an expert's dims are exp, "
    "embed_no_exp and mlp.": "shard_embed_moe_on_fsdp use_2d_fsdp_sharding",
    "Write `pipeline_fsdp_ag_once`, `pipeline_fsdp_ag_per_repeat` or "
    "`pipeline_fsdp_ag_per_layer`.": (
        "moe_fsdp_use_two_stage_all_gather dense_fsdp_use_two_stage_all_gather vocab_tiling_ag_once"
    ),
    # The data
    "Write `data_files=FILES` and a `dataset_type` that says what they hold.": (
        "dataset_path dataset_name"
    ),
    "Write `text_field=NAME`.": "train_data_columns eval_data_columns",
    "Documents are read as they are, without a template: leave it out.": (
        "use_chat_template chat_template_path chat_template use_sft "
        "sft_train_on_completion_only default_prompt"
    ),
    "Training predicts the next token: leave it out.": (
        "use_dpo training_objective block_diffusion_mask_id block_diffusion_min_noise "
        "block_diffusion_logit_alignment block_diffusion_canvas_policy"
    ),
    "Write `eval_files` of the same `dataset_type`, which says whether they hold ids.": (
        "tokenize_eval_data"
    ),
    "An end-of-document id closes every document, and nothing opens it: leave it out.": (
        "add_bos add_eos"
    ),
    "Write `packing=true` for rows that several documents fill, which cannot see each other; "
    "`packing=false` cuts or pads one document a row.": (
        "use_truncation use_stream_chunking max_segments_per_seq reset_attention_mask "
        "eod_mask_loss packing_max_segments_per_sample"
    ),
    "Every process reads the rows of its own devices: leave it out.": (
        "expansion_factor_real_data train_shard_in_read train_interleave_cycle_length "
        "max_corpus_chars blend_cache_dir blend_index_dir"
    ),
    "Training goes round the rows without end, and the last batch of an evaluation is filled with "
    "rows that do not count: leave it out.": (
        "generate_padding_batch_train generate_padding_batch_eval"
    ),
    "All steps have `per_device_batch_size`: leave it out.": (
        "enable_rampup_batch_size per_device_batch_size_start per_device_batch_size_increment "
        "global_rampup_samples"
    ),
    # The optimizer and evaluation
    "`adam_eps` is added outside of the root, and nothing inside: leave it out.": ("adam_eps_root"),
    "All weights are trained: leave it out.": "trainable_parameters_mask",
    "Write `eval_interval`; evaluation begins with the first one: leave it out.": "eval_start_step",
    "Write `steps`; no loss ends a run: leave it out.": "target_eval_loss",
    # The devices
    "Write `logical_axis_rules`; the axes are data, stage, fsdp, tensor, expert and context.": (
        "custom_mesh custom_mesh_and_rule_for_eval logical_axis_rules_for_eval "
        "input_data_sharding_logical_axes optimize_mesh_for_tpu_v6e"
    ),
    "A weight that its axes do not divide is an error before a run begins: leave it out.": (
        "sharding_tolerance check_vma"
    ),
    "JAX's own defaults hold: leave it out.": "shardy remove_size_one_mesh_axis_from_type",
    "Write `ici_context_parallelism`; rows are split over it in their order, and XLA gathers keys "
    "and values.": (
        "context_sharding ulysses_context_sharding context_parallel_load_balance "
        "context_parallel_strategy context_parallel_reorder_strategy"
    ),
    "Gradients are summed over all devices in every step: leave it out.": (
        "enable_diloco enable_streaming_diloco num_diloco_fragments "
        "num_communication_overlapping_steps communication_overlapping_alpha"
    ),
    # What the pipeline keeps
    "Write `context`, `mla_q` and `mla_kv` for the tensors of attention.": (
        "attention_out query_wa_proj kv_wa_proj"
    ),
    "Write `moe_mlpwi_0`, `moe_mlpwi_1` and `moe_mlpwo` for the tensors of experts.": (
        "moe_x_sorted moe_routing_maps"
    ),
    # Checkpoints
    "Write `checkpoint_period=N` or `checkpoint_minutes=N`.": "enable_continuous_checkpointing",
    "Checkpoints are in one place, the run's folder: leave it out.": (
        "enable_single_replica_ckpt_restoring enable_multi_tier_checkpointing "
        "multi_tier_checkpointing_backup_interval_minutes "
        "multi_tier_checkpointing_backup_interval_steps mtc_data_parallelism "
        "enable_emergency_checkpoint local_checkpoint_directory local_checkpoint_period"
    ),
    "Write `max_to_keep=N`: others are deleted.": (
        "checkpoint_todelete_subdir checkpoint_todelete_full_path"
    ),
    "Run `jaxpipe convert` for checkpoints of Hugging Face; its own are Orbax's.": (
        "checkpoint_conversion_fn source_checkpoint_layout enable_orbax_v1"
    ),
    "There are no LoRA adapters here: leave it out.": (
        "lora_input_adapters_path hf_lora_adapter_path"
    ),
    # Inference and reinforcement learning
    "`jaxpipe sample RUN --prompt TEXT` prints what a run has learnt: leave it out.": "prompt",
    "jaxpipe trains and does not serve: leave it out.": (
        "model_call_mode quantize_kvcache kv_quant_axis kv_quant_dtype max_prefill_predict_length "
        "load_from_prefill_dir prefill_cache_dir autoregressive_decode_assert "
        "prefill_slice generate_slice enable_model_warmup enable_llm_inference_pool "
        "multi_sampling return_log_prob stack_prefill_result_cache prefill_cache_axis_order "
        "ar_cache_axis_order compute_axis_order reshape_q use_ragged_attention ragged_block_size "
        "prefill_chunk_size use_chunked_prefill enable_prefix_caching prefix_caching_hbm_byte "
        "prefix_caching_dram_byte use_weight_converter rollout_tensor_parallelism "
        "rollout_backend kv_tp_size moe_mlp_tp_size weight_sync_debug use_raiden_ffi"
    ),
}
"""For each sentence, the keys that it is the advice for."""

ADVICE |= {key: text for text, keys in _KEYS_BY_ADVICE.items() for key in keys.split()}

ADVICE_BY_PATTERN: dict[str, str] = {
    r"(?:eval_)?(?:local_)?sa_.*": (
        "`attention=splash` chooses its own blocks and layouts: leave it out."
    ),
    r"eval_(?:wi|wo)_tile_.*": "Tiles of grouped matmuls are chosen by the kernel: leave it out.",
    r"moe_(?:pin_sparse_core|fsdp_all_gather_sparse|ep_all_gather_sparse).*": (
        "XLA chooses where collectives run: leave it out, or write `compile_xla_flags`."
    ),
    r"ragged_gather_.*": "`megablox` chooses the kernel: leave it out.",
    r".*_for_(?:vit|audio)": "Models read text alone: leave it out.",
    r"(?:gdn|mhc|engram|indexer)_.*": "No model here has it: leave it out.",
    r"(?:inference|vllm|decode_sampling)_.*": "jaxpipe trains and does not serve: leave it out.",
    r"distill_.*": "There is no distillation here: leave it out.",
    r"managed_mldiagnostics.*|vertex_.*": (
        "It belongs to a service of Google Cloud or to Pathways: leave it out."
    ),
    r"xprof_.*": "Write `profile_steps=10:12`.",
    r"standalone_checkpointer_.*": "No command only saves checkpoints: leave it out.",
    r"dcn_bandwidth_.*": "Networks are as fast as they are: leave it out.",
    r"(ici|dcn)_(fsdp_transpose|tensor_transpose)_parallelism": (
        "Write `{0}_fsdp_parallelism` or `{0}_tensor_parallelism`: there is one axis of each."
    ),
    r"(ici|dcn)_tensor_sequence_parallelism": (
        "Write `{0}_tensor_parallelism` and `sequence_parallel=true`."
    ),
    r"(ici|dcn)_(sequence|context_\w+)_parallelism": (
        "Write `{0}_context_parallelism`, which splits sequences."
    ),
    r"(ici|dcn)_(autoregressive|diloco)_parallelism": "There is no such axis here: leave it out.",
    r"(grain|hf)_(train|eval)_files": "Write `data_files=FILES` or `eval_files=FILES`.",
    r"(grain|hf|olmo|mmap)_.*": "Write `dataset_type` and `data_files=FILES`.",
    r"dump_(hlo|jaxpr)_.*": "Run `jaxpipe compile --dump-hlo FOLDER KEY=...`.",
    r"muon_(beta|consistent_rms)": (
        "Write `optimizer=muon`, and `optimizer_arguments`, a mapping: {{{0}: NUMBER}}."
    ),
    "muon_weight_decay": "Write `adam_weight_decay`, which is muon's too.",
    r"muon_.*": "Write `optimizer=muon`, with arguments of optax's muon as `optimizer_arguments`.",
    r"diloco_.*": "There is no DiLoCo: leave it out.",
    r"(wi|wo)_tile_.*": "Tiles of grouped matmuls are chosen by the kernel: leave it out.",
    r"checkpoint_storage_.*": "Checkpoints are written with Orbax's own settings: leave it out.",
    r".*quant(ization)?_calibration_method": (
        "`quantization=fp8` has scales of its own: leave it out."
    ),
}
"""For each regular expression of keys, what to write instead; `{0}` is its first group."""


def maxtext_advice(key: str) -> str | None:
    """Returns advice on what to write instead of a key of MaxText."""
    if key in ADVICE:
        return ADVICE[key]
    for pattern, text in ADVICE_BY_PATTERN.items():
        match = re.fullmatch(pattern, key)
        if match:
            return text.format(*match.groups())
    return None
