"""The config of a training run: its keys, and the checks across keys."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from pydantic import model_validator

from ..._input import short_repr
from ...autodiff.backward import TENSORS, saved_names
from ...data.sources import FIELD_READERS, SourceType
from ...engines import CONFIG_ENGINES, Engine, EngineOptions, usual_engine
from ..optim._factories import averages_weights, check_factory, unread_keys
from ..optim._optimizer import DECAY_SHAPES
from ._keys import GATHER_KEYS, OPTION_KEYS, ConfigKeys

_pipelines = attrgetter("pipelines")
_runs_schedules = attrgetter("runs_schedules")
_has_programs = attrgetter("program_per_rank")


def _option(name: str) -> Callable[[Engine], bool]:
    """Returns a function that says whether an engine has this argument of `jaxpipe.pipeline`."""
    return lambda engine: name in engine.options


_IS_READ_BY: dict[str, Callable[[Engine], bool]] = {
    "ici_pipeline_parallelism": _pipelines,
    "dcn_pipeline_parallelism": _pipelines,
    "pipeline_parallel_layers": _pipelines,
    "num_layers_per_pipeline_stage": _pipelines,
    "num_pipeline_repeats": _pipelines,
    "set_remat_policy_on_pipeline_iterations": _pipelines,
    "set_remat_policy_on_layers_per_stage": _pipelines,
    "pipeline_schedule": _runs_schedules,
    "pipeline_layout": _runs_schedules,
    "num_pipeline_slices": lambda engine: engine.sliced_stage is not None,
    "shard_mode": lambda engine: engine.pipelines and not engine.program_per_rank,
    "mpmd_timeout_seconds": _has_programs,
    "mpmd_trace_step": _has_programs,
    **dict.fromkeys(GATHER_KEYS.values(), _option("gather")),
    **{key: _option(name) for name, key in OPTION_KEYS.items()},
}
_ENGINES_BY_KEY = {
    key: tuple(name for name, engine in CONFIG_ENGINES.items() if is_read_by(engine))
    for key, is_read_by in _IS_READ_BY.items()
}
"""Keys that some engines do not read, with the engines that do."""


def unread_by_engines(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the keys that an engine does not read and whose value is no default, by its name."""
    given = [k for k in values if k in _IS_READ_BY and values[k] != Config.model_fields[k].default]
    return {
        name: tuple(key for key in given if name not in _ENGINES_BY_KEY[key])
        for name in CONFIG_ENGINES
    }


_FILES = get_args(SourceType)
_DATASET_TYPES_BY_KEY: dict[str, tuple[str, ...]] = {
    "data_files": _FILES,
    **FIELD_READERS,
    "data_sources": ("mixture",),
    "tokenizer_path": ("text", "jsonl", "parquet", "arrow", "mixture"),
    "eval_files": _FILES,
    "eval_data_sources": ("mixture",),
    "eval_split_fraction": (*_FILES, "mixture"),
}
"""Keys that some kinds of data do not read, with the values of `dataset_type` that do."""


def _decays_by_key(config: "Config") -> bool:
    """Returns whether the decay of weights is `adam_weight_decay`; a user's is not known."""
    if ":" in config.optimizer:
        return False
    unread = unread_keys(config.optimizer, dict(config.optimizer_arguments))
    return "adam_weight_decay" not in unread


class _Unread(NamedTuple):
    """Keys that nothing reads under a condition, and the words for it."""

    keys: tuple[str, ...]
    reason: str
    holds: Callable[["Config"], bool]


