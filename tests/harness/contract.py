"""The exactness harness: every engine computes what `unpipelined` computes.

A row says which engine runs which model over which ranks, and which job tests it. The contract of
all rows is one function, `check_row`: loss, metrics and every gradient leaf within 1e-5 of the
reference, in float32. Later engines add rows and an entry in `ENGINES`; nothing else changes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe import models, mpmd, schedules, sharding, spmd
from jaxpipe.autodiff import StagedModel, remat_by_name, unpipelined
from jaxpipe.autodiff.staged_model import slice_sequences
from jaxpipe.kernels import dot_product_attention, sliced_dot_product_attention
from jaxpipe.models.layers import PROJECTIONS, routed_experts
from jaxpipe.models.weights import is_weight, stack_weights
from jaxpipe.mpmd.api import mpmd_value, mpmd_value_and_grad
from jaxpipe.schedules import lock_step
from jaxpipe.spmd import circular_engine, scheduled_engine
from small_models import (
    small_deepseek,
    small_gemma,
    small_gpt_oss,
    small_llama,
    small_llama4,
    small_mixture,
    stack,
)

from . import flax_decoder

TOLERANCE = 1e-5

MAPPINGS = 30_000
"""Linux lets a process have 65,530 (`vm.max_map_count`). Programs of XLA:CPU take some each, and
the process ends when none is left: after 45 rows and some random schedules, with jax 0.12."""


@dataclass(frozen=True)
class Row:
    """One case. `axes` are the sizes of the mesh axes beside `stage`; None is one device.

    `job` is `make test`, `make test-slow` or `make test-product`; no two rows differ in it alone.
    """

    engine: str
    model: str
    ranks: int
    repeats: int
    microbatches: int
    axes: tuple[tuple[str, int], ...] | None = None
    delay: bool = False
    tied: bool = False
    dropout: float = 0.0
    packed: bool = False
    quantization: str = ""
    layers_per_stage: int = 1
    gather: Literal["tick", "repeat", "once"] = "tick"
    batch_axes: tuple[str, ...] = ()
    scan_repeats: bool = True
    remat: str = "full"
    explicit: bool = False
    zero: bool = False
    schedule: str = ""
    vocab_parallel: bool = False
    z_loss: float = 0.0
    slices: int = 1
    job: Literal["test", "slow", "product"] = dataclasses.field(default="test", compare=False)

    def __str__(self) -> str:
        flags = [name for name in ("delay", "tied", "dropout", "packed") if getattr(self, name)]
        flags += [self.quantization] * bool(self.quantization)
        flags += ["explicit"] * self.explicit + ["zero"] * self.zero
        axes = "twin" if self.axes is None else "x".join(f"{a}{n}" for a, n in self.axes) or "mesh"
        sizes = f"S{self.ranks}-R{self.repeats}-M{self.microbatches}-L{self.layers_per_stage}"
        flags += ["shared"] * self.vocab_parallel + ["z_loss"] * bool(self.z_loss)
        flags += [self.gather] * (self.gather != "tick") + [f"{a}manual" for a in self.batch_axes]
        flags += ["unrolled"] * (not self.scan_repeats) + [self.remat] * (self.remat != "full")
        flags += [f"slices{self.slices}"] * (self.slices > 1)
        engine = [self.engine, *[self.schedule] * bool(self.schedule)]
        return "-".join([*engine, self.model, sizes, axes, *flags])


def parameters(rows: Iterable[Row]) -> list[Any]:
    """Returns the rows as parameters of a test, each with the mark of its job and only once."""
    marks = {"test": [], "slow": [pytest.mark.slow], "product": [pytest.mark.product]}
    return [pytest.param(row, marks=marks[row.job], id=str(row)) for row in dict.fromkeys(rows)]


def slow(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows as rows of `make test-slow`."""
    return [dataclasses.replace(row, job="slow") for row in rows]


@dataclass(frozen=True)
class Case:
    """A row made concrete: leaves of stages and keys are [R, S, ...]; `layer` is abstract."""

    model: StagedModel
    layer: Any
    weights: dict[str, Any]
    axes: dict[str, Any]
    batch_inputs: dict[str, jax.Array]
    keys: Any


