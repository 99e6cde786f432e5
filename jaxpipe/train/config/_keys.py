"""Every key of a training run: its name (MaxText's where MaxText has one), type, default, meaning.

`jaxpipe train --keys` prints them.
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


class _Section(BaseModel):
    """Keys of one section, each with its default and, below, its meaning."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class RunSection(_Section):
    """The run."""

    run_name: FolderName = "default"
    """One folder inside `output_dir`, for this run; the same name again resumes it."""
    output_dir: Name = "runs"
    """The folder of all runs."""
    steps: PositiveInt = 200
    """Optimizer steps of the whole run."""
    log_period: PositiveInt = 1
    """Steps between two printed lines."""
    max_minutes: Minutes = 0.0
    """Stop so long after the first step began, with a checkpoint; 0: no limit."""


class ModelSection(_Section):
    """The model."""

    model_name: Name = "llama-tiny"
    """The preset whose values replace the defaults of this section."""
    decoder_block: DecoderBlock = "llama"
    """The family, such as llama, mistral, qwen3 or gemma3; with experts mixtral, qwen3_moe,
    gpt_oss, llama4 or deepseek."""
    base_emb_dim: PositiveInt = 64
    """Width of the residual stream."""
    base_num_decoder_layers: NumLayers = 8
    """Layers of the whole model."""
    base_num_query_heads: PositiveInt = 4
    """Attention heads."""
    base_num_kv_heads: PositiveInt = 2
    """Heads of keys and values; must divide `base_num_query_heads`; not deepseek."""
    base_mlp_dim: PositiveInt = 192
    """Hidden width of the feed-forward block."""
    head_dim: PositiveInt = 16
    """Width of one attention head; even; not deepseek."""
    vocab_size: PositiveInt = 320
    """Rows of the embedding; at least the tokenizer's vocabulary (257 for bytes)."""
    normalization_layer_epsilon: PositiveFloat = 1e-5
    """Added to the mean square in RMS norms."""
    rope_max_timescale: PositiveFloat = 10000.0
    """Longest wavelength of rotary embeddings, in units of 2 pi tokens."""
    rope_type: Literal["default", "llama3.1", "yarn"] = "default"
    """default; llama3.1: wavelengths beyond 8192 tokens are stretched; yarn: in deepseek and
    gpt_oss."""
    llama31_rope_factor: PositiveFloat = 8.0
    """With llama3.1, the factor by which long wavelengths are stretched: 8 in Llama 3.1, 32 in
    3.2."""
    logits_via_embedding: bool = True
    """Use the embedding as output projection too; not deepseek."""
    use_qk_norm: bool = False
    """Normalize every head of queries and keys: true in qwen3, qwen3_moe, gemma3; llama4: in layers
    with rotary positions."""
    query_pre_attn_scalar: PositiveInt = 16
    """In gemma3, the number by whose square root scores are divided."""
    sliding_window_size: PositiveInt = 16
    """In gemma3 and gpt_oss, the tokens that local layers see back to."""
    sliding_window_pattern: PositiveInt = 6
    """In gemma3, one layer in so many is global, the last of them."""
    local_rope_max_timescale: PositiveFloat = 10000.0
    """In gemma3, `rope_max_timescale` of local layers."""
    rope_linear_scaling_factor: PositiveFloat = 1.0
    """In gemma3, the factor by which the wavelengths of global layers are stretched."""
    chunk_attn_window_size: PositiveInt = 8192
    """In llama4, the tokens of a chunk, within which layers attend."""
    nope_layer_interval: PositiveInt = 4
    """In llama4, one layer in so many attends to all tokens, without rotary positions."""
    temperature_tuning: bool = False
    """In llama4, scores of layers without rotary positions grow with the logarithm of the
    position."""
    dropout_rate: FractionBelowOne = 0.0
    """Share of activations dropped."""
    dtype: FloatType = "bfloat16"
    """The dtype of activations: bfloat16 or float32."""
    weight_dtype: FloatType = "float32"
    """The dtype of weights, gradients and optimizer state: bfloat16 or float32."""
    quantization: Literal["", "fp8"] = ""
    """The dtype of matrix products in attention and dense MLPs: fp8, or "" for `dtype`."""
    attention: Literal["auto", "dot_product", "splash", "cudnn", "pallas"] = "auto"
    """dot_product, splash (TPU), cudnn or pallas (GPU), or auto: the fastest that runs."""
    num_vocab_tiling: PositiveInt = 1
    """Chunks of the tokens, one after the other in the loss: fewer logits at a time."""


