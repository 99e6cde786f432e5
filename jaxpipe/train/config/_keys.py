"""Every key of a training run: its name (MaxText's where MaxText has one), type, range and default.

What a key means stands beside it in `base.yml`, which has the same keys and the same defaults.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ..._input import plain_text
from ...autodiff import POLICIES, Place
from ...data import Kind, Paths, Source, TokenType
from ..optim._optimizer import SHAPES


def _tuples(value: Any) -> Any:
    """Lists, at any depth, as tuples: a config is frozen all the way down."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _count_or_auto(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("Input should be at least 1, or -1")
    return value


_MOST = 2**31 - 1  # of an int32
CountOrAuto = Annotated[int, Field(le=_MOST), AfterValidator(_count_or_auto)]
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=_MOST)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Devices = Annotated[int, Field(ge=0, le=1024)]  # more take minutes to be emulated
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Minutes = Annotated[float, Field(ge=0, le=1e7)]
Text = Annotated[str, Field(max_length=4096)]
Name = Annotated[Text, AfterValidator(plain_text)]
FloatType = Literal["bfloat16", "float32"]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_tuples)]
AxisRule = tuple[str, str | tuple[str, ...] | None]
AxisRules = Annotated[tuple[AxisRule, ...], BeforeValidator(_tuples)]