def options_of(row: Row) -> spmd.EngineOptions:
    """Returns the options of a row that the engines of one program read."""
    return spmd.EngineOptions(
        forwarding_delay=row.delay,
        vocab_parallel=row.vocab_parallel,
        scan_repeats=row.scan_repeats,
    )


def circular(row: Row, case: Case) -> Any:
    mesh = mesh_of(row)
    weights = placed(case, mesh)

    def run(weights, batch_inputs, keys):
        return circular_engine.circular_value_and_grad(
            case.model,
            weights,
            batch_inputs,
            keys,
            mesh=mesh,
            remat=remat_by_name(row.remat, PLACES),
            gather=gather_of(row, case.axes["stages"], stacked=2),
            boundary_gather=gather_of(row, {name: case.axes[name] for name in ("embed", "head")}),
            options=options_of(row),
        )

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        value, grads = jax.jit(run)(weights, case.batch_inputs, case.keys)
    check_gradients_over_data(row, grads)
    return value, grads


def check_gradients_over_data(row: Row, grads: Any) -> None:
    """With ZeRO-1 gradients leave the engine sharded over the axis `data`."""
    if row.zero:
        assert "data" in str(grads["head"]["logits"].sharding.spec)
        assert "data" in str(jax.tree.leaves(grads["stages"])[0].sharding.spec)


def scheduled(row: Row, case: Case) -> Any:
    """The row's schedule; its repeats are chunks."""
    return run_ticks(row, case, ticks_of(row))


def run_ticks(row: Row, case: Case, ticks: lock_step.Ticks) -> Any:
    """Any ticks. Stages lie where the schedule has them, and are back in order in the result."""
    mesh = mesh_of(row)

    batch_inputs = slice_sequences(case.batch_inputs, row.slices, 2)

    def to_ranks(tree: Any) -> Any:
        return spmd.to_ranks(_flat(tree), ticks.schedule)

    def run(weights, batch_inputs, keys):
        value, grads = scheduled_engine.scheduled_value_and_grad(
            case.model,
            weights,
            batch_inputs,
            keys,
            ticks=ticks,
            mesh=mesh,
            remat=remat_by_name(row.remat, PLACES),
            gather=gather_of(row, case.axes["stages"], stacked=2),
            boundary_gather=gather_of(row, {name: case.axes[name] for name in ("embed", "head")}),
            options=options_of(row),
        )
        return value, grads

    stages = case.weights["stages"]
    moved = dataclasses.replace(case, weights=case.weights | {"stages": to_ranks(stages)})
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        value, grads = jax.jit(run)(placed(moved, mesh), batch_inputs, to_ranks(case.keys))
    check_gradients_over_data(row, grads)
    in_order = spmd.to_stages(jax.device_get(grads["stages"]), ticks.schedule)
    shaped = jax.tree.map(lambda g, w: g.reshape(w.shape), in_order, stages)
    return value, grads | {"stages": shaped}


def mpmd_one_process(row: Row, case: Case) -> Any:
    """The row's schedule as programs of every rank; its repeats are chunks."""
    return run_mpmd(row, case, schedule_of(row))


def run_mpmd(row: Row, case: Case, schedule: schedules.Schedule) -> Any:
    """Any schedule. Stages are taken apart, and their gradients stacked again."""
    value, grads = mpmd_result(row, case, schedule)
    grads = jax.tree.map(np.asarray, grads)
    stages = case.weights["stages"]
    stacked = jax.tree.map(lambda w, *g: np.stack(g).reshape(w.shape), stages, *grads["stages"])
    return jax.tree.map(np.asarray, value), grads | {"stages": stacked}


