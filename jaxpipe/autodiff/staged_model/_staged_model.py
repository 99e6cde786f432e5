"""Defines the model that every engine runs: three pure functions, and weights in three groups.

weights      = {"embed": ..., "stages": leaves with stage dims in front, "head": ...}
batch_inputs = pytree of [M, ...] arrays that every stage may read: tokens, positions, segment ids,
               targets
keys         = pytree of leaves with stage dims in front that a stage is given besides its weights:
               dropout keys, a mask of its layers; or () without any

Losses are sums. `loss` returns the contribution of one microbatch to the loss of the batch: its
target weights are divided by those of the whole batch beforehand. An engine therefore only adds up
the contributions of microbatches, and never scales a loss or a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from ...ir.graph import any_equation, pvary_like
from ._past import Past


class HandOver(NamedTuple):
    """Converts x between the form that stages take and the form that ranks send each other.

    It is for one boundary of stages. Both forms are trees of [d, b, ...] arrays, of d pieces.

    Attributes:
        take: From x to what is sent.
        restore: From what is sent to x: the inverse of `take`.
    """

    take: Callable[[Any], Any]
    restore: Callable[[Any], Any]


Aux = dict[str, Array]
"""Auxiliary losses and metrics by name: scalars that are summed over microbatches, and over stages
if stages return them. A metric of `loss` may be an array; engines return it as [M, ...], stacked
over microbatches and not summed."""


class BoundaryOfSlices(NamedTuple):
    """An embedding and a loss that may run on the slices of sequences that devices have.

    Attributes:
        embed: As `StagedModel.embed`, of a slice of its inputs.
        loss: As `StagedModel.loss`, of slices, whose losses and metrics add up. None: it must be
            given whole sequences.
        axis: The automatic axis of the mesh that divides sequences.
        dim: The dim of tokens in x, and in those leaves of the inputs that have so many dims and
            are divisible by the axis.
    """

    embed: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any, Any], tuple[Any, Aux]] | None
    axis: str
    dim: int

    def specs(self, tree: Any) -> Any:
        """Returns the specs of the leaves of inputs, or of x, on the mesh in context."""
        size = jax.sharding.get_abstract_mesh().shape[self.axis]

        def spec(leaf: Any) -> PartitionSpec:
            has_tokens = leaf.ndim > self.dim and leaf.shape[self.dim] % size == 0
            return PartitionSpec(*[None] * self.dim, self.axis) if has_tokens else PartitionSpec()

        return jax.tree.map(spec, tree)


@dataclass(frozen=True)
class StagedModel:
    """A model as three pure functions of one microbatch.

    Attributes:
        embed: `(weights["embed"], inputs_m) -> x`, the input of the first stage: any pytree.
        stage: `(weights of one stage, x, inputs_m, rng) -> (y, aux)`. y has the structure, shapes
            and dtypes of x. rng has the leaves of `keys` for this stage, with the index of the
            microbatch folded into random keys. `aux["loss"]`, if present, is added to the loss (a
            load-balance loss, for example); all other entries become metrics. A stage without them
            may return y alone.
        loss: `(boundary, y, inputs_m) -> (loss, metrics)` with boundary = `{"head":
            weights["head"]}`, and also `"embed"` if the model is tied. Metrics that are arrays are
            [d, ...] for the d pieces of rows of a microbatch.
        tied: Whether `loss` reads the weights of the embedding too.
        vocab_parallel_loss: `(boundary, y, inputs_m, axis) -> ((loss, metrics), (boundary_grads,
            dy))`: the same loss, computed by all ranks of an axis together, and its gradients. All
            ranks have the same arguments. The loss, the metrics and the gradients by `boundary` are
            contributions that add up over the axis; the gradient dy by y is complete on each rank.
        bind: From `weights["constants"]` to the model whose embedding and loss read them. They are
            arrays that are never differentiated. None: there are no such arrays.
        sliced_stage: `(weights of one stage, x, inputs, rng, past) -> (y, aux, past)`: the stage on
            one slice of the sequences of a microbatch. `past` is a `Past` with the state that its
            layers carry from slice to slice; leaves may have dims in front of those that layers
            see. `stage` runs whole sequences. None: the model cannot be sliced.
        hand_overs: [num_stages + 1] conversions of x in front of every stage and of the loss, for
            programs of ranks; one program hands over x. None: these do too.
        of_slices: How `embed` and `loss` run where devices have slices of sequences. None: they
            must be given whole sequences.
        mark_idle: `(inputs_m, busy) -> inputs_m`: tells a stage whether its results are used, so
            that a `jax.custom_vjp` that maps zeros to other numbers adds nothing in idle ticks.
            By default the inputs stay as they are.

    Example:
        >>> model = StagedModel(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     stage=lambda w, x, batch, rng: x + w,
        ...     loss=lambda boundary, y, batch: (jnp.sum(y * boundary["head"]), {}),
        ... )
        >>> model.tied
        False
    """

    embed: Callable[[Any, Any], Any]
    stage: Callable[[Any, Any, Any, Any], tuple[Any, Aux]]
    loss: Callable[[Any, Any, Any], tuple[Float[Array, ""], Aux]]
    tied: bool = False
    vocab_parallel_loss: Callable[[Any, Any, Any, str], tuple[Any, Any]] | None = None
    bind: "Callable[[Any], StagedModel] | None" = None
    sliced_stage: Callable[[Any, Any, Any, Any, Past], tuple[Any, Aux, Past]] | None = None
    hand_overs: Sequence[HandOver] | None = None
    of_slices: BoundaryOfSlices | None = None
    mark_idle: Callable[[Any, Any], Any] = lambda inputs_m, busy: inputs_m

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", with_aux(self.stage))

    def boundary(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Returns the weights that `loss` reads: the head's, and the embedding's if tied."""
        return {name: weights[name] for name in ("head", *(("embed",) if self.tied else ()))}

    def stage_of(self, index: int) -> Callable[[Any, Any, Any, Any], tuple[Any, Aux]]:
        """Returns a stage that is given, and returns, what programs of ranks send.

        Args:
            index: The stage, in forward order, from 0.

        Returns:
            A function like `stage`.
        """
        if self.hand_overs is None:
            return self.stage
        before, behind = self.hand_overs[index : index + 2]

        def stage(weights: Any, x: Any, inputs_m: Any, rng: Any) -> tuple[Any, Aux]:
            y, aux = self.stage(weights, before.restore(x), inputs_m, rng)
            return behind.take(y), aux

        return stage

    def past_of_slices(self, num_slices: int, *examples: Any) -> tuple[Past, tuple[int, ...], int]:
        """Traces `sliced_stage` for what slices of a sequence carry.

        Args:
            num_slices: The number of slices of a sequence.
            *examples: Weights, an activation, inputs and keys of one slice, or shapes of them.

        Returns:
            (shapes of the state, the dim of positions in every leaf, the positions of a slice).

        Raises:
            ValueError: If the model has no such stage, or leaves have parts of other lengths.
        """
        if self.sliced_stage is None:
            raise ValueError(
                "`schedule` has slices of sequences and `model.sliced_stage` is None: the layers "
                "do not say what they carry from slice to slice. Give one, or a schedule of whole "
                "microbatches."
            )
        _, _, past = jax.eval_shape(self.sliced_stage, *examples, Past(num_slices=num_slices))
        pairs = zip(jax.tree.leaves(past.earlier), jax.tree.leaves(past.new), strict=True)
        lengths_and_dims = [
            (part.shape[i], i)
            for whole, part in pairs
            for i, (n, t) in enumerate(zip(whole.shape, part.shape, strict=True))
            if n != t
        ]
        lengths = {length for length, _ in lengths_and_dims}
        if len(lengths) != 1:
            raise ValueError(
                f"The slices of a sequence carry parts of {sorted(lengths)} positions to the next "
                "slice. `past.append` takes leaves [b, t, ...] with the t positions of the slice."
            )
        return past, tuple(dim for _, dim in lengths_and_dims), lengths.pop()

    def with_constants(self, constants: Any) -> "StagedModel":
        """Returns the model whose embedding and loss read `constants`."""
        return self if self.bind is None else self.bind(constants)