_UNREAD: tuple[_Unread, ...] = (
    _Unread(
        ("eval_files", "eval_data_sources", "eval_steps", "keep_best", "sample_prompt"),
        "`eval_interval` is 0",
        lambda config: not config.eval_interval,
    ),
    _Unread(
        ("sample_max_tokens", "sample_temperature"),
        "there is no `sample_prompt`",
        lambda config: not config.sample_prompt,
    ),
    _Unread(
        ("eval_split_seed",),
        "`eval_split_fraction` is 0",
        lambda config: not config.eval_split_fraction,
    ),
    _Unread(
        ("keep_best", "checkpoint_minutes"),
        "`enable_checkpointing` is false",
        lambda config: not config.enable_checkpointing,
    ),
    _Unread(("tracker_project",), "`trackers` is empty", lambda config: not config.tracker_names),
    _Unread(
        ("packing", "enable_data_shuffling"),
        "`dataset_type` is 'synthetic'",
        lambda config: config.dataset_type == "synthetic",
    ),
    _Unread(
        ("data_shuffle_seed",),
        "`enable_data_shuffling` is false",
        lambda config: not config.enable_data_shuffling and config.dataset_type != "synthetic",
    ),
    _Unread(
        ("dropout_seed",),
        "there is no dropout",
        lambda config: not config.active_dropout_rate,
    ),
    _Unread(
        ("init_weights_seed",),
        "`init_from` gives the first weights",
        lambda config: bool(config.init_from),
    ),
    _Unread(
        ("learning_rate_final_fraction",),
        "the shape of `learning_rate_schedule` has no end",
        lambda config: config.learning_rate_schedule not in DECAY_SHAPES,
    ),
    _Unread(
        ("weight_decay_exclude",),
        "`adam_weight_decay` is 0",
        lambda config: not config.adam_weight_decay and _decays_by_key(config),
    ),
    _Unread(
        ("llama31_rope_factor",),
        "`rope_type` is not `llama3.1`",
        lambda config: config.rope_type != "llama3.1",
    ),
    _Unread(
        ("max_gradient_norm",),
        "`bad_step_policy` is `ignore`",
        lambda config: config.bad_step_policy == "ignore",
    ),
    _Unread(
        ("routed_bias_update_rate",),
        "`routed_bias` is false",
        lambda config: not config.routed_bias,
    ),
    _Unread(
        ("group_score_experts",),
        "`n_routing_groups` is 1",
        lambda config: config.n_routing_groups == 1,
    ),
    _Unread(
        ("mpmd_trace_step",),
        "`steps` ends before it",
        lambda config: config.mpmd_trace_step > config.steps,
    ),
    _Unread(
        ("profile_steps",),
        "`steps` ends before them",
        lambda config: config.steps < min(parse_profile_steps(config.profile_steps), default=0),
    ),
)