def mpmd_result(
    row: Row,
    case: Case,
    schedule: schedules.Schedule,
    *,
    value_alone: bool = False,
    **options: Any,
) -> Any:
    """Value and gradients as `MpmdArray`, `stages` a list of trees: of any number of processes."""
    mesh = mesh_of(dataclasses.replace(row, axes=row.axes or ()))
    apart = case.weights | {"stages": _unstacked(_flat(case.weights["stages"]))}

    def run(weights, batch_inputs, keys):
        if value_alone:
            return mpmd_value(case.model, weights, batch_inputs, keys, schedule=schedule)
        remat = remat_by_name(row.remat, PLACES)
        return mpmd_value_and_grad(
            case.model, weights, batch_inputs, keys, schedule=schedule, remat=remat
        )

    specs = None
    if row.axes:
        placed_as = sharding.named_shardings(case.weights, case.axes, mesh)
        of_stage = jax.tree.map(lambda s: P(*s.spec[2:]), placed_as["stages"])
        boundary = {n: jax.tree.map(lambda s: s.spec, placed_as[n]) for n in ("embed", "head")}
        specs = boundary | {"stages": [of_stage] * len(apart["stages"])}
    out_specs = None if specs is None or value_alone else (None, specs)
    groups = mpmd.MpmdMesh(mesh, "stage")
    step = mpmd.mpmd_jit_with_loop(
        run, groups, in_specs=(specs, None, None), out_specs=out_specs, **options
    )
    return step(apart, case.batch_inputs, _unstacked(_flat(case.keys)))


def check_mpmd_result(row: Row, result: Any) -> int:
    """Checks what this process has of a result, and returns how many leaves that is."""
    (value, grads), (true_value, true_grads) = result, reference(plain(row))
    stages = _unstacked(_flat(true_grads["stages"]))
    true = (true_value, true_grads | {"stages": stages})
    leaves = zip(
        jax.tree_util.tree_leaves_with_path((value, grads)), jax.tree.leaves(true), strict=True
    )
    mine = [(path, leaf, x) for (path, leaf), x in leaves if leaf.is_partially_addressable]
    for path, leaf, x in mine:
        assert_close(leaf, x, jax.tree_util.keystr(path))
    return len(mine)