def _one_of(names: Collection[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"Input should be one of {', '.join(names)}")
        return value

    return AfterValidator(check)


def _folder_name(value: str) -> str:
    if not value.strip() or value in (".", "..") or "/" in value or not value.isprintable():
        raise ValueError(
            "Input should be the name of one folder inside `output_dir`, without `/`, control "
            "characters, `.` or `..` alone"
        )
    return value


FolderName = Annotated[str, AfterValidator(_folder_name)]
Policy = Annotated[str, _one_of(POLICIES)]
Shape = Annotated[str, _one_of(SHAPES)]


class Keys(BaseModel):
    """The keys by themselves; `Config` is what they must say together."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    # The run.
    run_name: FolderName = "default"
    output_dir: Name = "runs"
    steps: Count = 200
    log_period: Count = 1
    max_minutes: Minutes = 0.0

    # The model.
    model_name: Name = "llama-tiny"
    decoder_block: Literal["llama", "deepseek"] = "llama"
    base_emb_dim: Count = 64
    base_num_decoder_layers: Layers = 8
    base_num_query_heads: Count = 4
    base_num_kv_heads: Count = 2
    base_mlp_dim: Count = 192
    head_dim: Count = 16
    vocab_size: Count = 320
    normalization_layer_epsilon: Positive = 1e-5
    rope_max_timescale: Positive = 10000.0
    rope_type: Literal["default", "llama3.1", "yarn"] = "default"
    llama31_rope_factor: Positive = 8.0
    logits_via_embedding: bool = True
    dropout_rate: BelowOne = 0.0
    dtype: FloatType = "bfloat16"
    weight_dtype: FloatType = "float32"
    quantization: Literal["", "fp8"] = ""
    attention: Literal["auto", "dot_product", "splash"] = "auto"
    num_vocab_tiling: Count = 1

    # Experts and latent attention.
    first_num_dense_layers: CountOrNone = 0
    base_moe_mlp_dim: Count = 64
    shared_experts: CountOrNone = 0
    num_experts: Count = 1
    num_experts_per_tok: Count = 1
    load_balance_loss_weight: NotNegative = 0.0
    routed_score_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_bias: bool = False
    routed_bias_update_rate: NotNegative = 1e-3
    routed_scaling_factor: Positive = 1.0
    norm_topk_prob: bool = False
    n_routing_groups: Count = 1
    topk_routing_group: Count = 1
    group_score_experts: Count = 2
    megablox: Literal["auto"] | bool = "auto"
    q_lora_rank: CountOrNone = 0
    kv_lora_rank: Count = 32
    qk_nope_head_dim: Count = 16
    qk_rope_head_dim: Count = 8
    v_head_dim: Count = 16
    rope_factor: Positive = 40.0
    original_max_position_embeddings: Count = 4096
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NotNegative = 1.0

    # The data.
    dataset_type: Literal["synthetic", "mixture"] | Kind = "synthetic"
    data_files: Paths = ("builtin:sonnets",)
    text_separator: Text = "\n\n\n"
    text_field: Name = "text"
    token_dtype: TokenType = "uint16"
    token_eod: CountOrNone | None = None
    data_sources: Sources = ()
    tokenizer_path: Name = ""
    max_target_length: Count = 128
    per_device_batch_size: Positive = 8.0
    enable_data_shuffling: bool = True
    data_shuffle_seed: Seed = 0
    packing: bool = True
    eval_files: Paths = ()
    eval_data_sources: Sources = ()
    eval_split_fraction: BelowOne = 0.0
    eval_split_seed: Seed = 0

    # The optimizer.
    learning_rate: NotNegative = 1e-3
    learning_rate_schedule: Shape = "cosine"
    warmup_steps_fraction: BelowOne = 0.1
    learning_rate_final_fraction: Fraction = 0.1
    learning_rate_schedule_steps: CountOrAuto = -1
    adam_b1: BelowOne = 0.9
    adam_b2: BelowOne = 0.95
    adam_eps: Positive = 1e-8
    adam_weight_decay: NotNegative = 0.1
    weight_decay_exclude: Paths = ()
    z_loss_multiplier: NotNegative = 0.0
    gradient_accumulation_steps: Count = 1
    gradient_clipping_threshold: NotNegative = 1.0
    max_gradient_norm: NotNegative = 0.0
    bad_step_policy: Literal["stop", "skip", "ignore"] = "stop"

    # Evaluation.
    eval_interval: CountOrNone = 0
    eval_steps: CountOrAuto = -1
    keep_best: CountOrNone = 0

    # Chance.
    init_weights_seed: Seed = 0
    init_from: Name = ""
    enable_dropout: bool = True
    dropout_seed: Seed = 0

    # The pipeline.
    pipeline_engine: Literal["none", "circular", "scheduled", "mpmd"] = "circular"
    pipeline_schedule: Name = "auto"
    pipeline_layout: Name = ""
    pipeline_share_head: bool = False
    pipeline_parallel_layers: CountOrAuto = -1
    num_layers_per_pipeline_stage: Count = 1
    num_pipeline_repeats: CountOrAuto = -1
    num_pipeline_microbatches: CountOrAuto = -1
    pipeline_delay_activation_forwarding: bool = False
    pipeline_fsdp_ag_once: bool = False
    pipeline_fsdp_ag_per_repeat: bool = False
    pipeline_fsdp_ag_per_layer: bool = False
    scan_pipeline_iterations: bool = True
    scan_pipeline_repeats: bool = True
    scan_layers_per_stage: bool = True
    enable_nnx: bool | None = None
    pure_nnx_decoder: bool = False
    set_remat_policy_on_pipeline_iterations: bool = True
    set_remat_policy_on_layers_per_stage: bool = False
    remat_policy: Policy = "full"
    decoder_layer_input: Place = "device"
    query_proj: Place = "remat"
    key_proj: Place = "remat"
    value_proj: Place = "remat"
    context: Place = "remat"
    out_proj: Place = "remat"
    mlpwi_0: Place = "remat"
    mlpwi_1: Place = "remat"
    mlpwo: Place = "remat"
    mla_q: Place = "remat"
    mla_kv: Place = "remat"
    moe_mlpwi_0: Place = "remat"
    moe_mlpwi_1: Place = "remat"
    moe_mlpwo: Place = "remat"

    # The devices.
    ici_data_parallelism: CountOrAuto = 1
    ici_pipeline_parallelism: CountOrAuto = 1
    ici_fsdp_parallelism: CountOrAuto = -1
    ici_tensor_parallelism: CountOrAuto = 1
    ici_expert_parallelism: CountOrAuto = 1
    ici_context_parallelism: CountOrAuto = 1
    dcn_data_parallelism: Count = 1
    dcn_pipeline_parallelism: Count = 1
    dcn_fsdp_parallelism: Count = 1
    dcn_tensor_parallelism: Count = 1
    dcn_expert_parallelism: Count = 1
    dcn_context_parallelism: Count = 1
    logical_axis_rules: AxisRules | None = None
    shard_mode: Literal["auto", "explicit"] = "auto"
    shard_optimizer_over_data: bool = False
    debug_sharding: bool = False
    compile_xla_flags: Name = ""
    emulate_devices: Devices = 0
    distributed: bool = False
    deterministic: bool = False
    step_timeout_minutes: Minutes = 30.0
    mpmd_timeout_seconds: Seconds = 300.0
    mpmd_trace_step: CountOrNone = 0

    # Checkpoints and reports.
    enable_checkpointing: bool = True
    checkpoint_period: Count = 100
    checkpoint_minutes: Minutes = 0.0
    async_checkpointing: bool = True
    max_to_keep: Count = 3
    begin_anew: bool = False
    allow_unverified: bool = False
    allow_data_change: bool = False
    allow_learning_rate_change: bool = False
    enable_tensorboard: bool = True
    enable_wandb: bool = False
    wandb_project: Name = "jaxpipe"
    peak_tflops_per_device: NotNegative = 0.0
    enable_progress_bar: Literal["auto"] | bool = "auto"
    profile_steps: Name = ""
    jax_cache_dir: Name = ""