class ExpertSection(_Section):
    """Experts: decoder_block mixtral, qwen3_moe, gpt_oss, llama4 and deepseek."""

    base_moe_mlp_dim: PositiveInt = 64
    """Hidden width of one expert; where all layers have experts `base_mlp_dim` must be the same."""
    num_experts: PositiveInt = 1
    """Experts of which a router chooses."""
    num_experts_per_tok: PositiveInt = 1
    """Experts that a token is sent to."""
    load_balance_loss_weight: NonNegativeFloat = 0.0
    """Factor of each layer's loss from an uneven load."""
    norm_topk_prob: bool = False
    """Make the shares of a token's experts sum to 1: true in mixtral, gpt_oss."""
    interleave_moe_layer_step: PositiveInt = 1
    """In llama4, one layer in so many has experts; a layer of the pipeline is as many layers."""
    megablox: Literal["auto"] | bool = "auto"
    """Grouped matmul: true (a Pallas kernel, on TPUs and GPUs), false (XLA's ragged dot), or auto:
    the kernel where there is one."""
    shard_exp_on_fsdp: bool = False
    """Store whole experts on each device of fsdp, not a slice of every expert: for large fsdp."""


class DeepseekSection(_Section):
    """Experts and latent attention: decoder_block deepseek; YaRN also gpt_oss."""

    first_num_dense_layers: NonNegativeInt = 0
    """Layers without experts, before the others and before the pipeline."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token goes to."""
    routed_score_func: Literal["softmax", "sigmoid"] = "softmax"
    """The function from router logits to scores: softmax or sigmoid."""
    routed_bias: bool = False
    """A bias per expert, moved against its load, steers the choice."""
    routed_bias_update_rate: NonNegativeFloat = 1e-3
    """The change of an expert's bias in a step."""
    routed_scaling_factor: PositiveFloat = 1.0
    """What the chosen experts' shares are multiplied by in the end."""
    n_routing_groups: PositiveInt = 1
    """Groups of neighbouring experts; 1: none."""
    topk_routing_group: PositiveInt = 1
    """Groups that a token may choose from."""
    group_score_experts: PositiveInt = 2
    """By how many of its best experts a group is ranked: 1 in V2, 2 in V3."""
    q_lora_rank: NonNegativeInt = 0
    """Width of compressed queries; 0: not compressed."""
    kv_lora_rank: PositiveInt = 32
    """Width of compressed keys and values."""
    qk_nope_head_dim: PositiveInt = 16
    """Channels of a query and key head without position."""
    qk_rope_head_dim: PositiveInt = 8
    """Channels of a query and key head with position; even."""
    v_head_dim: PositiveInt = 16
    """Channels of a value head."""
    rope_factor: PositiveFloat = 40.0
    """With yarn, the factor by which sequences may be longer than
    `original_max_position_embeddings`."""
    original_max_position_embeddings: PositiveInt = 4096
    """With yarn, the tokens of the trained length."""
    beta_fast: PositiveFloat = 32.0
    """With yarn, channels that turn more often within it stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """With yarn, channels that turn less often are stretched in full."""
    mscale: NonNegativeFloat = 1.0
    """With yarn in deepseek, how much sharper attention becomes with `rope_factor`."""


class DataSection(_Section):
    """The data."""

    dataset_type: Literal["synthetic", "mixture"] | SourceType = "synthetic"
    """What is read: synthetic (random tokens); text; jsonl (an object a line); parquet; arrow (IPC
    files and streams, Feather); tokens (ids without text, as `jaxpipe tokenize` writes them);
    mixture (several of these)."""
    data_files: Paths = ("builtin:sonnets",)
    """One or a list of files, folders (all such files inside), builtins."""
    text_separator: Separator = "\n\n\n"
    """In text, the separator of two documents of a file; "": each file is one document."""
    text_field: Name = "text"
    """In jsonl, parquet and arrow, the field or column that holds a document."""
    token_dtype: TokenType = "uint16"
    """In tokens, the dtype of .bin files, little-endian: uint8, uint16, uint32, int32, int64."""
    token_eod: NonNegativeInt | None = None
    """In tokens, the id that ends each document."""
    data_sources: Sources = ()
    """In a mixture: [{type: jsonl, files: a.jsonl, weight: 0.7}, ...], with the keys above."""
    tokenizer_path: Name = ""
    """A Hugging Face tokenizer.json, a sentencepiece .model; "" for bytes."""
    max_target_length: PositiveInt = 128
    """Tokens in a row."""
    per_device_batch_size: PositiveFloat = 8.0
    """Rows per device and call of the engine; may be a fraction if the total is whole."""
    enable_data_shuffling: bool = True
    """A new order of rows every epoch."""
    data_shuffle_seed: Seed = 0
    """The seed of the order of rows, and of synthetic tokens."""
    packing: bool = True
    """Fill rows with several documents; false: one document a row, cut or padded."""
    eval_files: Paths = ()
    """What evaluation reads, as `data_files`; training does not."""
    eval_data_sources: Sources = ()
    """What evaluation reads in a mixture, as `data_sources`; weights are not read."""
    eval_split_fraction: FractionBelowOne = 0.0
    """Share of the documents that only evaluation reads."""
    eval_split_seed: Seed = 0
    """The seed that chooses the documents of `eval_split_fraction`."""


class OptimizerSection(_Section):
    """The optimizer (linear warmup, then down)."""

    optimizer: Name = "adamw"
    """One of optax by name, as adamw, muon, adafactor, lion, sgd; or module:function of yours."""
    optimizer_arguments: Arguments = ()
    """Arguments of the optimizer's factory: {momentum: 0.9}; without those that other keys give."""
    learning_rate: NonNegativeFloat = 1e-3
    """The peak of the learning rate."""
    learning_rate_schedule: LearningRateShape = "cosine"
    """The shape after the peak: cosine, linear, constant, inverse_sqrt, or wsd."""
    warmup_steps_fraction: FractionBelowOne = 0.1
    """Share of the schedule spent rising to the peak."""
    learning_rate_final_fraction: Fraction = 0.1
    """Share of the peak left when the schedule ends."""
    learning_rate_schedule_steps: PositiveIntOrAuto = -1
    """Length of the schedule; -1: `steps`."""
    adam_b1: FractionBelowOne = 0.9
    """In adamw, and what muon leaves to it, the decay of the mean of gradients."""
    adam_b2: FractionBelowOne = 0.95
    """In adamw, and what muon leaves to it, the decay of the mean of squared gradients."""
    adam_eps: PositiveFloat = 1e-8
    """In adamw, and what muon leaves to it, the number that is added to the root in the
    denominator."""
    adam_weight_decay: NonNegativeFloat = 0.1
    """The decay in adamw, muon, lion and others with a mask: of matrices only."""
    weight_decay_exclude: Paths = ()
    """Regular expressions; what they find in a matrix's name does not decay."""
    z_loss_multiplier: NonNegativeFloat = 0.0
    """The factor in the loss of the mean squared logarithm of softmax's denominator."""
    gradient_accumulation_steps: PositiveInt = 1
    """Calls of the engine in a step, each with all its microbatches."""
    gradient_clipping_threshold: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
    max_gradient_norm: NonNegativeFloat = 0.0
    """A step whose gradients have a larger norm is bad, as one with NaN; 0: any."""
    bad_step_policy: Literal["stop", "skip", "ignore"] = "stop"
    """Stop the run, skip what the step would change, or ignore it."""