def _unstacked(tree: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(tree)
    count = leaves[0].shape[0] if leaves else 0
    return [structure.unflatten([leaf[i] for leaf in leaves]) for i in range(count)]


def schedule_of(row: Row) -> schedules.Schedule:
    chunks = row.repeats if "chunks" in schedules.FAMILIES[row.schedule].takes else None
    return schedules.check(
        schedules.build(row.schedule, ranks=row.ranks, microbatches=row.microbatches, chunks=chunks)
    )


@functools.cache
def _ticks(
    name: str, ranks: int, microbatches: int, chunks: int | None, slices: int | None
) -> lock_step.Ticks:
    schedule = schedules.build(
        name, ranks=ranks, microbatches=microbatches, chunks=chunks, slices=slices
    )
    return lock_step.to_lock_step(schedules.check(schedule), schedules.Costs(1, 2, 1))


def ticks_of(row: Row) -> lock_step.Ticks:
    chunks = row.repeats if "chunks" in schedules.FAMILIES[row.schedule].takes else None
    slices = row.slices if "slices" in schedules.FAMILIES[row.schedule].takes else None
    return _ticks(row.schedule, row.ranks, row.microbatches, chunks, slices)


VALUE_AND_GRAD = functools.partial(jax.value_and_grad, has_aux=True)


def flax(value: Callable, row: Row, case: Case, derive: Callable = VALUE_AND_GRAD) -> Any:
    """The model's stage as a module of Linen or NNX, in the frontend's pipeline."""
    assert not row.dropout, "Flax draws other masks than the model's functions"
    assert not row.zero, "gradients of frontends lie as their weights do"
    mesh = mesh_of(row)
    boundary = {name: gather_of(row, {name: case.axes[name]}) for name in ("embed", "head")}
    config = SimpleNamespace(
        ici_pipeline_parallelism=row.ranks,
        num_pipeline_repeats=row.repeats,
        num_layers_per_pipeline_stage=row.layers_per_stage,
        num_pipeline_microbatches=row.microbatches,
        pipeline_delay_activation_forwarding=row.delay,
        pipeline_fsdp_ag_once=row.gather == "once",
        pipeline_fsdp_ag_per_repeat=row.gather == "repeat",
        pipeline_batch_axes=row.batch_axes,
        scan_pipeline_repeats=row.scan_repeats,
        remat_policy=row.remat,
        shard_mode="explicit" if row.explicit else "auto",
        **PLACES,
    )
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        more = ("target_weights",) if "moe" in case.layer else ()
        stage = stack_weights(case.layer, (row.layers_per_stage,), ("layers_per_stage",))
        decoder = flax_decoder.FlaxDecoder(
            case.model, stage, config, mesh, boundary, more, row.batch_axes
        )
        run = derive(value(decoder))
        return jax.jit(run)(placed(case, mesh), case.batch_inputs, case.keys)


def gather_of(row: Row, axes: Any, stacked: int = 0) -> spmd.Gather:
    """How the row gathers weights with these logical axes, of which some only stack."""
    if row.axes is None:
        return spmd.Gather(row.gather)
    logical = jax.tree.map(lambda a: a[stacked:], axes, is_leaf=lambda x: isinstance(x, tuple))
    rules = sharding.DEFAULT_RULES
    return spmd.gather_weights(
        logical,
        rules,
        when=row.gather,
        batch_axes=row.batch_axes,
        gradient_rules=also_over_data(rules) if row.zero else None,
    )


def also_over_data(rules: Any) -> Any:
    """Rules of gradients with ZeRO-1: what weights have over fsdp, they have over data too."""
    return [
        (name, (*axes, "data") if "fsdp" in axes and "activation" not in name else axes)
        for name, axes in rules
    ]


# For rows of `custom`: something in every place.
PLACES = {"decoder_layer_input": "device", "query_proj": "offload", "mlpwi_0": "device"}
ENGINES: dict[str, Callable[[Row, Case], Any]] = {
    "circular": circular,
    "scheduled": scheduled,
    "mpmd": mpmd_one_process,
    "linen": functools.partial(flax, flax_decoder.linen_value),
    "nnx": functools.partial(flax, flax_decoder.nnx_value),
}


def check_row(row: Row) -> None:
    """Runs a row and its reference; fails with the name of the first leaf that differs."""
    check_result(row, ENGINES[row.engine](row, make_case(row)))


def check_result(row: Row, result: Any) -> None:
    """What an engine returned for a row."""
    (loss, metrics), grads = result
    (true_loss, true_metrics), true_grads = reference(plain(row))
    assert_close(loss, true_loss, "loss")
    assert metrics.keys() == true_metrics.keys()
    for name in metrics:
        assert_close(metrics[name], true_metrics[name], f"metrics[{name!r}]")
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(true_grads), strict=True
    )
    for (path, leaf), true in leaves:
        assert leaf.dtype == true.dtype == jnp.float32
        assert_close(leaf, true, "grads" + jax.tree_util.keystr(path))
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > MAPPINGS:
        jax.clear_caches()


def plain(row: Row) -> Row:
    """The row's model, weights and batch without a pipeline: what many rows share."""
    return dataclasses.replace(
        row,
        engine="unpipelined",
        axes=None,
        delay=False,
        gather="tick",
        batch_axes=(),
        scan_repeats=True,
        explicit=False,
        zero=False,
        remat="full",
        schedule="",
        vocab_parallel=False,
    )


@functools.cache
def reference(row: Row) -> Any:
    """`unpipelined.value_and_grad`, for weights that lie as [R, S, ...]."""
    case = make_case(row)

    def run(weights, batch_inputs, keys):
        flat = weights | {"stages": _flat(weights["stages"])}
        value, grads = unpipelined.value_and_grad(case.model, flat, batch_inputs, _flat(keys))
        shaped = jax.tree.map(lambda g, w: g.reshape(w.shape), grads["stages"], weights["stages"])
        return value, grads | {"stages": shaped}

    return jax.device_get(jax.jit(run)(case.weights, case.batch_inputs, case.keys))


