"""The model of a run as it is decoded: on a mesh of its own rules, with weights of one dtype.

All devices compute all rows, of which there are few. Weights are divided over `fsdp`, `tensor` and
`expert` as in training, and over `stage` too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ... import models, sharding
from ...models import MODEL_FAMILIES, Weight, logical_axes
from ...models.weights import is_weight, weight_shapes
from ...sharding.layout import LayerLayout
from ..checkpoint._canonical import shard_over_ranks
from ..checkpoint._layer_reordering import jit_on_mesh
from ..config._config import Config
from ..plan._devices import DeviceLayout
from ..plan._from_config import axis_rules
from ..plan._model import ModelPlan, build_functions, model_config, model_plan
from ..plan._weight_plan import WeightPlan
from ._generate import Decoder

_PLAIN: dict[str, Any] = {
    "attention": "dot_product",  # kernels read whole sequences
    "megablox": False,  # its tiles are larger than a few rows
    "shard_exp_on_fsdp": False,  # what divides over the mesh of a run may not over another
    "quantization": "",
    "enable_dropout": False,
    "remat_policy": "none",
}
"""Keys that decoding does not read, and what it does instead."""


@dataclass(frozen=True)
class DecodingPlan:
    """A model that is decoded, and the devices that do it.

    Attributes:
        weights: The weights, all layers in one stage.
        model: How its functions compute.
    """

    weights: WeightPlan
    model: ModelPlan

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of the devices."""
        return self.weights.devices.mesh

    @property
    def decoder(self) -> Decoder:
        """Returns the functions of the model."""
        embed, layer, _ = build_functions(self.model, self.weights)
        logits = partial(
            models.next_token_logits,
            epsilon=self.weights.sizes.normalization_layer_epsilon,
            constrain=sharding.Constrain(self.weights.devices.rules),
            norm_offset=self.weights.sizes.norm_offset,
        )
        return Decoder(embed, layer, logits, self.weights.tied, self.weights.layer_kinds)

    def shapes(self, layers_after: int = 0) -> PyTree[jax.ShapeDtypeStruct]:
        """Returns shapes, dtypes and shardings of weights, with so many layers after the stages."""
        tree = self.weights.on_one_stage(layers_after).canonical
        shardings = self.weights.devices.shardings(weight_shapes(tree), logical_axes(tree))

        def shape(weight: Weight, where: NamedSharding) -> jax.ShapeDtypeStruct:
            dtype = weight.dtype if weight.exact else jnp.dtype(self.model.config.dtype)
            if self.mesh.shape["stage"] > 1:
                where = shard_over_ranks(weight.shape, where, False)
            return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=where)

        return jax.tree.map(shape, tree, shardings, is_leaf=is_weight)

    def lay_out(self, weights: PyTree) -> PyTree[jax.Array]:
        """Returns the weights of a checkpoint, or of a run in that layout, as decoding needs them.

        Layers after the pipeline join the others. No array is deleted.
        """

        @cache
        def joining(where: NamedSharding, dtype: Any) -> Callable[..., jax.Array]:
            def join(*parts: jax.Array) -> jax.Array:
                return jnp.concatenate(parts).astype(dtype) if parts[1:] else parts[0].astype(dtype)

            return jit_on_mesh(self.mesh, join, where)

        def leaf(to: jax.ShapeDtypeStruct, *parts: jax.Array) -> jax.Array:
            return joining(to.sharding, to.dtype)(*parts)

        head = dict(weights["head"])
        stacks = [weights["stages"], *([head.pop("layers")] if "layers" in head else [])]
        shapes = self.shapes()
        boundary = {"embed": weights["embed"], "head": head}
        joined = {name: jax.tree.map(leaf, shapes[name], part) for name, part in boundary.items()}
        return joined | {"stages": jax.tree.map(leaf, shapes["stages"], *stacks)}


def decoding_plan(config: Config, mesh: Mesh) -> DecodingPlan:
    """Returns the plan of decoding the model of a config on a mesh, whose axes are automatic."""
    plain = config.model_copy(update=_PLAIN)
    rules = sharding.override_rules(
        tuple((f"activation_{name}", ()) for name in ("batch", "length", "norm_length")),
        axis_rules(plain),
    )
    devices, sizes = DeviceLayout(mesh, rules), model_config(config)
    layout = LayerLayout(1, 1, sizes.num_pipeline_layers)
    family = MODEL_FAMILIES[config.decoder_block]
    weights = WeightPlan(
        family=family,
        sizes=sizes,
        dtype=config.weight_dtype,
        layout=layout,
        num_layers_after=0,
        stages_by_rank=None,
        devices=devices,
    )
    return DecodingPlan(weights, model_plan(plain, sizes, devices.platform))