class EvaluationSection(_Section):
    """Evaluation."""

    eval_interval: NonNegativeInt = 0
    """Steps between two evaluations, forward only; one more after the last step; 0: none."""
    eval_steps: PositiveIntOrAuto = -1
    """Batches of an evaluation; -1: all there are."""
    keep_best: NonNegativeInt = 0
    """Checkpoints with the least `eval_loss` that stay, beside the newest `max_to_keep`."""
    sample_prompt: Text = ""
    """Each evaluation prints how the model continues this text; "": it prints none."""
    sample_max_tokens: PositiveInt = 64
    """The most tokens that follow `sample_prompt`."""
    sample_temperature: NonNegativeFloat = 0.0
    """What logits are divided by before a token is drawn; 0: the likeliest."""


class SeedSection(_Section):
    """Chance."""

    init_weights_seed: Seed = 0
    """The seed of the first weights."""
    init_from: Name = ""
    """A folder from which the first weights are read: of a run, or of `jaxpipe convert`; "": made
    from the seed."""
    enable_dropout: bool = True
    """If false, there is no dropout even if `dropout_rate` is not 0."""
    dropout_seed: Seed = 0
    """The seed of dropout masks."""


class PipelineSection(_Section):
    """The pipeline."""

    pipeline_engine: Literal["none", "circular", "scheduled", "mpmd"] = "circular"
    """circular; scheduled or mpmd, which run any schedule; or none. If only `pipeline_schedule` is
    given, the engine of one program that runs it."""
    pipeline_schedule: Name = "auto"
    """In scheduled and mpmd, a name of `jaxpipe schedule list`, a CSV, or auto: by costs."""
    pipeline_layout: Name = ""
    """In scheduled and mpmd, layers per stage, as in Et*3|t*4|t*4|t*3L; "": as even as possible."""
    pipeline_vocab_parallel: bool = False
    """In circular and scheduled, all ranks compute logits and loss, a slice of the vocabulary
    each."""
    pipeline_parallel_layers: PositiveIntOrAuto = -1
    """Layers in stages; the others run after the pipeline; -1: all but dense ones."""
    num_layers_per_pipeline_stage: PositiveInt = 1
    """Consecutive layers in one stage."""
    num_pipeline_repeats: PositiveIntOrAuto = -1
    """Stages per rank; -1: as many as the layers give."""
    num_pipeline_microbatches: PositiveIntOrAuto = -1
    """Microbatches of a call; -1: one per rank, two with delay."""
    num_pipeline_slices: PositiveIntOrAuto = -1
    """Slices of each sequence, for seq1f1b; -1: 2 with it, else 1."""
    pipeline_delay_activation_forwarding: bool = False
    """Hand on one tick later, to overlap with compute."""
    pipeline_fsdp_ag_once: bool = False
    """Gather weights that are sharded over fsdp once per step, not in every tick."""
    pipeline_fsdp_ag_per_repeat: bool = False
    """Gather weights that are sharded over fsdp once per repeat, or visit of a stage, one ahead."""
    pipeline_fsdp_ag_per_layer: bool = False
    """Gather a layer's weights when it runs, and again in its backward. This is the default of
    stages with several layers."""
    scan_pipeline_iterations: bool = True
    """The ticks of a repeat are a loop; false writes them out."""
    scan_pipeline_repeats: bool = True
    """Repeats are a loop of the program; false writes them out."""
    scan_layers_per_stage: bool | PositiveInt = True
    """Layers of a stage are a loop; false writes them out; 2: two in an iteration."""
    enable_nnx: bool | None = None
    """Decoder of Flax modules: true (NNX), false (Linen); null: the model's functions."""
    pure_nnx_decoder: bool = False
    """True exactly if `enable_nnx` is."""
    set_remat_policy_on_pipeline_iterations: bool = True
    """`remat_policy` decides what is kept of a tick."""
    set_remat_policy_on_layers_per_stage: bool = False
    """`remat_policy` decides what is kept of each layer inside a stage."""
    remat_policy: RematPolicy = "full"
    """What is kept for the backward; the rest is computed again. From fast and large to slow and
    small: none (keep everything), minimal_with_context, minimal, save_dot_with_context_except_mlp,
    save_dot_except_mlpwi, save_dot_except_mlp, save_qkv_proj, save_out_proj, full (keep the input);
    in the host's memory: minimal_offloaded, qkv_proj_offloaded; custom: as the tensors below
    say."""
    decoder_layer_input: Location = "device"
    """The input of a layer. With `remat_policy=custom`, each tensor: remat (compute again), device
    (keep) or offload (keep, in host memory)."""
    query_proj: Location = "remat"
    """Queries, as attention takes them."""
    key_proj: Location = "remat"
    """Keys, as attention takes them."""
    value_proj: Location = "remat"
    """Values, as attention takes them."""
    context: Location = "remat"
    """What attention returns, before the output projection."""
    out_proj: Location = "remat"
    """The output projection of attention."""
    mlpwi_0: Location = "remat"
    """The gate of an MLP, or of the experts for every token."""
    mlpwi_1: Location = "remat"
    """The factor that the gate of an MLP is multiplied with."""
    mlpwo: Location = "remat"
    """What an MLP adds."""
    mla_q: Location = "remat"
    """Compressed queries of latent attention."""
    mla_kv: Location = "remat"
    """Compressed keys and values of latent attention."""
    moe_mlpwi_0: Location = "remat"
    """The gates of routed experts."""
    moe_mlpwi_1: Location = "remat"
    """The factors that the gates of routed experts are multiplied with."""
    moe_mlpwo: Location = "remat"
    """What routed experts return."""