def _flat(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def assert_close(x: Any, true: Any, name: str) -> None:
    """The largest difference, relative to the largest true value of the leaf."""
    x, true = np.asarray(x), np.asarray(true)
    assert x.shape == true.shape, f"{name}: {x.shape} for {true.shape}"
    assert np.isfinite(true).all(), f"{name}: the reference is not finite"
    scale = np.max(np.abs(true))
    assert scale > 0, f"{name}: the reference is zero, so it proves nothing"
    error = np.max(np.abs(x - true)) / scale
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def make_case(row: Row) -> Case:
    """Weights, batch and keys for a row, the same for every engine."""
    tree, functions = MODELS[row.model](row)
    dims = (row.repeats, row.ranks, row.layers_per_stage)
    boundary = {name: tree[name] for name in ("embed", "head")}
    stages = stack_weights(tree["layer"], dims, ("circular_repeats", "stage", "layers"))
    axes = models.logical_axes(boundary | {"stages": stages})
    keys = ()
    if row.dropout:
        count = int(np.prod(dims))
        keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(count)).reshape(dims)
    if row.model in ("gemma3", "gpt_oss", "llama4"):
        kinds = np.array(_kinds_config(row).layer_kinds[: np.prod(dims)], np.int32)
        keys = keys, jnp.asarray(kinds.reshape(dims))
    offset = 1.0 if row.model == "gemma3" else 0.0
    epsilon = models.LlamaConfig.normalization_layer_epsilon
    vocab_parallel_loss = models.vocab_parallel_next_token_loss(
        epsilon, row.z_loss, norm_offset=offset
    )
    model = StagedModel(
        *functions,
        tied=row.tied,
        vocab_parallel_loss=vocab_parallel_loss,
        sliced_stage=functions[1] if row.slices > 1 else None,
    )
    return Case(model, tree["layer"], weights_of(plain(row)), axes, make_side(row), keys)


@functools.cache
def weights_of(row: Row) -> dict[str, Any]:
    """The weights at the start, the same in every layout."""
    tree, _ = MODELS[row.model](row)
    boundary = {name: tree[name] for name in ("embed", "head")}
    dims = (row.repeats, row.ranks, row.layers_per_stage)

    def make():
        layers = models.initialize_layers(tree["layer"], KEY, dims)
        return models.initialize(boundary, KEY) | {"stages": layers}

    return jax.jit(make)()


KEY = jax.random.key(7)
VOCAB, LENGTH, MICROBATCH = 32, 8, 4


def make_side(row: Row) -> dict[str, jax.Array]:
    """[M, b, T] leaves. Packed rows hold two documents and padding, unequal in every row."""
    rng = np.random.default_rng(0)
    length = LENGTH if LENGTH % row.slices == 0 else 3 * row.slices
    shape = (row.microbatches, MICROBATCH, length)
    tokens = rng.integers(0, VOCAB, (*shape[:2], length + 1))
    positions = np.broadcast_to(np.arange(length), shape)
    segments = np.ones(shape, int)
    mask = np.ones(shape)
    if row.packed:
        first = rng.integers(1, length - 2, shape[:2])[..., None]
        end = rng.integers(length - 2, length + 1, shape[:2])[..., None]
        steps = np.arange(length)
        segments = np.where(steps >= end, 0, np.where(steps >= first, 2, 1))
        positions = np.where(steps >= first, steps - first, steps)
        mask = (segments > 0) & (steps != first - 1)
    batch_inputs = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": positions,
        "segment_ids": segments,
    }
    batch_inputs = {name: jnp.asarray(x, jnp.int32) for name, x in batch_inputs.items()}
    return batch_inputs | {"target_weights": jnp.asarray(mask / mask.sum(), jnp.float32)}


def _mlp(row: Row):
    tree = models.mlp_weights(8, 16, VOCAB, tied=row.tied)
    return tree, models.mlp(dropout_rate=row.dropout)


def _llama(row: Row):
    """A llama, a Qwen3 or one of their mixtures, which have a layer after the pipeline."""
    has_experts = row.model in ("mixtral", "qwen3_moe")
    small = small_mixture if has_experts else small_llama
    config = small(
        base_num_decoder_layers=has_experts + row.repeats * row.ranks * row.layers_per_stage,
        logits_via_embedding=row.tied,
        use_qk_norm=row.model.startswith("qwen3"),
    )
    embed, layer, loss = models.llama(
        config,
        attention=dot_product_attention,
        experts=_experts(row),
        constrain=sharding.no_constraint if row.axes is None else sharding.Constrain(),
        dropout_rate=row.dropout,
        project=PROJECTIONS[row.quantization],
        z_loss_multiplier=row.z_loss,
    )
    tree = models.llama_weights(config, layers_after=int(has_experts))
    return tree, (embed, stack(layer), loss)


