"""The MLP of a layer, as one record: its weights, what it computes, and what plans count of it.

b sequences, T tokens, D embed, F width.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from ...sharding import Constrain
from ..weights._abstract import Weight, matrix
from ._projection import Projection

_HIDDEN = ("activation_batch", "activation_length", "activation_mlp")


@runtime_checkable
class Mlp(Protocol):
    """What weights, functions and plans of a family read of its MLP."""

    @property
    def width(self) -> int:
        """Returns F."""
        ...

    @property
    def has_gate(self) -> bool:
        """Returns whether the input is multiplied by two matrices, `gate` and `up`."""
        ...

    @property
    def tensors(self) -> dict[str, int]:
        """Returns the channels per token of every tensor that a policy may keep, by name."""
        ...

    def weights(self, *, branches: int, dtype: Any) -> dict[str, Weight]:
        """Returns abstract weights; the last starts smaller by the square root of `branches`."""
        ...

    def run(
        self, w: PyTree, x: Float[Array, "b T D"], constrain: Constrain, project: Projection
    ) -> Float[Array, "b T D"]:
        """Computes the MLP of every token."""
        ...


class GatedMlp(NamedTuple):
    """SwiGLU, or GeGLU by its activation (Shazeer, 2020, arXiv 2002.05202).

    Attributes:
        embed_dim: D, the channels between layers.
        width: F, the channels of its hidden layer.
        activation: The name of the function of `jax.nn` that activates the gate.

    Example:
        >>> GatedMlp(64, 192).tensors["mlpwo"]
        64
    """

    embed_dim: int
    width: int
    activation: str = "silu"

    @property
    def has_gate(self) -> bool:
        """Returns whether the input is multiplied by two matrices, `gate` and `up`."""
        return True

    @property
    def tensors(self) -> dict[str, int]:
        """Returns the channels per token of every tensor that a policy may keep, by name."""
        return {"mlpwi_0": self.width, "mlpwi_1": self.width, "mlpwo": self.embed_dim}

    def weights(self, *, branches: int, dtype: Any) -> dict[str, Weight]:
        """Returns abstract weights: `gate` and `up` [D, F], and `down` [F, D].

        `down` starts smaller by the square root of `branches`, the residual branches of the model.
        """
        D, F, _ = self
        return {
            "gate": matrix((D, F), ("embed", "mlp"), D, dtype),
            "up": matrix((D, F), ("embed", "mlp"), D, dtype),
            "down": matrix((F, D), ("mlp", "embed"), F * branches, dtype),
        }

    def run(
        self, w: PyTree, x: Float[Array, "b T D"], constrain: Constrain, project: Projection
    ) -> Float[Array, "b T D"]:
        """Computes the MLP of every token."""
        gate, up = (constrain(project(x, w[name]), _HIDDEN) for name in ("gate", "up"))
        gate, up = checkpoint_name(gate, "mlpwi_0"), checkpoint_name(up, "mlpwi_1")
        activate = getattr(jax.nn, self.activation)
        return checkpoint_name(project(activate(gate) * up, w["down"]), "mlpwo")
