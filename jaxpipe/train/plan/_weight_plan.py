"""The weights of a run: their shapes, dtypes and logical axes, and the devices that hold them.

A train state is these weights and the optimizer that updates them.

R repeats, S ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int

from ... import models
from ...models import ModelConfig, ModelFamily
from ...models.weights import is_weight, stack_weights, weight_shapes
from ...sharding.layout import LayerLayout
from ...spmd.weight_gather import specs_of
from ..config._config import Config
from ._devices import DeviceLayout

STACK_AXES = ("circular_repeats", "stage", "layers")
"""Logical axes of the leading dims [R, S, layers per stage] of every stacked weight."""


@dataclass(frozen=True)
class WeightPlan:
    """The weights of a model whose layers are divided into stages.

    Attributes:
        family: The family of the model.
        dtype: The dtype in which weights are stored.
        layout: The layers of every stage and rank; without a pipeline, one stage on one rank.
        num_layers_after: Number of last layers that run after the pipeline; their weights are
            `head.layers`.
        stages_by_rank: The stages of every rank in forward order, if every stage has its own tree
            of weights on the devices of its rank; None if leaves stack all stages.
        devices: The devices that hold the weights.
    """

    family: ModelFamily
    sizes: ModelConfig
    dtype: str
    layout: LayerLayout
    num_layers_after: int
    stages_by_rank: tuple[tuple[int, ...], ...] | None
    devices: DeviceLayout

    @property
    def per_stage(self) -> bool:
        """Returns whether every stage has its own tree of weights; else leaves stack all stages."""
        return self.stages_by_rank is not None

    @property
    def slot_layer_ids(self) -> Int[np.ndarray, "..."]:
        """Returns the layer of every slot of a stack on ranks; -1 for padding.

        A stack of all stages is [R, S, layers per stage]. The stages of every rank, one after the
        other in forward order, make a stack [S, K], for K layers of the rank that has most.
        """
        if self.stages_by_rank is None:
            return np.array(self.layout.layer_ids, int).reshape(self.layout.dims)
        layers = self.layout.stage_layer_ids
        rows = [[i for stage in stages for i in layers[stage]] for stages in self.stages_by_rank]
        most = max(map(len, rows))
        return np.array([row + [-1] * (most - len(row)) for row in rows])

    @property
    def layer_kinds(self) -> Int[np.ndarray, " layers"] | None:
        """Returns the kind of every layer of the stages; None if layers are of one kind.

        What differs between kinds is static, and none of it is in the shapes of weights: all
        layers are one stack.
        """
        kinds = self.sizes.layer_kinds[: self.layout.num_layers]
        return np.array(kinds, np.int32) if kinds else None

    @property
    def num_parameters(self) -> int:
        """Returns the number of parameters of the model; padding layers do not count."""
        tree = self.abstract_unstacked
        boundary = {"embed": tree["embed"], "head": tree["head"]}
        per_layer = models.num_parameters(tree["layer"])
        return models.num_parameters(boundary) + self.layout.num_layers * per_layer

    @property
    def abstract_unstacked(self) -> dict[str, Any]:
        """Returns abstract weights of `embed`, of `head`, and of one `layer`."""
        dtype = jnp.dtype(self.dtype)
        return self.family.weights(self.sizes, dtype, layers_after=self.num_layers_after)

    @property
    def abstract(self) -> dict[str, Any]:
        """Returns abstract weights; leaves of `stages` are [R, S, layers per stage, ...].

        If it is `per_stage`, `stages` is a list in forward order, with leaves [layers, ...].
        """
        tree = self.abstract_unstacked
        if self.per_stage:
            counts = map(len, self.layout.stage_layer_ids)
            stages = [stack_weights(tree["layer"], (count,), ("layers",)) for count in counts]
        else:
            stages = stack_weights(tree["layer"], self.layout.dims, STACK_AXES)
        return {"embed": tree["embed"], "stages": stages, "head": tree["head"]}

    def on_one_stage(self, num_layers_after: int) -> "WeightPlan":
        """Returns the weights of one stage in one program, with so many layers after it."""
        num_layers = self.layout.num_layers + self.num_layers_after - num_layers_after
        return replace(
            self,
            layout=LayerLayout(1, 1, num_layers),
            num_layers_after=num_layers_after,
            stages_by_rank=None,
        )

    @property
    def canonical(self) -> dict[str, Any]:
        """Returns abstract weights as checkpoints store them; leaves of `stages` are [L, ...]."""
        tree = self._with_layers((self.layout.num_layers,), ("layers",))
        return {"embed": tree["embed"], "stages": tree["layers"], "head": tree["head"]}

    @property
    def tied(self) -> bool:
        """Returns whether the loss reads the weights of the embedding."""
        return self.family.tied(self.sizes)

    @property
    def abstract_params(self) -> dict[str, Any]:
        """Returns shapes in the tree of the front door; leaves of `layers` are [L, ...]."""
        return weight_shapes(self._with_layers((self.layout.num_layers,), ("layers",)))

    def _with_layers(self, dims: tuple[int, ...], axes: tuple[str, ...]) -> dict[str, Any]:
        """Returns abstract weights in the tree of the front door, with these dims of layers."""
        tree = self.abstract_unstacked
        layers = stack_weights(tree["layer"], dims, axes)
        return {"embed": tree["embed"], "layers": layers, "head": tree["head"]}

    @property
    def param_specs(self) -> dict[str, Any]:
        """Returns the spec of every leaf of `abstract_params`."""
        # A mesh axis that divides the stack divides no dim of a layer.
        groups = self._with_layers((1,) * len(STACK_AXES), STACK_AXES)
        specs = specs_of(models.logical_axes(groups), self.devices.rules)
        specs["layers"] = jax.tree.map(
            lambda spec: PartitionSpec(None, *spec[len(STACK_AXES) :]),
            specs["layers"],
        )
        return specs

    @property
    def exact(self) -> frozenset[str]:
        """Returns the paths of weights that are read in the dtype in which they are stored."""
        groups = self._with_layers((), ())
        leaves = jax.tree_util.tree_leaves_with_path(groups, is_leaf=is_weight)
        return frozenset(jax.tree_util.keystr(path) for path, weight in leaves if weight.exact)


@dataclass(frozen=True)
class StatePlan:
    """The state that a step updates.

    Attributes:
        config: The keys of the run, among them those of the optimizer.
    """

    weights: WeightPlan
    config: Config
