"""A mixture of experts in place of an MLP: a router, routed experts, and shared experts.

b sequences, T tokens, D embed, E experts, F width of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ...sharding import Constrain
from ..weights._abstract import matrix, zero_bias
from ._common import ACTIVATION
from ._gated_mlp import GatedMlp
from ._projection import Projection, projection
from ._routed_experts import EXPERT_AXES, Experts, Gated, gated_silu
from ._router import RouterSettings, Routing, route


@dataclass(frozen=True)
class MoeSettings:
    """Sizes and choices of a mixture of experts."""

    embed_dim: int  # D
    num_experts: int  # E, the number of routed experts
    expert_dim: int  # F
    load_balance_loss_weight: float  # factor of the load-balance loss
    router: RouterSettings
    shared_experts: int = 0  # the number of shared experts. They are one wide MLP.
    has_choice_bias: bool = False  # whether a bias per expert affects the choice
    has_product_biases: bool = False  # whether router and experts add biases to their products
    scales_inputs: bool = False  # whether experts are given inputs times shares, as in Llama 4
    gated: Gated = gated_silu  # the activation between the first two products and the last

    @property
    def shared_mlp(self) -> GatedMlp | None:
        """Returns the shared experts as the MLP that they are; None if there are none."""
        width = self.shared_experts * self.expert_dim
        return GatedMlp(self.embed_dim, width) if width else None


def moe_weights(settings: MoeSettings, *, branches: int, dtype: Any) -> PyTree:
    """Returns abstract weights `{"router", "experts"}`, and "shared" if there are such experts."""
    D, E, F = settings.embed_dim, settings.num_experts, settings.expert_dim
    router = {"logits": replace(matrix((D, E), ("embed", None), D, dtype), exact=True)}
    if settings.has_choice_bias:
        router["bias"] = zero_bias((E,), ("norm",), dtype, exact=True)
    experts = {
        "gate": matrix((E, D, F), EXPERT_AXES["gate"], D, dtype),
        "up": matrix((E, D, F), EXPERT_AXES["up"], D, dtype),
        "down": matrix((E, F, D), EXPERT_AXES["down"], F * branches, dtype),
    }
    if settings.has_product_biases:
        router["logits_bias"] = zero_bias((E,), (None,), dtype, exact=True)
        for name in ("gate_bias", "up_bias"):
            experts[name] = zero_bias((E, F), EXPERT_AXES[name], dtype)
        experts["down_bias"] = zero_bias((E, D), (None, "embed"), dtype)
    weights = {"router": router, "experts": experts}
    if settings.shared_mlp:
        weights["shared"] = settings.shared_mlp.weights(branches=branches, dtype=dtype)
    return weights


def moe(
    settings: MoeSettings,
    *,
    experts: Experts,
    constrain: Constrain,
    project: Projection = projection,
) -> Callable[[PyTree, Array, PyTree], tuple[Array, dict[str, Float[Array, ""]]]]:
    """Returns a mixture of experts as a function `(weights, x, batch_inputs) -> (y, aux)`.

    `aux["load_balance_loss"]` is the microbatch's contribution to the batch's load-balance loss,
    already weighted; `aux["loss"]` contains it too. The weight of a microbatch is the sum of its
    target weights, which sum to 1 over the batch. Tokens of segment 0 are padding and do not count.
    Where each device has its own rows of a microbatch, the sum of `aux` over the devices equals
    that of all rows.

    The router's bias affects only the choice of experts, so the loss does not depend on it. It
    still receives a gradient, each expert's load minus 1 / E, through a term of the loss whose
    value is always 0. A step against its sign is the update of DeepSeek-V3, section 2.1.2.
    """

    def mix(
        w: PyTree, x: Float[Array, "b T D"], batch_inputs: PyTree
    ) -> tuple[Array, dict[str, Float[Array, ""]]]:
        # Experts gather tokens. Without this, gradients of the rest gather the whole batch.
        x = constrain(x, ACTIVATION)
        bias = w["router"]["bias"].astype(jnp.float32) if settings.has_choice_bias else None
        routing = _route(settings.router, w["router"], bias, x, batch_inputs)
        options = {"gated": settings.gated, "scales_inputs": settings.scales_inputs}
        y = experts(w["experts"], x, routing.chosen, routing.shares, **options)
        y = constrain(y, ACTIVATION)
        if settings.shared_mlp:
            y += settings.shared_mlp.run(w["shared"], x, constrain, project)
        return y, _aux_losses(
            routing, bias, settings.load_balance_loss_weight, batch_inputs["target_weights"]
        )

    return mix


def _route(
    router: RouterSettings,
    w: PyTree,
    bias: Float[Array, " E"] | None,
    x: Float[Array, "b T D"],
    batch_inputs: PyTree,
) -> Routing:
    # Computed in float32: a rounded score may choose another expert.
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), w["logits"].astype(jnp.float32))
    if "logits_bias" in w:
        logits += w["logits_bias"].astype(jnp.float32)
    real, weight = batch_inputs["segment_ids"] != 0, jnp.sum(batch_inputs["target_weights"])
    return route(logits, bias, real, weight, router)


def _aux_losses(
    routing: Routing, bias: Array | None, weight: float, target_weights: Float[Array, "b T"]
) -> dict[str, Float[Array, ""]]:
    own = jnp.sum(target_weights)
    balance = weight * routing.weight * routing.balance
    if bias is None:
        return {"loss": balance, "load_balance_loss": balance}
    surplus = routing.load - 1 / routing.load.shape[0]
    zero = jnp.sum(surplus * (bias - jax.lax.stop_gradient(bias)))
    return {"loss": balance + own * zero, "load_balance_loss": balance}
