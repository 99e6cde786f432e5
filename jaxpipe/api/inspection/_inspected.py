"""What a pipelined model says about itself."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from ...engines import Engine, PipelineSpec, engine_of_any_schedule
from ...schedules import Costs, Schedule, Timeline, bubble_fraction, to_svg
from ...schedules.language import describe, num_slices
from ...schedules.lock_step import Ticks
from .._model import check_means
from ..optimizer import Optimizer, state_shapes

if TYPE_CHECKING:  # what a method needs is imported when it is called
    from ...xla.compile_report import CompileReport
    from ._comparison import Comparison
    from ._memory import MemoryTable


class InspectedModel:
    """The methods of `PipelinedModel` that compare, estimate and draw; the others are its own."""

    engine: Engine
    model: Any
    told: PipelineSpec
    layers_per_stage: tuple[int, ...] | None
    row_wise: tuple[tuple[str, bool], ...]
    last_rows: list[Any]
    shard: Callable[..., Any]
    unshard: Callable[..., Any]
    partition: Callable[..., Any]
    optimizer: Callable[..., Any]
    value_and_grad: Callable[..., Any]
    jit: Callable[..., Callable]
    plan: Callable[..., PipelineSpec]
    _arguments: Callable[..., Any]
    shapes: Callable[[PyTree], Any]
    _any_num_layers: Any
    takes_key: Any

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of all devices."""
        return self.told.mesh

    @property
    def num_microbatches(self) -> int:
        """Returns M, the microbatches of one call."""
        return self.told.num_microbatches

    @property
    def schedule(self) -> Schedule | None:
        """Returns the order of the actions of each rank; None without a pipeline."""
        return self.told.schedule

    @property
    def num_slices(self) -> int:
        """Number of slices of each sequence; 1 if the schedule has whole microbatches."""
        return 1 if self.schedule is None else num_slices(self.schedule)

    @property
    def ticks(self) -> Ticks | None:
        """Returns the schedule in lock-step; None if the engine does not run it so."""
        return self.told.ticks

    def check(
        self,
        params: PyTree,
        batch: PyTree,
        key: Array | None = None,
        *,
        plain: Callable[..., Any] | None = None,
        optimizer: Optimizer | None = None,
        steps: int = 3,
        tolerance: float | None = None,
    ) -> "Comparison":
        """Compares loss, metrics and every gradient with those of the user's own program.

        That is `embed`, every layer in order and `loss`, on the whole batch, in the user's tree;
        for a module of a library that has no dropout, the module's own call. It runs on one device,
        which needs memory for all parameters, gradients and activations of the batch: give a small
        batch, and a model that fits. With dropout and several microbatches, each of which has masks
        of its own, it is the same for the microbatches one by one.

        Args:
            batch: A tree of [B, ...] leaves, where B is a multiple of A * M.
            plain: The user's program, to be compared with in place of these: `(params, batch) ->
                loss` or `-> (loss, metrics)`, where `params` is the user's tree and the loss a
                scalar or `jp.Weighted`.
            optimizer: An optimizer of optax, or one alike. With it the parameters after some steps
                are compared too: those of `pipe.optimizer(optimizer)`, and those of `optimizer` on
                the user's tree.
            tolerance: The largest relative error that is accepted: the largest difference divided
                by the largest magnitude of the leaf. Default: by the narrowest dtype that the
                program computes with, or gradients are summed in: 1e-5 for float32, 1e-12 for
                float64; for 16 bits by their eps and the number of layers.

        Returns:
            The relative error of each leaf, which prints as a table.

        Raises:
            AssertionError: If an error is larger. It names the leaf and, where a function of the
                model is the cause, that function and what to write: one that mixes rows of the
                batch, or a loss that is no mean over rows.
            ValueError: If `plain` is given and the model has dropout.
        """
        from ._check import check, check_steps, checked_step

        check_means(self.model, "check")
        if plain is None and not self.takes_key and self.told.compute_dtype is None:
            plain = self.model.plain
        step = checked_step(self, params, batch, key, plain)
        comparison = check(step, tolerance)
        if optimizer is None:
            return comparison
        return check_steps(step, self.optimizer(optimizer), optimizer, steps, comparison)

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """Returns when each rank runs which action of `value_and_grad`, by the costs of stages.

        Engines of one program run in lock-step: a tick ends when the slowest rank is done with it.

        Args:
            costs: Times of the actions of every stage, and of transfers. Default: F, I and W of a
                stage take as long as it has layers by `layers_per_stage`; 1 without it.

        Returns:
            The timeline. `schedules.to_svg` draws it, and so do notebooks.
        """
        if costs is None:
            counts = self.layers_per_stage or 1
            costs = Costs(counts, counts, counts)
        return self.engine.timeline(self.plan(self._any_num_layers), costs)

    def memory(
        self, params: PyTree, batch: PyTree, device: str = "v5p", *, num_moments: int = 2
    ) -> "MemoryTable":
        """Estimates the memory of a train step from shapes: nothing is allocated or compiled.

        Args:
            params: The user's tree or parameters from `shard`; shapes and dtypes are enough.
            batch: [B, ...] leaves; shapes and dtypes are enough.
            device: The generation of the devices, such as "v5p", "v5e" or "h100".

        Returns:
            The bytes on one device of every rank at the peak of a step, by kind, which print as a
            table. `jaxpipe.plan` predicts the same; compilers differ by some 5% for large models.

        Raises:
            ValueError: If the device is unknown, or the batch does not divide.
        """
        check_means(self.model, "memory")
        from ._memory import memory_table

        key = _any_key() if self.takes_key else None
        return memory_table(self, params, batch, key, device, num_moments)

    def compile(
        self,
        params: PyTree,
        batch: PyTree,
        devices: str | None = None,
        *,
        optimizer: Optimizer | None = None,
    ) -> "CompileReport":
        """Compiles `value_and_grad` by the real compiler, also for devices that are not there.

        Args:
            params: The user's tree or parameters from `shard`; shapes and dtypes are enough.
            batch: [B, ...] leaves; shapes and dtypes are enough.
            devices: A topology of TPUs such as "v5p:2x2x1", which needs libtpu (`jaxpipe[aot]`) and
                no TPU, or of GPUs such as "h100:8", which needs JAX's CUDA plugin
                (`jaxpipe[aot-gpu]`) and no GPU. Default: the devices of the mesh.
            optimizer: An optimizer of optax, or one alike, to compile a train step with it in place
                of `value_and_grad` alone. Parameters and its state are donated.

        Returns:
            The report, which prints memory per device, collectives and loops; without FLOPs.

        Raises:
            ValueError: If the engine has a program for each rank, or the topology is unknown or has
                another number of devices.
        """
        from ._compile import compile_report, topology_mesh, train_step

        if self.engine.program_per_rank:
            raise ValueError(
                f"The engine is {self.engine.name!r}, which has programs for each rank. `compile` "
                f"takes an engine of one program, such as {engine_of_any_schedule().name!r}."
            )
        mesh = self.mesh if devices is None else topology_mesh(self.mesh, devices)
        pipe: Any = replace(cast(Any, self), told=replace(self.told, mesh=mesh))
        stored = pipe.shapes(params)
        arguments, function = (stored, batch), pipe.jit(pipe.value_and_grad)
        if optimizer is not None:
            layers = stored["layers"]
            spec = pipe.plan(layers.num_layers, layers.specs)
            state = state_shapes(optimizer, pipe.model, pipe.engine, spec, stored)
            arguments = stored, state, batch
            step = train_step(pipe, pipe.optimizer(optimizer))
            function = pipe.jit(step, donate_argnums=(0, 1))
        key = (_any_key(),) if self.takes_key else ()
        bubble = bubble_fraction(self.timeline())
        return compile_report(function, mesh, bubble, *arguments, *key)

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1)
        rows = self.last_rows[0].summary if self.last_rows else self._said_of_rows
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(self.model.order or ()).items())
        return (
            f"PipelinedModel({self.engine.name}: {self._description}; mesh {axes or 'of 1 device'}"
            f"{kinds and '; layers '}{kinds}{rows and '; '}{rows})"
        )

    @property
    def _said_of_rows(self) -> str:
        """Returns the user's word on rows, such as "row_wise layer True"; empty without one."""
        said = ", ".join(f"{name} {is_row_wise}" for name, is_row_wise in self.row_wise)
        return said and f"row_wise {said}"

    def _repr_svg_(self) -> str:
        return to_svg(self.timeline(), f"{self.engine.name}: {self._description}")

    @property
    def _description(self) -> str:
        if self.schedule is None:
            return f"{self.num_microbatches} microbatches"
        return describe(self.schedule)


def _any_key() -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a dropout key, which are enough to trace a step."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