class Config(ConfigKeys):
    """The config of one run, frozen and checked.

    `load_config` makes one from files and overrides, `Config(steps=3)` from keys alone. A
    `pydantic.ValidationError`, which is a `ValueError`, lists the keys that are wrong.

    Example:
        >>> Config(steps=3).learning_rate
        0.001
    """

    @property
    def engine(self) -> Engine:
        """Returns the engine that `pipeline_engine` names."""
        return CONFIG_ENGINES[self.pipeline_engine]

    @property
    def engine_options(self) -> EngineOptions:
        """Returns the options of the engine; those whose key has its default have theirs."""
        changed = {key: value for key, value, _ in changed_keys(self, OPTION_KEYS.values())}
        options = {name: changed[key] for name, key in OPTION_KEYS.items() if key in changed}
        return EngineOptions(**options)

    def scan_layers(self, tensor: int) -> bool | int:
        """Returns the layers of an iteration of a loop over layers, or whether they run in a loop.

        Between products that wait for sums over `tensor` shards few gathers are hidden, the less
        the more layers an iteration has. llama3.1-70b on 64 v5p, `fsdp` 32 and `tensor` 2: with
        sequence parallelism 21.6 s with four, 21.2 with two and 21.0 with one; without it a sum is
        hidden in part, and a step takes 22.8 s with four and 23.4 with one.
        """
        is_free = self.scan_layers_per_stage is True
        return (
            1 if is_free and self.sequence_parallel and tensor > 1 else self.scan_layers_per_stage
        )

    @property
    def active_dropout_rate(self) -> float:
        """Returns the share of activations that dropout sets to 0; 0 if it is not enabled."""
        return self.dropout_rate if self.enable_dropout else 0.0

    @property
    def num_schedule_steps(self) -> int:
        """Returns the number of steps of the learning rate's schedule, warmup included."""
        follows_run = self.learning_rate_schedule_steps == -1
        return self.steps if follows_run else self.learning_rate_schedule_steps

    @property
    def named_optimizer(self) -> dict[str, Any]:
        """Returns the optimizer's name and arguments, as a checkpoint has them in JSON."""
        named = {"name": self.optimizer, "arguments": dict(self.optimizer_arguments)}
        return json.loads(json.dumps(named))

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """Returns the names of all trackers, each once."""
        return tuple(dict.fromkeys((*(("wandb",) if self.enable_wandb else ()), *self.trackers)))

    @property
    def reads_text(self) -> bool:
        """Returns whether the data of the run are text, which `tokenizer_path` makes tokens of."""
        if self.dataset_type == "mixture":
            return any(source.type != "tokens" for source in self.data_sources)
        return self.dataset_type in _DATASET_TYPES_BY_KEY["tokenizer_path"]

    @model_validator(mode="before")
    @classmethod
    def _choose_engine(cls, values: Any) -> Any:
        """Chooses the engine of `jaxpipe.pipeline` for a schedule that is given without one."""
        schedule = values.get("pipeline_schedule") if isinstance(values, dict) else None
        if not isinstance(schedule, str) or schedule == "auto" or "pipeline_engine" in values:
            return values
        engine = usual_engine(schedule)
        chosen = {"pipeline_engine": engine.config_name}
        if not engine.runs_schedules:  # the schedule is that of the engine
            chosen["pipeline_schedule"] = "auto"
        return values | chosen

    @model_validator(mode="after")
    def _check_keys(self) -> "Config":
        if "://" in self.output_dir:
            raise ValueError(
                f"`output_dir` is {self.output_dir!r}, and runs are written to folders: mount the "
                "bucket, with gcsfuse for example, and give the folder it is mounted on."
            )
        self._check_unread_keys("pipeline_engine", _ENGINES_BY_KEY)
        self._check_unread_keys("dataset_type", _DATASET_TYPES_BY_KEY)
        self._check_unread_keys("remat_policy", dict.fromkeys(TENSORS, ("custom",)))
        self._check_optimizer()
        self._check_flax()
        self._check_layout()
        self._check_weight_gather()
        parse_xla_flags(self.compile_xla_flags)
        parse_profile_steps(self.profile_steps)
        if self.engine.program_per_rank:
            self._check_no_offload()
        if self.mpmd_trace_step and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"`mpmd_trace_step` is {self.mpmd_trace_step} and `gradient_accumulation_steps` "
                f"{self.gradient_accumulation_steps}, but a trace covers one loop over "
                "microbatches. Leave one of them out."
            )
        self._check_data()
        self._check_unread_under_conditions()
        self._check_evaluation()
        return self

    def _check_unread_keys(self, key: str, readers: Mapping[str, tuple[str, ...]]) -> None:
        """Checks that keys which the value of another key leaves unread have their defaults."""
        choice = getattr(self, key)
        for name, value, default in changed_keys(self, readers):
            if choice not in readers[name]:
                alternatives = f"`{key}=" + "` or `".join(readers[name]) + "`"
                raise ValueError(
                    f"`{key}` is {choice!r} and `{name}` is {value!r}, which it does not read. "
                    f"Leave it at {default!r}, or choose {alternatives}."
                )

    def _check_unread_under_conditions(self) -> None:
        for keys, reason, holds in _UNREAD:
            for name, value, default in changed_keys(self, keys):
                if holds(self):
                    raise ValueError(
                        f"`{name}` is {value!r} and {reason}, so nothing reads it. "
                        f"Leave it at {default!r}, or change that."
                    )

    def _check_optimizer(self) -> None:
        """Checks an optimizer of optax. A user's function is imported when a run is set up."""
        check_factory(self.optimizer, dict(self.optimizer_arguments))
        if ":" not in self.optimizer:
            check_optimizer_reads_keys(self)
        if self.optimizer == "adafactor" and self.engine.program_per_rank:
            raise ValueError(
                "`optimizer` is 'adafactor' and `pipeline_engine` 'mpmd', whose state of rows and "
                "columns is not put together for checkpoints. Choose `pipeline_engine=scheduled` "
                "or `circular`."
            )
        if averages_weights(self.optimizer) and self.eval_interval:
            raise ValueError(
                f"`optimizer` is {self.optimizer!r} and `eval_interval` {self.eval_interval}, but "
                "evaluation reads the weights that gradients are taken at, and this optimizer's "
                "are to be evaluated at an average of them. Leave `eval_interval` at 0."
            )

    def _check_data(self) -> None:
        key = "data_sources" if self.dataset_type == "mixture" else "data_files"
        if self.dataset_type != "synthetic" and not getattr(self, key):
            raise ValueError(
                f"`dataset_type` is {self.dataset_type!r} and `{key}` is empty. Give "
                + ("sources." if self.dataset_type == "mixture" else "files or folders.")
            )
        if self.dataset_type == "tokens" and self.token_eod is None:
            raise ValueError(
                "`dataset_type` is 'tokens' and `token_eod` is not set. Give the id that ends a "
                "document: 256 for bytes, 50256 for GPT-2's; `jaxpipe tokenize` prints it."
            )
        for k, source in enumerate(self.eval_data_sources):
            if source.weight != 1:
                raise ValueError(
                    f"`eval_data_sources[{k}].weight` is {source.weight:g}, which nothing reads: "
                    "evaluation reads every row once. Leave it out."
                )
        separate = self.eval_files or self.eval_data_sources
        if separate and self.eval_split_fraction:
            name = "eval_files" if self.eval_files else "eval_data_sources"
            raise ValueError(
                f"`{name}` is {separate!r} and `eval_split_fraction` {self.eval_split_fraction:g}. "
                "Evaluation reads files of its own, or documents that are held out: give one of "
                "the two."
            )

    def _check_evaluation(self) -> None:
        if self.eval_interval and self.dataset_type == "synthetic" and self.eval_steps == -1:
            raise ValueError(
                "`eval_interval` is not 0 and `eval_steps` -1, all batches, but synthetic data has "
                "no end. Give `eval_steps`."
            )
        if self.sample_prompt and not self.reads_text:
            raise ValueError(
                f"`sample_prompt` is {short_repr(self.sample_prompt)} and `dataset_type` "
                f"{self.dataset_type!r}, so nothing says which tokenizer the tokens are of. Leave "
                'the prompt at "", and sample the run by `jaxpipe sample --tokenizer`.'
            )

    def _check_layout(self) -> None:
        if self.pipeline_layout and (
            self.num_pipeline_repeats,
            self.num_layers_per_pipeline_stage,
        ) != (-1, 1):
            raise ValueError(
                f"`pipeline_layout` is {self.pipeline_layout!r}, which says how many stages and "
                "layers there are. Leave `num_pipeline_repeats` at -1 and "
                "`num_layers_per_pipeline_stage` at 1."
            )

    def _check_weight_gather(self) -> None:
        chosen = [key for key in GATHER_KEYS.values() if getattr(self, key)]
        if len(chosen) > 1:
            raise ValueError(
                f"`{'` and `'.join(chosen)}` are both true. Weights are gathered either once, per "
                "repeat or per layer: choose one."
            )

    def _check_flax(self) -> None:
        """Checks that the two keys of an NNX decoder agree."""
        if self.pure_nnx_decoder != (self.enable_nnx is True):
            raise ValueError(
                f"`pure_nnx_decoder` is {self.pure_nnx_decoder} and `enable_nnx` {self.enable_nnx}."
                " An NNX decoder is NNX throughout: give both as true, or neither."
            )

    def _check_no_offload(self) -> None:
        """Refuses offloading with MPMD: residuals between a rank's programs stay on the device."""
        locations = {tensor: getattr(self, tensor) for tensor in TENSORS}
        _, offloaded = saved_names(self.remat_policy, locations)
        if offloaded:
            raise ValueError(
                f"`pipeline_engine` is {self.pipeline_engine!r} and `remat_policy` "
                f"{self.remat_policy!r} offloads {', '.join(offloaded)}, but what its programs "
                "leave for each other stays on the device. Give a policy that saves tensors there, "
                "or choose another engine."
            )