def _kinds_config(row: Row) -> models.LlamaConfig:
    has_layer_after = row.layers_per_stage > 1 and row.slices == 1
    num_layers = row.repeats * row.ranks * row.layers_per_stage + has_layer_after
    if row.model == "llama4":  # a layer of the pipeline is a block of two
        return small_llama4(
            base_num_decoder_layers=2 * num_layers,
            num_experts_per_tok=1 + row.packed,
            logits_via_embedding=row.tied,
        )
    if row.model == "gpt_oss":
        return small_gpt_oss(base_num_decoder_layers=num_layers, logits_via_embedding=row.tied)
    return small_gemma(
        base_num_decoder_layers=num_layers,
        logits_via_embedding=row.tied,
        sliding_window_pattern=3 if num_layers > 2 else 2,
    )


def _with_kinds(row: Row):
    """A Gemma 3, a gpt-oss or a Llama 4: local and global layers, maybe one after the pipeline."""
    config, rules = _kinds_config(row), sharding.DEFAULT_RULES
    embed, layer, loss = models.llama(
        config,
        attention=tuple(
            sliced_dot_product_attention(rules, scores) for scores in config.attention_scores
        ),
        experts=_experts(row),
        constrain=sharding.no_constraint if row.axes is None else sharding.Constrain(),
        dropout_rate=row.dropout,
        project=PROJECTIONS[row.quantization],
        z_loss_multiplier=row.z_loss,
    )
    num_stacked = row.repeats * row.ranks * row.layers_per_stage
    num_layers = config.num_blocks
    tree = models.llama_weights(config, layers_after=num_layers - num_stacked)
    # Branches as large as the stream, as at the start of a run, make so narrow a model so steep
    # that another last bit of the weights changes gradients by 5e-5. These are a quarter of it.
    quarter, normal = jax.nn.initializers.constant(-0.75), jax.nn.initializers.normal(0.3)

    def changed(path: Any, weight: models.Weight) -> models.Weight:
        is_behind = "post_" in jax.tree_util.keystr(path)
        init = normal if weight.is_bias else quarter if is_behind else weight.init
        return dataclasses.replace(weight, init=init)

    tree = jax.tree_util.tree_map_with_path(changed, tree, is_leaf=is_weight)
    return tree, (embed, stack(layer), loss)


def _experts(row: Row):
    return routed_experts(sharding.DEFAULT_RULES, chunk_rows=2 if row.remat == "full" else None)


def _deepseek(row: Row):
    """V3 in small: a dense layer before the pipeline, and a layer with experts after it."""
    config = small_deepseek(
        base_num_decoder_layers=2 + row.repeats * row.ranks * row.layers_per_stage
    )
    embed, layer, loss = models.deepseek(
        config,
        attention=dot_product_attention,
        experts=_experts(row),
        constrain=sharding.no_constraint if row.axes is None else sharding.Constrain(),
        dropout_rate=row.dropout,
        project=PROJECTIONS[row.quantization],
        z_loss_multiplier=row.z_loss,
    )
    return models.deepseek_weights(config, layers_after=1), (embed, stack(layer), loss)


MODELS: dict[str, Callable[[Row], Any]] = {
    "mlp": _mlp,
    **dict.fromkeys(("llama", "qwen3", "mixtral", "qwen3_moe"), _llama),
    **dict.fromkeys(("gemma3", "gpt_oss", "llama4"), _with_kinds),
    "deepseek": _deepseek,
}


def mesh_of(row: Row) -> Any:
    """The row's mesh over the first devices that it needs, or None."""
    if row.axes is None:
        return None
    sizes = dict(row.axes) | {"stage": row.ranks}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return sharding.make_mesh(sizes, devices=devices, explicit=row.explicit)


def placed(case: Case, mesh: Any) -> Any:
    """The weights, sharded over the mesh as the logical axis rules say."""
    if mesh is None:
        return case.weights
    return jax.device_put(case.weights, sharding.named_shardings(case.weights, case.axes, mesh))
