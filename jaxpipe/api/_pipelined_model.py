"""A model under a schedule: parameters in the user's tree in, loss and gradients out.

S ranks, L layers, a batch of B rows in M microbatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree, Scalar

from ..autodiff import StagedModel
from ..autodiff.staged_model import slice_sequences, split_metrics
from ..engines import Engine, PipelineSpec, When
from ..engines.fsdp import gathered_size, num_row_shards, with_layer_specs
from . import tokens
from ._frozen import (
    FrozenRule,
    check_trainable,
    close_over,
    combine,
    mark_frozen,
    partition,
    unmark,
)
from ._kinds import check_all, check_mtp, stack_all, total_layers, unstack_all
from ._layouts import layer_counts
from ._model import Model, check_means, with_constants
from ._outputs import from_metrics, merge_pieces, returning_outputs, sharded
from ._packed_x import PackedX, on_packed, packed_x
from ._params import (
    GRADIENTS,
    InList,
    NumLayers,
    StoredLayers,
    check_groups,
    check_stored,
    is_stored,
    weights_of,
)
from ._pieces import num_rows, shape_of, with_sharding
from ._rows import RowReport, row_report, smallest_factor
from ._specs import ParamSpecs, SpecRule, param_specs
from ._staging import (
    PieceInputs,
    contributing_model,
    divided,
    loss_arguments,
    make_inputs,
    on_all_rows,
    piece_shapes,
    staged_model,
)
from .checks import check_effects, check_key, check_windows, is_differentiated
from .inspection import InspectedModel
from .optimizer import (
    Optimizer,
    StoredState,
    num_lead_dims,
    shard_state,
    traced,
    transformation,
    unshard_state,
)

StoredParams = dict[str, Any]
"""Parameters as `shard` returns them: "embed", "layers" (`StoredLayers`), "head" and, if layers
share some, "shared"."""


@dataclass(frozen=True, repr=False)
class PipelinedModel(InspectedModel):
    """A model under a schedule on a mesh. `pipeline` makes one.

    Attributes:
        model: The model, with casts of its parameters if there is a `compute_dtype`.
        engine: The engine that runs it.
        told: The specification that the engine is given of a model with one layer in a stage;
            `plan` returns that of one with others. It has the mesh and most options of `pipeline`.
        gather: When weights are gathered. None: as is usual for the layers of a stage.
        layers_per_stage: Layers of every stage in forward order. None: as even as possible.
        frozen: Says which leaves of the user's tree are not trained. None: all are trained.
        num_mtp_layers: Layers of the kind "mtp" by a layout string. None: not said.
        param_specs: How leaves of the user's tree are sharded over other axes than `stage`.
        row_wise: The user's word on functions, by name: whether they treat rows one by one.
        last_rows: Holds the last report of `rows`, which `repr` shows.
    """

    model: Model
    engine: Engine
    told: PipelineSpec
    gather: When | None = None
    layers_per_stage: tuple[int, ...] | None = None
    frozen: FrozenRule | None = None
    num_mtp_layers: int | None = None
    param_specs: SpecRule | None = None
    row_wise: tuple[tuple[str, bool], ...] = ()
    last_rows: list[RowReport] = field(default_factory=list, init=False, compare=False)

    def shard(self, params: PyTree, *, like: PyTree = None) -> StoredParams:
        """Stores parameters, or an optimizer's state, on the devices that hold them.

        Args:
            params: The user's tree; or, with `like`, the state that an optimizer has for it.
            like: For a state what `init` of `optimizer(tx)` returned for this pipeline, or its
                shapes.

        Returns:
            A pytree for `value`, `value_and_grad` and `unshard`. Layers are stacked in it: give
            it to optimizers of `optimizer`, and other functions of arrays to `tree_map`. For a
            state that of an optimizer from `optimizer`.

        Raises:
            ValueError: If the tree is not that of the model, or layers are not alike.
        """
        if like is not None:
            return shard_state(self.engine, self._spec_of_state, params, like, self.model.tied)
        num_layers, in_list, leaf_specs = self._check_params(params)
        spec = self.plan(num_layers, leaf_specs)
        weights = self.engine.storage.put(spec, self._weights(spec, params), self.model.tied)
        return self._stored(spec, weights, num_layers, in_list)

    def init(self, make: Callable[..., PyTree], *arguments: Any) -> StoredParams:
        """Makes the first parameters as the engine stores them, never whole on one device.

        Args:
            make: `(*arguments) -> params`, in the user's tree. It is traced, once per rank for
                `mpmd`.
            *arguments: Such as the random key.

        Returns:
            The same as `shard(make(*arguments))`.

        Raises:
            ValueError: If the tree is not that of the model, or layers are not alike.
        """
        num_layers, in_list, leaf_specs = self._check_params(jax.eval_shape(make, *arguments))
        spec = self.plan(num_layers, leaf_specs)
        weights = self.engine.storage.init(
            spec, lambda: self._weights(spec, make(*arguments)), self.model.tied
        )
        return self._stored(spec, weights, num_layers, in_list)

    def _check_params(self, params: PyTree) -> tuple[NumLayers, InList, ParamSpecs]:
        """Checks the user's tree; returns L, whether it has a list of layers, and its specs."""
        model, groups = self.model, self.model.to_groups(params)
        check_groups(groups, model.shared, needs_arrays=not self.engine.program_per_rank)
        num_layers, in_list = check_all(model.layer, groups["layers"])
        check_trainable(self.frozen, params)
        if self.num_mtp_layers is not None:
            check_mtp(num_layers, self.num_mtp_layers)
        leaf_specs = param_specs(
            self.param_specs, params, model.to_groups, self.mesh, model.has_kinds, model.shared
        )
        return num_layers, in_list, leaf_specs

    def _weights(self, spec: PipelineSpec, params: PyTree) -> dict[str, PyTree]:
        """Returns the parameters in the groups of engines."""
        groups = self.model.to_groups(params)
        if self.frozen is not None:
            groups = mark_frozen(self.frozen, params, self.model.to_groups, self.model.has_kinds)
        others = {name: groups[name] for name in groups if name != "layers"}
        stages = self.engine.storage.stack(spec, stack_all(self.model.layer, groups["layers"]))
        return jax.tree.map(jnp.asarray, others) | {"stages": stages}

    def shapes(self, params: PyTree) -> StoredParams:
        """Returns the shapes of parameters as the engine stores them.

        Args:
            params: The user's tree or parameters from `shard`; shapes and dtypes are enough.

        Returns:
            The same as `shard(params)`, with a `jax.ShapeDtypeStruct` for each array, which in one
            program has the sharding of the array: what is lowered from it is what runs.

        Raises:
            ValueError: If the tree is not that of the model, or layers are not alike.
        """
        if is_stored(params):
            spec, layers = self._spec_of(params), params["layers"]
            weights = jax.tree.map(shape_of, weights_of(params))
            num_layers, in_list = layers.num_layers, layers.in_list
        else:
            num_layers, in_list, leaf_specs = self._check_params(params)
            spec = self.plan(num_layers, leaf_specs)
            weights = jax.eval_shape(lambda params: self._weights(spec, params), params)
        if not self.engine.program_per_rank:
            where = self.engine.storage.shardings(spec, weights, self.model.tied)
            weights = jax.tree.map(with_sharding, weights, where)
        return self._stored(spec, weights, num_layers, in_list)

    def _stored(
        self, spec: PipelineSpec, weights: dict[str, Any], num_layers: NumLayers, in_list: InList
    ) -> StoredParams:
        stages, layer_ids = weights["stages"], self._layer_ids(spec)
        layers = StoredLayers(stages, num_layers, in_list, spec.param_specs, layer_ids)
        return {name: weights[name] for name in weights if name != "stages"} | {"layers": layers}

    def _layer_ids(self, spec: PipelineSpec) -> tuple[Any, ...]:
        """Returns which layer is where in stored parameters."""
        return self.engine.storage.layer_ids(spec.layout)

    def _spec_of(self, params: StoredParams) -> PipelineSpec:
        """Returns the spec for stored parameters, and checks that they suit this pipeline."""
        check_stored(params)
        layers = params["layers"]
        spec = self.plan(layers.num_layers, layers.specs)
        self._check_layer_ids(spec, layers.layer_ids)
        return spec

    def _check_layer_ids(self, spec: PipelineSpec, layer_ids: tuple[Any, ...]) -> None:
        if layer_ids != self._layer_ids(spec):
            raise ValueError(
                "`params` is stored by a pipeline that has other layers in its stages, or its "
                "stages on other ranks. Give `pipe.shard(other.unshard(params))`, where `other` is "
                "that pipeline."
            )

    def unshard(self, params: StoredParams | PyTree) -> PyTree:
        """Returns parameters, gradients or an optimizer's state in the user's own tree.

        Args:
            params: The stored parameters; or the state of an optimizer from `optimizer`.

        Returns:
            The user's tree, whole on every device; for `mpmd` on the first device. It has None
            where `params` has: at frozen leaves of gradients and of what `partition` returns. Of a
            state the one that the optimizer has for the user's tree.

        Raises:
            ValueError: If `params` is not as `shard` of this pipeline returns it.
        """
        if not is_stored(params) and not self._is_of_user(params):
            return unshard_state(self.engine, self._spec_of_state, params)
        spec = self._spec_of(params)
        params = unmark(params)
        stored = params["layers"]
        gathered = self.engine.storage.gather(spec, params | {"layers": stored.stages})
        layers = self.engine.storage.unstack(spec, gathered["layers"])
        layers = unstack_all(layers, stored.num_layers, stored.in_list)
        return self.model.from_groups(gathered | {"layers": layers})

    def _is_of_user(self, params: PyTree) -> bool:
        """Returns whether a tree has the groups of the user's parameters."""
        try:
            check_groups(self.model.to_groups(params), self.model.shared)
        except Exception:  # `to_groups` is the user's, and may raise anything for other trees
            return False
        return True

    def _spec_of_state(self, node: Any) -> PipelineSpec:
        """Returns the spec for a part of an optimizer's state, and checks that it suits."""
        if not isinstance(node, StoredState):
            return self.plan(self._any_num_layers)
        spec = self.plan(node.num_layers)
        self._check_layer_ids(spec, node.layer_ids)
        return spec

    def partition(self, params: StoredParams) -> tuple[StoredParams, StoredParams]:
        """Divides parameters into trainable and frozen ones, as `equinox.partition` does.

        Args:
            params: Stored parameters, trainable and frozen ones.

        Returns:
            (trainable, frozen), each with None at the leaves of the other. Gradients are like
            `trainable`, and so is the state of an optimizer that was made from it.
        """
        return partition(params)

    def combine(self, trainable: StoredParams, frozen: StoredParams) -> StoredParams:
        """Returns the parameters that `partition` has divided.

        Args:
            trainable: Trainable parameters, such as those after an update.
            frozen: The frozen parameters that `partition` returned.

        Returns:
            Parameters for `value`, `value_and_grad` and `unshard`.
        """
        return combine(trainable, frozen)

    def optimizer(self, tx: Optimizer) -> Any:
        """Returns an optimizer for stored parameters whose every step is that of `tx`.

        `tx` sees the user's own tree, with an array for each parameter of each layer, whatever the
        engine stores. So masks, labels, and what an optimizer computes of a whole array, such as
        its norm, are those of the program without a pipeline. What `tx` does to all layers alike
        runs once for all of them.

        Args:
            tx: An optimizer of optax, or one alike: any transformation, chain, mask or schedule.

        Returns:
            An optimizer of the same class. `init` takes parameters from `shard`, or the trainable
            ones from `partition`, or the `shapes` of parameters, for those of the state. `update`
            takes gradients from `value_and_grad`, and returns updates for `optax.apply_updates`.
            `unshard` of its state is what `tx` has for the user's tree.

        Raises:
            ValueError: From `init` and `update`, if `tx` treats layers differently, combines whole
                arrays of several layers, or computes the loss itself, as line searches do.

        Example:
            >>> import optax
            >>> tx = pipe.optimizer(optax.adamw(1e-3))  # doctest: +SKIP
            >>> state = tx.init(params)  # doctest: +SKIP
            >>> updates, state = tx.update(grads, state, params)  # doctest: +SKIP
        """
        return transformation(tx, self.model, self.engine, self._spec_of, self.jit)

    def tree_map(self, function: Callable, params: StoredParams, *rest: PyTree) -> StoredParams:
        """Applies a function to every parameter of every layer, as `jax.tree.map` does.

        Args:
            function: `(array, *arrays) -> array` of the same shape. It is given arrays as they are
                in the user's tree, with a list of layers, and is traced.
            params: Parameters from `shard`; only trainable ones are changed.
            *rest: Trees like parameters or like gradients.

        Returns:
            The parameters.

        Example:
            >>> params = pipe.tree_map(lambda w, g: w - 0.1 * g, params, grads)  # doctest: +SKIP
        """
        of_stages = function
        for _ in range(num_lead_dims(params["layers"].stages)):
            of_stages = jax.vmap(of_stages)

        def run(*trees: StoredParams) -> StoredParams:
            new = {
                name: jax.tree.map(function, *(tree[name] for tree in trees))
                for name in trees[0]
                if name != "layers"
            }
            stages = jax.tree.map(of_stages, *(tree["layers"].stages for tree in trees))
            return new | {"layers": replace(trees[0]["layers"], stages=stages)}

        trainable, frozen = partition(params)
        return combine(traced(self.jit, run)(trainable, *rest), frozen)

    def value(
        self, params: StoredParams, batch: PyTree, key: Array | None = None
    ) -> tuple[Scalar, dict[str, Array]]:
        """Computes loss and metrics of a batch, forwards only.

        Args:
            params: Stored parameters, from `shard` or `init`, or updated by an optimizer.
            batch: A tree of [B, ...] leaves, where B is a multiple of A * M.
            key: The dropout key of the step. None if no function of the model takes one.

        Returns:
            (loss, metrics). Metrics are scalars, or [B, ...] if `loss` returns [b, ...].

        Raises:
            ValueError: If `params` is not as `shard` of this pipeline returns it, the batch does
                not divide into microbatches, a key is missing, or a metric that is an array has
                other than an entry for each row.
        """
        self.engine.check_call("value")
        loss, metrics = self.engine.value(*self._arguments(params, batch, key))
        return loss, self._with_rows(metrics)

    def apply(
        self,
        params: StoredParams,
        batch: PyTree,
        key: Array | None = None,
        *,
        spec: PyTree[PartitionSpec] | None = None,
    ) -> PyTree:
        """Computes the output of the model for every row of a batch, forwards only.

        Args:
            params: Stored parameters, from `shard` or `init`, or updated by an optimizer.
            batch: A tree of [B, ...] leaves, where B is a multiple of A * M.
            key: The dropout key of the step. None if no function of the model takes one.
            spec: How outputs are sharded: a spec of [B, ...] arrays, or a tree of specs that is a
                prefix of the output. Default: rows over `data` and `fsdp`; if these have one
                device, an engine of one program leaves rows with the rank that computes them.

        Returns:
            What `Model.output` returns, of all rows in their order, [B, ...] leaves; for a model of
            a library's module what the module returns. With a program for each rank the rank of the
            last stage has them.

        Raises:
            ValueError: If `params` is not as `shard` of this pipeline returns it, the batch does
                not divide into microbatches, a key is missing, an output has no dim of rows, slices
                of it cannot be joined, or `spec` names an axis that the mesh does not have, or
                `stage` where each rank has a program.

        Example:
            >>> logits = pipe.jit(pipe.apply)(params, batch)  # doctest: +SKIP
        """
        check_means(self.model, "apply")
        self.engine.check_call("apply")
        told = self.told.with_options(vocab_parallel=False)  # all ranks would compute all outputs
        pipe = replace(self, model=returning_outputs(self.model), told=told)
        _, metrics = pipe.value(params, batch, key)
        outputs = from_metrics(metrics, self.model, *self._loss_arguments(params, batch, key))
        if spec is None:
            return outputs
        return sharded(outputs, spec, self.mesh, has_stages=not self.engine.program_per_rank)

    def _loss_arguments(self, params: StoredParams, batch: PyTree, key: Array | None) -> Any:
        """Returns the shapes of what `loss` and `output` are given of a whole microbatch."""
        spec, weights = self._spec_of(params), unmark(weights_of(params))
        rows = piece_shapes(self.model, batch, self.num_pieces, num_row_shards(self.mesh), 1)
        key_or_none = () if key is None else key
        _, packed = self._packed(spec, weights, batch, key_or_none)
        return loss_arguments(self.model, weights, rows, key_or_none, packed)

    def _with_rows(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns metrics with arrays [B, ...] in place of those that an engine returns."""
        _, arrays = split_metrics(metrics)
        merge = partial(merge_pieces, num_slices=self.num_slices, mesh=self.mesh)
        return metrics | {name: merge(x) for name, x in arrays.items()}

    def value_and_grad(
        self, params: StoredParams, batch: PyTree, key: Array | None = None
    ) -> tuple[tuple[Scalar, dict[str, Array]], StoredParams]:
        """Computes loss, metrics and gradients of a batch.

        Args:
            params: Stored parameters, from `shard` or `init`, or updated by an optimizer.
            batch: A tree of [B, ...] leaves, where B is a multiple of A * M.
            key: The dropout key of the step. None if no function of the model takes one.

        Returns:
            ((loss, metrics), gradients like `params`, with None at frozen leaves). Metrics are
            those of `value`.

        Raises:
            ValueError: If `value` raises one for these arguments.
        """
        self.engine.check_call("value_and_grad")
        value, grads = self.engine.value_and_grad(*self._arguments(params, batch, key, grad=True))
        value = value[0], self._with_rows(value[1])
        if self.model.shared:
            spec = self.plan(params["layers"].num_layers)
            grads["stages"], grads["shared"] = self.engine.storage.sum_shared(spec, grads["stages"])
        stages = replace(params["layers"], stages=grads["stages"], role=GRADIENTS)
        return value, {name: grads[name] for name in params if name != "layers"} | {
            "layers": stages
        }

    def jit(self, function: Callable, *, donate_argnums: int | Sequence[int] = ()) -> Callable:
        """Compiles a function that may call `value`, `value_and_grad` and `apply`.

        Args:
            function: A function of pytrees of arrays, such as a train step.
            donate_argnums: Arguments whose memory the results may take.

        Returns:
            The function as one program, as from `jax.jit`; for `mpmd` as a program for each rank.
        """
        donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        return self.engine.jit(self.plan(self._any_num_layers), function, donated)

    def plan(self, num_layers: NumLayers, specs: ParamSpecs = ()) -> PipelineSpec:
        """Returns the specification that the engine is given of a model of so many layers.

        Args:
            num_layers: L; or a pair for each kind of layers, its name and number of layers.
            specs: The specs of stored parameters, `params["layers"].specs`.

        Returns:
            The specification.

        Raises:
            ValueError: If there are fewer layers than stages, or `layers_per_stage` has others.
        """
        told = replace(
            self.told,
            kinds=() if isinstance(num_layers, int) else num_layers,
            order=tuple(self.model.order or ()),
            param_specs=specs,
        )
        costs, has_costs = self.model.layer_costs or {}, told.kinds and self.model.layer_costs
        of_layers = [costs[kind] for kind in told.kinds_of_layers] if has_costs else None
        total = total_layers(num_layers)
        counts = layer_counts(total, self.num_stages, self.layers_per_stage, of_layers)
        layout = self.engine.layout(self.schedule, self.mesh.shape["stage"], counts)
        gather = self.gather or self.engine.usual_gather(layout.layers_per_stage)
        has_shards = gathered_size(self.mesh, specs) > 1  # without, there is nothing to gather
        return replace(told, layout=layout, gather=gather if has_shards else "once")

    @property
    def num_pieces(self) -> int:
        """Number of microbatches of a batch, A * M."""
        return self.told.num_calls * self.num_microbatches

    @property
    def num_stages(self) -> int:
        """Number of stages; 1 without a pipeline."""
        return 1 if self.schedule is None else self.schedule.num_stages

    @property
    def takes_key(self) -> bool:
        """Returns whether a function of the model takes a dropout key."""
        return self.model.takes_key

    @property
    def _any_num_layers(self) -> int:
        return sum(self.layers_per_stage) if self.layers_per_stage else self.num_stages

    def _arguments(
        self, params: StoredParams, batch: PyTree, key: Array | None, grad: bool = False
    ) -> tuple[PipelineSpec, StagedModel, dict[str, Any], PieceInputs, Any]:
        """Returns the arguments of `Engine.value`, or with `grad` of `value_and_grad`."""
        spec, num_layers = self._spec_of(params), params["layers"].num_layers
        weights = weights_of(params)
        if self.model.contributions:
            return self._arguments_of_contributions(
                spec, weights, total_layers(num_layers), batch, key
            )
        keys, key_or_none = ((), ()), ()
        if self.model.takes_key:
            key_or_none = key = check_key(key)
            ids = jnp.arange(total_layers(num_layers) + 1)
            folded = jax.vmap(partial(jax.random.fold_in, key))(ids)
            keys = folded[0], folded[1:]
        all_weights = unmark(weights)
        of_user, packed = self._packed(spec, all_weights, batch, keys[0])
        model, names, draws, whole = of_user, (), {}, False
        if num_row_shards(self.mesh) > 1:
            report = self._row_report(of_user, spec, all_weights, batch, keys[0])
            report.check(self.mesh, spec.options.reduce_dtype)
            names, draws = report.run_on_every_device, report.draws
            if self.told.options.vocab_parallel and "loss" in {*names, *draws}:
                raise ValueError(
                    "`vocab_parallel` is True, and `mesh` divides rows that `loss` may mix. Leave "
                    "it out, or say `row_wise={'loss': True}` if the loss is a mean over rows."
                )
            whole = report.whole_microbatches and not (names or draws)
            if names or draws:
                model = on_all_rows(model, names, draws, self.mesh, report.x_dims)
        spec = replace(spec, whole_microbatches=whole)
        inputs = make_inputs(
            of_user,
            self.mesh,
            self.num_pieces,
            all_weights,
            batch,
            keys[0],
            self.num_slices,
            whole,
            same_draws=bool(names or draws),
            loss_of_all_rows="loss" in names,
        )
        rows = jax.tree.map(partial(shape_of, skipped=2), inputs.batch)
        shapes_of = partial(self._shapes_by_kind, spec, all_weights)
        by_tokens = self.engine.has_branches(spec) and tokens.check_token_wise(
            of_user, shapes_of(), rows, key_or_none, self.mesh
        )
        if self.num_slices > 1:
            of_slices = partial(piece_shapes, of_user, batch)
            of_rows, grows = partial(of_slices, num_rows(batch), 1), self.engine.program_per_rank
            tokens.check_slices(of_user, shapes_of(), of_rows, self.num_slices, past_grows=grows)
            rows = of_slices(self.num_pieces, num_row_shards(self.mesh), 1)
        check_effects(of_user, self.engine, self.mesh, shapes_of(), rows, key_or_none)
        if grad or is_differentiated(params):
            check_windows(of_user, self.engine, spec, shapes_of(), rows, key_or_none)
        weights, frozen = partition(weights)
        weights["constants"] = {name: frozen[name] for name in ("embed", "head")}
        by_tokens = by_tokens and not jax.tree.leaves(frozen["embed"])  # which it closes over
        spec = with_layer_specs(spec, weights["stages"])
        storage = self.engine.storage
        layer_keys = storage.layer_keys(spec, keys[1], frozen["stages"])
        if self.model.shared:
            weights["stages"] = storage.share(spec, weights["stages"], weights.pop("shared"))
            layer_keys = storage.share(spec, layer_keys, frozen["shared"])
        staged = self._staged_model(model, spec, packed, by_tokens)
        return spec, staged, weights, inputs, layer_keys

    def _arguments_of_contributions(
        self,
        spec: PipelineSpec,
        weights: dict[str, Any],
        num_layers: int,
        batch: PyTree,
        key: Array | None,
    ) -> tuple[PipelineSpec, StagedModel, dict[str, Any], PyTree, Any]:
        """Returns the arguments of an engine for functions that return contributions."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if jnp.shape(leaf)[:1] != (self.num_pieces,):
                raise ValueError(
                    f"`batch{jax.tree_util.keystr(path)}` has shape {jnp.shape(leaf)}, and "
                    f"`Model.contributions` is True: its first dim is {self.num_pieces}, the "
                    "microbatches of `microbatches` and `accumulate`."
                )
        keys: Any = ()
        if key is not None and self.model.takes_key:
            fold_in = partial(jax.random.fold_in, check_key(key))
            keys = jax.vmap(fold_in)(jnp.arange(num_layers))
        keys = with_constants(self.model, keys, num_layers)
        spec = with_layer_specs(spec, weights["stages"])
        model = contributing_model(self.model, self.mesh, *self._stages_of(spec))
        inputs = slice_sequences(batch, self.num_slices, 2)
        nothing: Any = {kind: () for kind, _ in spec.kinds} if spec.kinds else ()
        storage = self.engine.storage
        layer_keys = storage.layer_keys(spec, keys, storage.stack(spec, nothing))
        return spec, model, weights, inputs, layer_keys

    def _stages_of(self, spec: PipelineSpec) -> list[Callable]:
        """Returns functions from a layer to the stage that runs layers, and to that of a slice."""
        if self.num_slices == 1:
            return [partial(self.engine.stage, spec)]
        assert self.engine.sliced_stage is not None, "checked by `Engine.prepare`"
        return [partial(self.engine.stage, spec), partial(self.engine.sliced_stage, spec)]

    def rows(self, params: PyTree, batch: PyTree, key: Array | None = None) -> RowReport:
        """Says which functions of the model run on the rows of a device, and why others do not.

        Args:
            params: The user's tree or parameters from `shard`; shapes and dtypes are enough.
            batch: [B, ...] leaves; shapes and dtypes are enough.
            key: The dropout key of the step, or its shape. Default: a typed key.

        Returns:
            The report, which prints as a table. Where no axis divides rows it says what would
            happen if one did.

        Raises:
            ValueError: If `params` is not the tree of the model, or the batch does not divide.
        """
        check_means(self.model, "rows")
        stored = self.shapes(params)
        spec, weights = self._spec_of(stored), unmark(weights_of(stored))
        if self.model.takes_key and key is None:
            key = jax.eval_shape(lambda: jax.random.key(0))
        key_or_none = () if key is None else key
        model, _ = self._packed(spec, weights, batch, key_or_none)
        return self._row_report(model, spec, weights, batch, key_or_none)

    def _packed(
        self, spec: PipelineSpec, weights: dict[str, Any], batch: PyTree, key: Any
    ) -> tuple[Model, PackedX | None]:
        """Returns the model whose layers all return one x, and what takes its place, if needed."""
        groups, shards = self._shapes_by_kind(spec, weights), num_row_shards(self.mesh)
        for count in sorted({1, shards}):  # a leaf has rows if it has those of both
            rows = piece_shapes(self.model, batch, self.num_pieces, count, self.num_slices)
            packed = packed_x(self.model, spec, groups, rows, key)
        return (self.model if packed is None else on_packed(self.model, packed)), packed

    def _shapes_by_kind(self, spec: PipelineSpec, weights: dict[str, Any]) -> dict[str, Any]:
        """Returns shapes of the groups, of layers those of one of each kind."""
        groups = jax.tree.map(shape_of, weights)
        return groups | {"layers": self.engine.storage.layers_by_kind(spec, groups.pop("stages"))}

    def _row_report(
        self, model: Model, spec: PipelineSpec, weights: dict[str, Any], batch: PyTree, key: Any
    ) -> RowReport:
        groups = self._shapes_by_kind(spec, weights)
        shapes_of = partial(piece_shapes, model, batch, self.num_pieces)
        microbatch, num_shards = shapes_of(1, self.num_slices), num_row_shards(self.mesh)
        count = num_rows(microbatch)
        # Where no axis divides rows, the question is what would be if one did.
        num_blocks = num_shards if num_shards > 1 else smallest_factor(count)
        report = row_report(
            model,
            groups,
            (microbatch, shapes_of(num_blocks, self.num_slices)),
            jax.tree.map(shape_of, key),
            dict(self.row_wise),
            num_shards=num_shards,
            is_divided=self.engine.may_divide(spec),
            num_slices=self.num_slices,
        )
        self.last_rows[:] = [report]
        return report

    def _staged_model(
        self, of_user: Model, spec: PipelineSpec, packed: PackedX | None, by_tokens: bool
    ) -> StagedModel:
        num_shards = 1 if spec.whole_microbatches else num_row_shards(self.mesh)
        num_pieces = self.num_pieces * self.num_slices * num_shards
        tokens_over = self.mesh if by_tokens else None
        divide = divided(self.mesh, self.model.sequence_dim, spec.whole_microbatches)
        stages_of = self._stages_of(spec)
        own_copy = self.engine.storage.own_copy
        per_rank = packed if self.engine.program_per_rank else None
        hand_overs = per_rank and per_rank.hand_overs(spec.layout.stage_layer_ids)

        def staged(model: Model) -> StagedModel:
            without_hand_overs = staged_model(
                model, num_pieces, own_copy, *stages_of, divide=divide, tokens_over=tokens_over
            )
            return replace(without_hand_overs, hand_overs=hand_overs)

        def bind(frozen: dict[str, PyTree]) -> StagedModel:
            return staged(close_over(of_user, frozen))

        return replace(staged(of_user), bind=bind)