_MARK = "returns_aux"
"""Attribute by which `with_aux` recognizes a function that it has returned."""


def with_aux(stage: Callable) -> Callable[[Any, Any, Any, Any], tuple[Any, Aux]]:
    """Returns `stage` as all engines call it: its result is always a pair (y, aux).

    A stage may return y alone, which is a tree of the same structure as x, or (y, None); then `aux`
    is empty. y must have the structure, shapes and dtypes of x.
    """
    if getattr(stage, _MARK, False):
        return stage

    @wraps(stage)
    def run(weights: Any, x: Any, inputs_m: Any, rng: Any) -> tuple[Any, Aux]:
        y, aux = _outputs(stage(weights, x, inputs_m, rng), x)
        return like_input(y, x), aux

    setattr(run, _MARK, True)
    return run


def _outputs(returned: Any, x: Any) -> tuple[Any, Aux]:
    if jax.tree.structure(returned) == jax.tree.structure(x):
        return returned, {}
    if isinstance(returned, tuple) and len(returned) == 2:
        y, aux = returned
        if aux is None or isinstance(aux, dict):
            return y, aux or {}
    raise ValueError(
        f"`stage` was given {_described(x)} and returned {_described(returned)}. It must return y, "
        "of the same structure, shapes and dtypes, or (y, aux) with a dict of scalars `aux`."
    )


def like_input(y: Any, x: Any) -> Any:
    """Returns the result `y` of a stage with the type of `x`.

    On explicit axes it is resharded, and constants vary over the manual axes over which `x` does.
    """
    _check_like(x, y)
    return jax.tree.map(_typed_like, y, x)


def _check_like(x: Any, y: Any) -> None:
    if jax.tree.structure(x) != jax.tree.structure(y) or _described(x) != _described(y):
        raise ValueError(
            f"`stage` was given {_described(x)} and returned {_described(y)}. It must return what "
            "the next stage can take: the same structure, shapes and dtypes."
        )


def _described(tree: Any) -> str:
    """Returns a text of the tree with a dtype and a shape in place of each leaf."""

    def type_of_leaf(x: Any) -> str:
        kind = jax.typeof(x)
        return f"{kind.dtype}{list(kind.shape)}"

    return str(jax.tree.map(type_of_leaf, tree)).replace("'", "")


def _typed_like(y: Any, x: Any) -> Any:
    mesh, aval = jax.sharding.get_abstract_mesh(), jax.typeof(x)
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        y = jax.sharding.reshard(y, aval.sharding.spec)
    return pvary_like(aval, y)


def has_custom_vjp(function: Callable, *arguments: Any) -> bool:
    """Returns whether tracing a function finds a `jax.custom_vjp`, which need not be linear."""
    program = jax.make_jaxpr(function)(*arguments)
    return any_equation(program, lambda e: e.primitive.name == "custom_vjp_call")
