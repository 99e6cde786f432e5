"""Every key of a training run: its name (MaxText's where MaxText has one), type, range and default.

`base.yml` has the same keys with the same defaults, and says what each means.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from ..._input import plain_text
from ...autodiff import POLICIES
from ...autodiff.backward import Location
from ...data import Source
from ...data.sources import Paths, Separator, SourceType, TokenType
from ...engines import When
from ...models import MODEL_FAMILIES
from ..optim._optimizer import LEARNING_RATE_SHAPES

OPTION_KEYS = {
    "zero1": "shard_optimizer_over_data",
    "reduce_dtype": "reduce_dtype",
    "forwarding_delay": "pipeline_delay_activation_forwarding",
    "vocab_parallel": "pipeline_vocab_parallel",
    "scan_repeats": "scan_pipeline_repeats",
    "scan_ticks": "scan_pipeline_iterations",
}
"""The key of each of `EngineOptions`."""

GATHER_KEYS: dict[When, str] = {
    "once": "pipeline_fsdp_ag_once",
    "repeat": "pipeline_fsdp_ag_per_repeat",
    "layer": "pipeline_fsdp_ag_per_layer",
}
"""The keys of `gather`, by its values; "tick" has none."""


def _to_tuples(value: Any) -> Any:
    """Converts lists, at any depth, to tuples: a config is frozen all the way down."""
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _to_pairs(value: Any) -> Any:
    """Converts a mapping to pairs."""
    if not isinstance(value, Mapping | tuple):
        raise ValueError("Input should be a mapping, such as {momentum: 0.9}")
    return _to_tuples(tuple(value.items() if isinstance(value, Mapping) else value))


def _count_or_auto(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("Input should be at least 1, or -1")
    return value


_MAX_INT32 = 2**31 - 1  # of an int32
PositiveIntOrAuto = Annotated[int, Field(le=_MAX_INT32), AfterValidator(_count_or_auto)]
PositiveInt = Annotated[int, Field(ge=1, le=_MAX_INT32)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_INT32)]
NumLayers = Annotated[int, Field(ge=1, le=10_000)]
NumDevices = Annotated[int, Field(ge=0, le=1024)]  # more take minutes to be emulated
Seed = Annotated[int, Field(ge=0, lt=2**32)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Minutes = Annotated[float, Field(ge=0, le=1e7)]
Text = Annotated[str, Field(max_length=4096)]
Name = Annotated[Text, AfterValidator(plain_text)]
FloatType = Literal["bfloat16", "float32"]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_to_tuples)]
_ArgumentItem = bool | int | float | Text | None
_ArgumentValue = _ArgumentItem | tuple[_ArgumentItem | tuple[_ArgumentItem, ...], ...]
Arguments = Annotated[
    tuple[tuple[Name, _ArgumentValue], ...], BeforeValidator(_to_pairs), PlainSerializer(dict)
]
"""Arguments of a function by name, which are a mapping in files."""
AxisRule = tuple[str, str | tuple[str, ...] | None]
AxisRules = Annotated[tuple[AxisRule, ...], BeforeValidator(_to_tuples)]


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
RematPolicy = Annotated[str, _one_of(POLICIES)]
DecoderBlock = Annotated[
    str,
    _one_of(MODEL_FAMILIES),
    BeforeValidator(lambda value: "llama" if value == "llama2" else value),
]
"""A family of models; MaxText's `llama2`, which is Llama 3 too, is `llama`."""
LearningRateShape = Annotated[str, _one_of(LEARNING_RATE_SHAPES)]


