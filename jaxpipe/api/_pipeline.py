"""Makes the pipeline of a model: selects the engine, and builds and checks the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from .. import schedules
from ..autodiff import POLICIES, Remat, remat_by_name
from ..autodiff.backward import check_offload
from ..autodiff.staged_model import layers_per_iteration
from ..engines import (
    ENGINES,
    Engine,
    EngineOptions,
    PipelineSpec,
    When,
    check_gather,
    check_reduce_dtype,
    select_engine,
    usual_engine,
)
from ..schedules import Costs, Schedule, language
from ..schedules.builders import require_positive
from ..sharding import make_mesh, num_ranks_of
from ..sharding.layout import count_mtp_layers, layers_of_stages
from ._model import Model, cast_model, check_contributions, check_model, check_sliced
from ._pipelined_model import PipelinedModel
from ._rows import RowWise, check_row_wise
from ._sequences import check_sequences
from ._specs import SpecRule


def pipeline(
    model: Model,
    *,
    schedule: str | Schedule | None,
    mesh: Mesh | Mapping[str, int],
    microbatches: int,
    chunks: int | None = None,
    slices: int | None = None,
    sequence_dim: int | None = None,
    layers_per_stage: Sequence[int] | str | None = None,
    engine: str = "auto",
    remat: Remat | str | None = None,
    layer_remat: Remat | str | None = None,
    gather: When | None = None,
    zero1: bool = False,
    reduce_dtype: Any = None,
    forwarding_delay: bool = False,
    vocab_parallel: bool = False,
    accumulate: int = 1,
    compute_dtype: Any = None,
    compiler_options: Mapping[str, str | bool | int] | None = None,
    costs: Costs | None = None,
    scan_layers: bool | int | None = None,
    scan_repeats: bool = True,
    scan_ticks: bool = True,
    frozen: Callable[[str, Any], bool] | PyTree | None = None,
    param_specs: SpecRule | None = None,
    memory_cap: float | None = None,
    row_wise: RowWise = None,
) -> PipelinedModel:
    """Makes the pipeline of a model: its loss and gradients are those of the plain program.

    Args:
        model: A `Model` of plain functions, or one that `model` of `jaxpipe.linen`, `jaxpipe.nnx`
            or `jaxpipe.equinox` makes of a module.
        schedule: The name of a family (`jaxpipe schedule list`), a `Schedule`, "circular", or None
            for no pipeline. `jaxpipe.plan(...).pipeline()` chooses one.
        mesh: The mesh of all devices, or the sizes of its axes by name, over `jax.devices()`. Its
            axis `stage` has one rank for each of its S entries; the axes `data` and `fsdp` divide
            the rows of a microbatch, and `fsdp` also the parameters.
            The numbers are those of a mesh without these axes: a function that treats rows one by
            one runs on the rows of each device, all others on whole microbatches.
        microbatches: M, the number of pieces of a batch.
        chunks: Stages per rank, for families that have a choice. Default: 2, and 1 for "circular".
        slices: Pieces of each sequence, for families that have a choice, such as "seq1f1b". Layers
            must then take `past` (see `Model`). Default: 2.
        sequence_dim: `Model.sequence_dim`, for a model that does not say it, such as a module: the
            dim of tokens, which the axis `context` of the mesh divides.
        layers_per_stage: The number of layers of every stage in forward order, or a layout string
            such as "Et*3|t*4|t*3L". Layers of all kinds count, in the order in which they run; m is
            a layer of the last kind, "mtp". Default: as even as possible, by `Model.layer_costs`.
        engine: "unpipelined", "circular", "scheduled" (one program), "mpmd" (a program for each
            rank), or "auto": the first that can run the schedule.
        remat: The residuals that a stage stores: a wrapper of functions such as
            `jax.checkpoint`, or the name of a policy of `autodiff.remat_by_name` that saves named
            tensors, some of them in the host's memory. Default: "full", its input, and the rest is
            computed again; without a pipeline "none".
        layer_remat: The same for every layer, inside of what a stage stores. Default: "none".
        gather: When parameters that are sharded over `fsdp` are gathered: for every action of the
            schedule ("tick"), "once" in a step, once for all microbatches of a stage, ahead of them
            ("repeat"), or by every "layer" that reads them, which holds one layer at a time. Of one
            program; without a pipeline layers gather their own, and in programs of ranks XLA
            decides. Default: "tick" for stages of one layer; for others "layer", as a loop over
            layers begins when all that it reads are gathered, with nothing beside them.
        zero1: Whether gradients and the state of an optimizer are divided over `data` too, as
            ZeRO-1 does: updates are gathered, not parameters.
        reduce_dtype: `jnp.bfloat16` if one program rounds gradients of layers to it to sum them
            over `data` and `fsdp`, which halves the bytes. Each addition rounds, too
            (docs/speed-and-memory.md has errors). Not those that are stored whole where others are
            divided. Default: float32, or the dtype of wider parameters; without a pipeline the
            dtype in which layers compute.
        forwarding_delay: Whether the engine "circular" hands x over one tick late, so that
            communication runs beside a whole tick.
        vocab_parallel: Whether all ranks of one program compute the loss together, by
            `model.vocab_parallel_loss`. Otherwise the engine "circular" gives each rank M / S whole
            microbatches, and the rank of the last stage of "scheduled" computes all losses alone.
        accumulate: A: a batch is cut into A * M microbatches, which run M at a time. Gradients are
            summed.
        compute_dtype: The dtype, such as `jnp.bfloat16`, to which floating-point parameters are
            cast before they are gathered and a function of the model is given them. Gradients are
            summed in float32, and are in the dtype of the parameters. Or `path -> dtype or None`,
            where `path` is one from the groups on, without the number of a layer, such as
            `['layers']['up']`. Default: none.
        compiler_options: XLA's options for every program of `PipelinedModel.jit`, by name. Default:
            those that jaxpipe's table of flags has for the devices; `{}` for none.
        costs: The costs of actions, by which the engine "scheduled" chooses the tick of each.
            Default: F costs 1, and a whole backward 2.
        scan_layers: Whether the layers of a stage run in a `lax.scan`, which is compiled once; or
            the number of layers that each iteration runs, a divisor of the layers of a stage.
            Transfers of one layer then run beside the work of another. A single layer has no loop.
            Default: True. True is one layer, or up to four where, without a pipeline, gathers of
            weights take two steps.
        scan_repeats: Whether the repeats of the engine "circular" run in a `lax.scan`.
        scan_ticks: Whether its ticks run in a `lax.scan`.
        frozen: Which parameters are not trained: `(path, leaf) -> bool`, where `path` is such as
            `['layers'][0]['base']['up']`; or booleans in a tree that is a prefix of the user's
            tree. They get no gradients. Default: all are trained.
        param_specs: How parameters are sharded over axes such as `tensor` and `expert`: `(path,
            leaf) -> PartitionSpec` or None; or specs in a tree that is a prefix of the user's tree,
            as `nn.get_partition_spec` and `nnx.get_partition_spec` return it. The pipeline divides
            layers over `stage`: specs are for the dims of a leaf, and the dim of stacked layers is
            None. A leaf without a spec is divided over `fsdp`, unless it is a vector of up to a
            million elements; one with a spec only as it says. A dim that is divided over `fsdp` is
            whole where functions read it, also over other axes of the dim.
        memory_cap: The most microbatches that a rank may store for its backwards at a time, in
            microbatches of a whole rank as in `schedules.search`. The engine "scheduled", which
            runs some forwards earlier than the schedule has them, then does so only within the
            cap. Default: as many as make the step faster.
        row_wise: Whether functions treat rows one by one: booleans by name, "embed", "layer" or a
            kind of layers, "loss", and "output" for `apply`; or one for all. True is taken on
            trust: the function runs on the rows of a device, and a loss, auxiliary losses and
            metrics must be means over rows, or sums in a `Weighted`. Random numbers are then drawn
            for the rows of a device. With False functions are given whole microbatches. Default:
            what follows from the programs of the functions, as `PipelinedModel.rows` says.

    Returns:
        The pipeline.

    Raises:
        ValueError: If `model` is no `Model`, a name is unknown, the schedule does not take a count,
            the mesh has no axis `stage`, the engine cannot run the schedule, keep the cap or has no
            such option, the mesh lacks the axis of an option, the schedule has slices and the model
            none, or `row_wise` names no function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = Model(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     layer=lambda w, x, batch: jnp.tanh(x * w),
        ...     loss=lambda w, x, batch: (x * w).mean(),
        ... )
        >>> params = {"embed": jnp.ones(()), "layers": [jnp.ones(3)] * 4, "head": jnp.ones(3)}
        >>> mesh = jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1])
        >>> pipe = pipeline(model, schedule=None, mesh=mesh, microbatches=2)
        >>> loss, _ = pipe.value(pipe.shard(params), {"x": jnp.ones((4, 3))})
        >>> round(float(loss), 3)
        0.513
    """
    check_model(model)
    model = model if sequence_dim is None else replace(model, sequence_dim=sequence_dim)
    mesh = make_mesh(mesh) if isinstance(mesh, Mapping) else mesh
    num_ranks = num_ranks_of(mesh)
    require_positive(microbatches=microbatches, accumulate=accumulate)
    if scan_layers is not None and not isinstance(scan_layers, bool):
        require_positive(scan_layers=scan_layers)
    order = _schedule(schedule, num_ranks, microbatches, chunks, slices)
    selected = select_engine(engine, schedule)
    # Programs of ranks gather nothing themselves, so nothing but the functions could cast.
    unread_dtype = compute_dtype if selected.program_per_rank else None
    check_contributions(model, frozen=frozen, row_wise=row_wise, compute_dtype=unread_dtype)
    options = EngineOptions(
        zero1=zero1,
        reduce_dtype=reduce_dtype,
        forwarding_delay=forwarding_delay,
        vocab_parallel=vocab_parallel,
        scan_repeats=scan_repeats,
        scan_ticks=scan_ticks,
    )
    _check_options(selected, {"gather": gather, "costs": costs} | options.changed, mesh)
    if vocab_parallel and model.vocab_parallel_loss is None:
        raise ValueError(
            "`vocab_parallel` is True, and the model has no `vocab_parallel_loss` that ranks can "
            "compute together. Give `jp.Model(..., vocab_parallel_loss=...)`, or leave it out."
        )
    as_run, ticks = selected.prepare(order, num_ranks, microbatches, costs, memory_cap)
    num_slices = 1 if as_run is None else language.num_slices(as_run)
    check_sliced(model, num_slices)
    check_sequences(model, mesh, num_slices, has_specs=param_specs is not None)
    counts = None if layers_per_stage is None else layers_of_stages(layers_per_stage)
    num_mtp = count_mtp_layers(layers_per_stage) if isinstance(layers_per_stage, str) else None
    if counts and not isinstance(model.layer, Mapping):
        for count in counts if selected.program_per_rank else (max(counts),):
            layers_per_iteration(count, scan_layers)
    told = PipelineSpec(
        mesh=mesh,
        layout=selected.layout(as_run, num_ranks, (1,) * (as_run.num_stages if as_run else 1)),
        num_microbatches=microbatches,
        schedule=as_run,
        ticks=ticks,
        remat=_remat("remat", remat or ("full" if selected.pipelines else "none"), mesh),
        layer_remat=_remat("layer_remat", layer_remat or "none", mesh),
        scan_layers=scan_layers,
        options=options._replace(reduce_dtype=check_reduce_dtype(reduce_dtype)),
        num_calls=accumulate,
        compiler_options=None if compiler_options is None else tuple(compiler_options.items()),
        compute_dtype=compute_dtype,
    )
    return PipelinedModel(
        cast_model(model, compute_dtype),
        selected,
        told,
        gather=gather,
        layers_per_stage=counts,
        frozen=frozen,
        num_mtp_layers=num_mtp,
        param_specs=param_specs,
        row_wise=tuple(check_row_wise(row_wise, model).items()),
    )


_AXES_OF_OPTIONS = {"zero1": "data", "gather": "fsdp"}
"""The mesh axis without which an option does nothing, by the name of the option."""


def _check_options(engine: Engine, options: dict[str, Any], mesh: Mesh) -> None:
    """Raises a `ValueError` for an option that the engine has not, or whose axis the mesh lacks."""
    for name, value in options.items():
        if value is None:
            continue
        if name not in engine.options:
            others = [repr(other.name) for other in ENGINES.values() if name in other.options]
            raise ValueError(
                f"`{name}` is {value!r}, and the engine {engine.name!r} has no such option. Leave "
                f"it out, or give `engine={' or '.join(others)}`."
            )
        axis = _AXES_OF_OPTIONS.get(name)
        if axis is not None and axis not in mesh.axis_names:
            axes = ", ".join(map(repr, mesh.axis_names))
            raise ValueError(
                f"`{name}` is {value!r}, and the mesh has no axis {axis!r}: its axes are {axes}. "
                f"Leave it out, or give the mesh an axis {axis!r}; its size may be 1."
            )
    check_gather(options["gather"])


def _remat(name: str, value: Remat | str, mesh: Mesh) -> Remat:
    """Returns a wrapper of functions, from a wrapper or the name of a policy."""
    if not isinstance(value, str):
        return value
    if value not in POLICIES:
        raise ValueError(f"`{name}` is {value!r}. Give one of {', '.join(POLICIES)}.")
    try:
        check_offload(value, {}, mesh.devices.flat)
        return remat_by_name(value)
    except ValueError as error:
        raise ValueError(f"`{name}` is {value!r}: {error}") from error


def _schedule(
    schedule: str | Schedule | None,
    num_ranks: int,
    num_microbatches: int,
    chunks: int | None,
    slices: int | None,
) -> Schedule | None:
    if not isinstance(schedule, str):
        for name, count in {"chunks": chunks, "slices": slices}.items():
            if count is not None:
                raise ValueError(
                    f"`{name}` is {count}, and `schedule` is "
                    f"{'None' if schedule is None else 'a `Schedule`, which says so itself'}. "
                    f"Leave `{name}` out, or give the name of a family that takes it."
                )
    if schedule is None:
        return None
    if schedule == "auto":
        raise ValueError(
            "`schedule` is 'auto', and a pipeline does not know its layers and rows before it has "
            "parameters. `jaxpipe.plan(model, 'here', params=params, example=batch, mesh={'stage': "
            f"{num_ranks}, ...}}, microbatches={num_microbatches}).pipeline()` is the fastest one."
        )
    if isinstance(schedule, str):
        own = usual_engine(schedule).own_schedule
        return schedules.build(
            schedule,
            ranks=num_ranks,
            microbatches=num_microbatches,
            chunks=own.default_chunks if own and chunks is None else chunks,
            slices=slices,
        )
    counts = schedules.num_ranks(schedule), schedule.num_microbatches
    if counts != (num_ranks, num_microbatches):
        raise ValueError(
            f"`schedule` is for {counts[0]} ranks and {counts[1]} microbatches, but the axis "
            f"'stage' of `mesh` has {num_ranks} and `microbatches` is {num_microbatches}."
        )
    return schedules.check(schedule)