def changed_keys(config: Config, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the value and the default of keys whose value is not the default."""
    for name in names:
        value, default = getattr(config, name), Config.model_fields[name].default
        if value != default:
            yield name, value, default


def check_optimizer_reads_keys(config: Config) -> None:
    """Checks that keys which the optimizer does not read have their defaults.

    A user's function is imported.
    """
    unread = unread_keys(config.optimizer, dict(config.optimizer_arguments))
    for name, value, default in changed_keys(config, unread):
        raise ValueError(
            f"`optimizer` is {config.optimizer!r} and `{name}` is {value!r}, which it does "
            f"not read. Leave it at {default!r}, or give what {config.optimizer} takes as "
            "`optimizer_arguments`."
        )


def parse_xla_flags(flags: str) -> dict[str, str]:
    """Returns XLA flags as the `compiler_options` of `jax.jit`; `--xla_a` alone means true.

    Example:
        >>> parse_xla_flags("--xla_a --xla_b=2")
        {'xla_a': 'True', 'xla_b': '2'}
    """
    options: dict[str, str] = {}
    for word in flags.split():
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or name in options:
            fault = "comes twice" if name in options else "is no flag"
            raise ValueError(
                f"`compile_xla_flags` is {flags!r}, in which {word!r} {fault}. Give flags such as "
                "--xla_a=true --xla_b=2, each once."
            )
        # So all backends take it; XLA:GPU and XLA:CPU do not take "true".
        options[name] = value.capitalize() if value.lower() in ("true", "false") else value
        if not equals:
            options[name] = "True"
    return options


def parse_profile_steps(text: str) -> range:
    """Parses the value of `profile_steps`.

    Example:
        >>> list(parse_profile_steps("10:12"))
        [10, 11, 12]
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"`profile_steps` is {text!r}. Give the first and the last step, such as '10:12'."
        )
    return range(first, last + 1)
