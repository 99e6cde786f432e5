"""Defines the model that users write: an embedding, one layer and a loss, as plain functions.

params = {"embed": ..., "layers": ..., "head": ...}, where "layers" is a list of L trees of equal
structure, or one tree with leaves [L, ...]; and "shared" if all layers share parameters. `batch` is
any pytree of arrays [B, ...].
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jaxtyping import PyTree


def _identity(tree: Any) -> Any:
    return tree


@dataclass(frozen=True)
class Model:
    """A model as plain functions. Each runs on one microbatch of b rows.

    A function that takes one argument more than is said here is given a dropout key as its last
    argument. Keys differ by layer and microbatch, and are the same in every engine.

    Attributes:
        embed: `(params["embed"], batch) -> x`: what enters the first layer, any pytree.
        layer: `(params of one layer, x, batch) -> x`, with the structure, shapes and dtypes of x;
            or `-> (x, aux)` with a dict of scalars, which are summed over layers and averaged over
            microbatches. `aux["loss"]` is added to the loss; all others become metrics. For several
            kinds of layers a dict of functions in the order in which kinds run, such as
            `{"encoder": encoder_layer, "decoder": decoder_layer}`; `params["layers"]` then has the
            same names, with the layers of each kind.
        loss: `(params["head"], x, batch) -> loss`. The loss is a scalar, the mean over rows that
            count equally; or a pair `(total, weight)`, and the loss of the batch is the sum of
            totals divided by the sum of weights. `(loss, metrics)` with a dict of scalars is
            accepted for both; metrics are averaged over microbatches.
        tied: Whether `loss` also reads the parameters of the embedding. Its first argument is then
            `{"head": params["head"], "embed": params["embed"]}`.
        to_groups: From the user's tree of parameters to `{"embed", "layers", "head"}`. The default
            takes a tree of that form.
        from_groups: The inverse of `to_groups`.
        shared: Whether all layers also read `params["shared"]`, parameters that they share. The
            first argument of `layer` is then `{"layer": params of one layer, "shared":
            params["shared"]}`.

    Example:
        >>> model = Model(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     layer=lambda w, x, batch: x + w,
        ...     loss=lambda w, x, batch: (x * w).mean(),
        ... )
        >>> model.tied
        False
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    loss: Callable[..., Any]
    tied: bool = False
    to_groups: Callable[[PyTree], dict[str, PyTree]] = _identity
    from_groups: Callable[[dict[str, PyTree]], PyTree] = _identity
    shared: bool = False

    def __post_init__(self) -> None:
        for name, count in (("embed", 2), ("layer", 3), ("loss", 3)):
            given = getattr(self, name)
            if name == "layer" and isinstance(given, Mapping):
                keyed: Any = {kind: with_key(f, f"layer[{kind!r}]", 3) for kind, f in given.items()}
            else:
                keyed = with_key(given, name, count)
            object.__setattr__(self, name, keyed)
        if not self.layer:
            raise ValueError("`layer` is empty. Give a function for each kind of layers.")

    @property
    def has_kinds(self) -> bool:
        """True if layers are of several kinds."""
        return isinstance(self.layer, Mapping)

    @property
    def layer_functions(self) -> tuple[Callable[..., Any], ...]:
        """Returns the function of a layer of each kind."""
        return tuple(self.layer.values()) if isinstance(self.layer, Mapping) else (self.layer,)


def with_key(function: Callable, name: str, count: int) -> Callable:
    """Returns a function that takes a key behind its `count` arguments, needed or not.

    Args:
        function: Takes `count` arguments, or a key as one more.
        name: Its name, for errors.
        count: The number of arguments without the key.

    Returns:
        A function of `count` arguments and a key, whose attribute `takes_key` says whether
        `function` reads the key.

    Raises:
        ValueError: If `function` takes another number of arguments.
    """
    if hasattr(function, "takes_key"):
        return function
    if not callable(function):
        raise ValueError(f"`{name}` is {function!r}. Give a function of {count} arguments.")
    takes_key = _takes_one_more(function, name, count)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*(arguments if takes_key else arguments[:count]))

    call.takes_key = takes_key  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _takes_one_more(function: Callable, name: str, count: int) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function without a signature, such as a builtin
        return False
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    allowed = sum(p.kind in kinds for p in parameters)
    if len(required) > count + 1 or allowed < count:
        names = ", ".join(p.name for p in parameters)
        raise ValueError(
            f"`{name}` takes ({names}). Give a function of {count} arguments, or of {count + 1}, "
            "of which the last one is a dropout key."
        )
    return len(required) == count + 1