class DeviceSection(_Section):
    """The devices: sizes of the mesh axes inside a slice (ici) and across slices (dcn)."""

    ici_data_parallelism: PositiveIntOrAuto = 1
    """Copies of the weights."""
    ici_pipeline_parallelism: PositiveIntOrAuto = 1
    """Ranks of the pipeline, mesh axis `stage`."""
    ici_fsdp_parallelism: PositiveIntOrAuto = -1
    """Shards of weights and batch. One ici size may be -1: it takes the devices that the others
    leave."""
    ici_tensor_parallelism: PositiveIntOrAuto = 1
    """Shards of heads and hidden widths."""
    ici_expert_parallelism: PositiveIntOrAuto = 1
    """Shards of experts."""
    ici_context_parallelism: PositiveIntOrAuto = 1
    """Shards of the sequence."""
    sequence_parallel: bool = False
    """The axis tensor also divides the tokens between matrix products, for less memory."""
    dcn_data_parallelism: PositiveInt = 1
    """Copies of the weights."""
    dcn_pipeline_parallelism: PositiveInt = 1
    """Ranks of the pipeline."""
    dcn_fsdp_parallelism: PositiveInt = 1
    """Shards of weights and batch."""
    dcn_tensor_parallelism: PositiveInt = 1
    """Shards of heads and hidden widths."""
    dcn_expert_parallelism: PositiveInt = 1
    """Shards of experts."""
    dcn_context_parallelism: PositiveInt = 1
    """Shards of the sequence."""
    logical_axis_rules: AxisRules | None = None
    """[[logical axis, mesh axis or list or null], ...]; null: the default rules."""
    shard_mode: Literal["auto", "explicit"] = "auto"
    """auto, or explicit: data, stage and fsdp are part of every array's type."""
    shard_optimizer_over_data: bool = False
    """ZeRO-1: the state of the optimizer and the gradients are sharded over data too."""
    reduce_dtype: FloatType = "float32"
    """The dtype in which a pipeline sums layers' gradients over fsdp and data; bfloat16 halves the
    bytes."""
    debug_sharding: bool = False
    """Print how every weight is split."""
    compile_xla_flags: Name = ""
    """XLA's options for the step: --xla_a=true --xla_b=2."""
    compile_default_flags: Literal["all", "quick", "none"] = "all"
    """Which of jaxpipe's own flags: all, quick (compilation is no slower) or none."""
    emulate_devices: NumDevices = 0
    """Run every process on this many emulated CPU devices; 0: the real ones."""
    distributed: bool = False
    """The run has several processes, started by SLURM, Kubernetes, Open MPI or a TPU pod."""
    deterministic: bool = False
    """XLA takes only kernels that give the same bits in every run."""
    step_timeout_minutes: Minutes = 30.0
    """With several processes, the minutes without progress after which all end; 0: never."""
    mpmd_timeout_seconds: Seconds = 300.0
    """With several processes, the seconds without progress after which a step of mpmd fails."""
    mpmd_trace_step: NonNegativeInt = 0
    """Write what ran when in this step, and what the schedule predicts; 0: none."""


