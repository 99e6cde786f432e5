"""What a config decides before anything compiles: devices, layout, shapes, and that they agree.

R repeats, S ranks, M microbatches of b rows, T tokens a row.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import models, sharding, spmd
from .._versions import splash_aborts_in_pipelines
from ..autodiff import Model
from ._config import Config
from ._data import global_batch_size
from ._remat import check_remat, remat_of_layers

STACKED = ("circular_repeats", "stage", "layers")
"""Logical axes of `Layout.dims`, in front of every weight of a layer."""


@dataclass(frozen=True)
class Setup:
    """One run, ready to be compiled.

    Attributes:
        config: Where everything comes from.
        llama: The model's sizes.
        mesh: All devices.
        rules: Logical axis rules.
        layout: How the layers lie on the ranks; one stage on one rank without a pipeline.
        num_microbatches: M.
        microbatch_size: b, over all devices.
    """

    config: Config
    llama: models.LlamaConfig
    mesh: Mesh
    rules: sharding.Rules
    layout: sharding.Layout
    num_microbatches: int
    microbatch_size: int

    @property
    def batch_size(self) -> int:
        """Rows of a step, over all devices."""
        return self.num_microbatches * self.microbatch_size

    @property
    def weight_tree(self) -> dict[str, Any]:
        """The abstract weights; leaves of `stages` are [R, S, layers per stage, ...]."""
        tree = models.llama_weights(self.llama, jnp.dtype(self.config.weight_dtype))
        stages = models.stacked(tree["layer"], self.layout.dims, STACKED)
        return {"embed": tree["embed"], "stages": stages, "head": tree["head"]}


def set_up(config: Config, devices: Sequence[Any]) -> Setup:
    """Checks a config against the devices and itself.

    Raises:
        ValueError: If sizes do not divide, do not suit the engine, or need other devices.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"There are {jax.process_count()} processes. The trainer runs in one process so far."
        )
    mesh = sharding.make_mesh(
        _parallelism(config, "ici"), _parallelism(config, "dcn"), devices=devices
    )
    num_ranks = mesh.shape["stage"]
    layout = _layout(config, num_ranks)
    num_microbatches = config.num_pipeline_microbatches
    if num_microbatches == -1:
        rounds = 2 if config.pipeline_delay_activation_forwarding else 1
        num_microbatches = rounds * num_ranks
    if config.pipeline_engine == "circular":
        spmd.check_circular(
            num_ranks,
            layout.num_repeats,
            num_microbatches,
            delay=config.pipeline_delay_activation_forwarding,
        )
    batch_size = global_batch_size(config.per_device_batch_size, len(devices))
    microbatch_size = sharding.divide(
        batch_size,
        num_microbatches,
        name="The batch (`per_device_batch_size` x devices)",
        into="`num_pipeline_microbatches`",
        fix="Change one of them.",
    )
    rules = sharding.with_rules(_axis_rules(config))
    llama = _llama_config(config)
    setup = Setup(config, llama, mesh, rules, layout, num_microbatches, microbatch_size)
    attention_kernel(setup)
    check_remat(config, mesh.devices.flat)
    sharding.divide(
        config.max_target_length,
        config.num_vocab_tiling * mesh.shape["context"],
        name="`max_target_length`",
        into="`num_vocab_tiling` x the shards of the sequence",
        fix="Change one of them.",
    )
    weights_shardings(setup)
    batch_shardings(setup)
    return setup


def build_model(setup: Setup) -> Model:
    """The three functions that the engines run."""
    config = setup.config
    attention = models.dot_product_attention
    if attention_kernel(setup) == "splash":
        attention = models.splash_attention(setup.rules)
    functions = models.llama(
        setup.llama,
        attention=attention,
        constrain=sharding.constrain_with(setup.rules),
        dtype=jnp.dtype(config.dtype),
        dropout_rate=config.dropout_rate if config.enable_dropout else 0.0,
        num_vocab_tiling=config.num_vocab_tiling,
        layer_remat=remat_of_layers(config),
    )
    return Model(*functions, tied=config.logits_via_embedding)


def attention_kernel(setup: Setup) -> str:
    """`splash` or `dot_product`: what the config says, or with `auto` splash where it runs."""
    config = setup.config
    if config.attention == "dot_product":
        return "dot_product"
    platform = setup.mesh.devices.flat[0].platform
    length = config.max_target_length
    problems = {
        f"the devices are {platform}s, not TPUs": platform != "tpu",
        f"`max_target_length` is {length}, not a multiple of 128": length % 128 != 0,
        "sequences are split over the axis 'context'": setup.mesh.shape["context"] > 1,
        f"jax {jax.__version__} cannot compile it in a pipeline (take 0.11 or newer, or set "
        "JAX_USE_SHARDY_PARTITIONER=false)": splash_aborts_in_pipelines(),
    }
    found = "; ".join(problem for problem, applies in problems.items() if applies)
    if config.attention == "splash" and found:
        raise ValueError(f"`attention` is 'splash', but {found}. Give 'auto' or 'dot_product'.")
    return "dot_product" if found else "splash"


def weights_shardings(setup: Setup) -> Any:
    """A sharding for every weight."""
    tree = setup.weight_tree
    named = partial(sharding.named_shardings, mesh=setup.mesh, rules=setup.rules)
    return named(models.shapes(tree), models.logical_axes(tree))


def batch_shardings(setup: Setup) -> Any:
    """A sharding for each array [M, b, T] of a batch."""
    shape = (setup.num_microbatches, setup.microbatch_size, setup.config.max_target_length)
    rows = {"microbatches": jax.ShapeDtypeStruct(shape, jnp.int32)}
    axes = {"microbatches": ("microbatches", "activation_batch", "activation_length")}
    where = sharding.named_shardings(rows, axes, setup.mesh, setup.rules)["microbatches"]
    names = ("tokens", "targets", "target_weights", "positions", "segment_ids")
    return dict.fromkeys(names, where)


def _parallelism(config: Config, kind: str) -> dict[str, int]:
    return {
        axis: getattr(config, f"{kind}_{'pipeline' if axis == 'stage' else axis}_parallelism")
        for axis in sharding.AXES
    }


def _layout(config: Config, num_ranks: int) -> sharding.Layout:
    if config.pipeline_engine == "none":
        return sharding.Layout(1, 1, config.base_num_decoder_layers)
    return sharding.layout(
        config.base_num_decoder_layers,
        num_ranks=num_ranks,
        layers_per_stage=config.num_layers_per_pipeline_stage,
        num_repeats=config.num_pipeline_repeats,
    )


def _axis_rules(config: Config) -> sharding.Rules:
    def as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return (axes,) if isinstance(axes, str) else axes or ()

    return tuple((name, as_tuple(axes)) for name, axes in config.logical_axis_rules or ())


def _llama_config(config: Config) -> models.LlamaConfig:
    names = [field.name for field in dataclasses.fields(models.LlamaConfig)]
    return models.LlamaConfig(**{name: getattr(config, name) for name in names})