class ConfigKeys(BaseModel):
    """The keys by themselves; `Config` adds the checks across keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    # The run.
    run_name: FolderName = "default"
    output_dir: Name = "runs"
    steps: PositiveInt = 200
    log_period: PositiveInt = 1
    max_minutes: Minutes = 0.0

    # The model.
    model_name: Name = "llama-tiny"
    decoder_block: DecoderBlock = "llama"
    base_emb_dim: PositiveInt = 64
    base_num_decoder_layers: NumLayers = 8
    base_num_query_heads: PositiveInt = 4
    base_num_kv_heads: PositiveInt = 2
    base_mlp_dim: PositiveInt = 192
    head_dim: PositiveInt = 16
    vocab_size: PositiveInt = 320
    normalization_layer_epsilon: PositiveFloat = 1e-5
    rope_max_timescale: PositiveFloat = 10000.0
    rope_type: Literal["default", "llama3.1", "yarn"] = "default"
    llama31_rope_factor: PositiveFloat = 8.0
    logits_via_embedding: bool = True
    use_qk_norm: bool = False
    query_pre_attn_scalar: PositiveInt = 16
    sliding_window_size: PositiveInt = 16
    sliding_window_pattern: PositiveInt = 6
    local_rope_max_timescale: PositiveFloat = 10000.0
    rope_linear_scaling_factor: PositiveFloat = 1.0
    chunk_attn_window_size: PositiveInt = 8192
    nope_layer_interval: PositiveInt = 4
    temperature_tuning: bool = False
    dropout_rate: FractionBelowOne = 0.0
    dtype: FloatType = "bfloat16"
    weight_dtype: FloatType = "float32"
    quantization: Literal["", "fp8"] = ""
    attention: Literal["auto", "dot_product", "splash", "cudnn", "pallas"] = "auto"
    num_vocab_tiling: PositiveInt = 1

    # Experts.
    base_moe_mlp_dim: PositiveInt = 64
    num_experts: PositiveInt = 1
    num_experts_per_tok: PositiveInt = 1
    load_balance_loss_weight: NonNegativeFloat = 0.0
    norm_topk_prob: bool = False
    interleave_moe_layer_step: PositiveInt = 1
    megablox: Literal["auto"] | bool = "auto"
    shard_exp_on_fsdp: bool = False

    # Experts and latent attention of DeepSeek.
    first_num_dense_layers: NonNegativeInt = 0
    shared_experts: NonNegativeInt = 0
    routed_score_func: Literal["softmax", "sigmoid"] = "softmax"
    routed_bias: bool = False
    routed_bias_update_rate: NonNegativeFloat = 1e-3
    routed_scaling_factor: PositiveFloat = 1.0
    n_routing_groups: PositiveInt = 1
    topk_routing_group: PositiveInt = 1
    group_score_experts: PositiveInt = 2
    q_lora_rank: NonNegativeInt = 0
    kv_lora_rank: PositiveInt = 32
    qk_nope_head_dim: PositiveInt = 16
    qk_rope_head_dim: PositiveInt = 8
    v_head_dim: PositiveInt = 16
    rope_factor: PositiveFloat = 40.0
    original_max_position_embeddings: PositiveInt = 4096
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 1.0

    # The data.
    dataset_type: Literal["synthetic", "mixture"] | SourceType = "synthetic"
    data_files: Paths = ("builtin:sonnets",)
    text_separator: Separator = "\n\n\n"
    text_field: Name = "text"
    token_dtype: TokenType = "uint16"
    token_eod: NonNegativeInt | None = None
    data_sources: Sources = ()
    tokenizer_path: Name = ""
    max_target_length: PositiveInt = 128
    per_device_batch_size: PositiveFloat = 8.0
    enable_data_shuffling: bool = True
    data_shuffle_seed: Seed = 0
    packing: bool = True
    eval_files: Paths = ()
    eval_data_sources: Sources = ()
    eval_split_fraction: FractionBelowOne = 0.0
    eval_split_seed: Seed = 0

    # The optimizer.
    optimizer: Name = "adamw"
    optimizer_arguments: Arguments = ()
    learning_rate: NonNegativeFloat = 1e-3
    learning_rate_schedule: LearningRateShape = "cosine"
    warmup_steps_fraction: FractionBelowOne = 0.1
    learning_rate_final_fraction: Fraction = 0.1
    learning_rate_schedule_steps: PositiveIntOrAuto = -1
    adam_b1: FractionBelowOne = 0.9
    adam_b2: FractionBelowOne = 0.95
    adam_eps: PositiveFloat = 1e-8
    adam_weight_decay: NonNegativeFloat = 0.1
    weight_decay_exclude: Paths = ()
    z_loss_multiplier: NonNegativeFloat = 0.0
    gradient_accumulation_steps: PositiveInt = 1
    gradient_clipping_threshold: NonNegativeFloat = 1.0
    max_gradient_norm: NonNegativeFloat = 0.0
    bad_step_policy: Literal["stop", "skip", "ignore"] = "stop"

    # Evaluation.
    eval_interval: NonNegativeInt = 0
    eval_steps: PositiveIntOrAuto = -1
    keep_best: NonNegativeInt = 0
    sample_prompt: Text = ""
    sample_max_tokens: PositiveInt = 64
    sample_temperature: NonNegativeFloat = 0.0

    # Chance.
    init_weights_seed: Seed = 0
    init_from: Name = ""
    enable_dropout: bool = True
    dropout_seed: Seed = 0

    # The pipeline.
    pipeline_engine: Literal["none", "circular", "scheduled", "mpmd"] = "circular"
    pipeline_schedule: Name = "auto"
    pipeline_layout: Name = ""
    pipeline_vocab_parallel: bool = False
    pipeline_parallel_layers: PositiveIntOrAuto = -1
    num_layers_per_pipeline_stage: PositiveInt = 1
    num_pipeline_repeats: PositiveIntOrAuto = -1
    num_pipeline_microbatches: PositiveIntOrAuto = -1
    num_pipeline_slices: PositiveIntOrAuto = -1
    pipeline_delay_activation_forwarding: bool = False
    pipeline_fsdp_ag_once: bool = False
    pipeline_fsdp_ag_per_repeat: bool = False
    pipeline_fsdp_ag_per_layer: bool = False
    scan_pipeline_iterations: bool = True
    scan_pipeline_repeats: bool = True
    scan_layers_per_stage: bool | PositiveInt = True
    enable_nnx: bool | None = None
    pure_nnx_decoder: bool = False
    set_remat_policy_on_pipeline_iterations: bool = True
    set_remat_policy_on_layers_per_stage: bool = False
    remat_policy: RematPolicy = "full"
    decoder_layer_input: Location = "device"
    query_proj: Location = "remat"
    key_proj: Location = "remat"
    value_proj: Location = "remat"
    context: Location = "remat"
    out_proj: Location = "remat"
    mlpwi_0: Location = "remat"
    mlpwi_1: Location = "remat"
    mlpwo: Location = "remat"
    mla_q: Location = "remat"
    mla_kv: Location = "remat"
    moe_mlpwi_0: Location = "remat"
    moe_mlpwi_1: Location = "remat"
    moe_mlpwo: Location = "remat"

    # The devices.
    ici_data_parallelism: PositiveIntOrAuto = 1
    ici_pipeline_parallelism: PositiveIntOrAuto = 1
    ici_fsdp_parallelism: PositiveIntOrAuto = -1
    ici_tensor_parallelism: PositiveIntOrAuto = 1
    ici_expert_parallelism: PositiveIntOrAuto = 1
    ici_context_parallelism: PositiveIntOrAuto = 1
    dcn_data_parallelism: PositiveInt = 1
    dcn_pipeline_parallelism: PositiveInt = 1
    dcn_fsdp_parallelism: PositiveInt = 1
    dcn_tensor_parallelism: PositiveInt = 1
    dcn_expert_parallelism: PositiveInt = 1
    dcn_context_parallelism: PositiveInt = 1
    logical_axis_rules: AxisRules | None = None
    shard_mode: Literal["auto", "explicit"] = "auto"
    shard_optimizer_over_data: bool = False
    reduce_dtype: FloatType = "float32"
    debug_sharding: bool = False
    compile_xla_flags: Name = ""
    compile_default_flags: Literal["all", "quick", "none"] = "all"
    emulate_devices: NumDevices = 0
    distributed: bool = False
    deterministic: bool = False
    step_timeout_minutes: Minutes = 30.0
    mpmd_timeout_seconds: Seconds = 300.0
    mpmd_trace_step: NonNegativeInt = 0

    # Checkpoints and reports.
    enable_checkpointing: bool = True
    checkpoint_period: PositiveInt = 100
    checkpoint_minutes: Minutes = 0.0
    async_checkpointing: bool = True
    max_to_keep: PositiveInt = 3
    begin_anew: bool = False
    allow_unverified: bool = False
    allow_data_change: bool = False
    allow_learning_rate_change: bool = False
    enable_tensorboard: bool = True
    trackers: Paths = ()
    tracker_project: Name = "jaxpipe"
    enable_wandb: bool = False
    peak_tflops_per_device: NonNegativeFloat = 0.0
    enable_progress_bar: Literal["auto"] | bool = "auto"
    profile_steps: Name = ""
    jax_cache_dir: Name = "auto"