class ReportSection(_Section):
    """Checkpoints and reports."""

    enable_checkpointing: bool = True
    """Save, and resume from the newest checkpoint of this run."""
    checkpoint_period: PositiveInt = 100
    """Steps between two checkpoints."""
    checkpoint_minutes: Minutes = 0.0
    """The longest time without a checkpoint; 0: any."""
    async_checkpointing: bool = True
    """Write checkpoints while training goes on."""
    max_to_keep: PositiveInt = 3
    """Newest checkpoints kept."""
    begin_anew: bool = False
    """If all checkpoints are gone: begin at step 1, and keep the old metrics aside."""
    allow_unverified: bool = False
    """Go on also from a checkpoint without digests, or with edited metrics."""
    allow_data_change: bool = False
    """Go on also with other data, another batch or packing."""
    allow_learning_rate_change: bool = False
    """Go on also if the learning rate jumps because `steps` changed."""
    enable_tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    trackers: Paths = ()
    """Trackers that receive all metrics: wandb, mlflow, trackio, or module:function of yours."""
    tracker_project: Name = "jaxpipe"
    """The project or experiment in the trackers."""
    enable_wandb: bool = False
    """Tell wandb, as if `trackers` had it."""
    peak_tflops_per_device: NonNegativeFloat = 0.0
    """For `mfu`, in 1e12 operations a second; 0: as the device is known."""
    enable_progress_bar: Literal["auto"] | bool = "auto"
    """true, false, or auto: a bar on a terminal, lines elsewhere."""
    profile_steps: Name = ""
    """10:12 writes a profile of these steps into the run's folder, for xprof."""
    jax_cache_dir: Name = "auto"
    """Folder of compiled programs, for the next start; "": none; auto: the user's."""


class ConfigKeys(
    ReportSection,
    DeviceSection,
    PipelineSection,
    SeedSection,
    EvaluationSection,
    OptimizerSection,
    DataSection,
    DeepseekSection,
    ExpertSection,
    ModelSection,
    RunSection,
):
    """The keys by themselves; `Config` adds the checks across keys."""


SECTIONS: tuple[type[BaseModel], ...] = ConfigKeys.__bases__[::-1]
"""The sections in order: Pydantic takes fields from the last base first."""
