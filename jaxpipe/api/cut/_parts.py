"""The three functions of a cut module: what a cut at hooks and a cut at a scan have in common.

Layers may return more than x. What they return besides, here called extras, is a list of arrays,
and the loss may be a sum of what it is without extras and of extras times constants: a layer then
returns its terms as auxiliary losses. A metric may be a sum of extras alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._dependence import dependent_inputs, pruned
from .._losses import Weighted, loss_parts
from .._pieces import shape_of

Outer = Mapping[str, Any]
"""Parameters outside of layers, by name."""

Weights = dict[str, list[np.ndarray | None]]
"""For the loss and each metric what every extra of a layer is multiplied by, None for 0."""


@dataclass(frozen=True, eq=False)
class CutModule:
    """A module of a library, and how it is called.

    Attributes:
        run: `(outer, layers, batch, key, hook) -> output` calls the module with the parameters
            `outer`, and `layers` by index, and calls `hook(LayerCall)` in place of every layer. For
            layers in one stack `(outer, stack, batch, key) -> output`.
        split: `params -> (outer, list of the parameters of every layer)`, or their stack.
        join: The inverse of `split`.
        outer: Shapes and dtypes of parameters outside of layers, by name.
        layers: The parameters of every layer; or of the stack, with leaves [L, ...].
        names: The names of layers, for errors.
        takes_key: Whether the call may read a dropout key.
        by_row: Whether `run` takes one row of a batch.
        shared: The names of outer parameters that layers read.
        by_calls: Whether each call of one of these modules is a layer, and not each module.
    """

    run: Callable[..., Any]
    split: Callable[[PyTree], tuple[dict[str, Any], Any]]
    join: Callable[[dict[str, Any], Any], PyTree]
    outer: dict[str, Any]
    layers: Any
    names: list[str]
    takes_key: bool
    by_row: bool = False
    shared: frozenset[str] = frozenset()
    by_calls: bool = False


@dataclass(frozen=True, eq=False)
class Parts:
    """The embedding, a layer and the loss of a cut module.

    Attributes:
        output: `(output of the module, batch) -> arrays [rows, ...]`: what `apply` returns. None:
            the output of the module.
        forms: The facts about batches, by their form, of those that were seen.
        kinds: The kind of every layer, numbered in the order in which they appear; () for one kind.
    """

    cut: CutModule
    loss: Callable
    output: Callable | None
    forms: dict[Any, Any] = field(default_factory=dict)
    kinds: tuple[int, ...] = ()

    def with_kinds(self, batch: PyTree) -> tuple["Parts", list[str]]:
        """Finds the kinds of layers on a batch; returns parts that have them, and their names."""
        del batch  # a scan runs one kind
        return self, ["layer"]

    @property
    def shared_shapes(self) -> dict[str, Any]:
        """Returns the shapes of outer parameters that layers read."""
        return {name: self.cut.outer[name] for name in sorted(self.cut.shared)}

    @property
    def num_kinds(self) -> int:
        """Returns the number of kinds of layers."""
        return 1 + max(self.kinds, default=0)

    @abstractmethod
    def layer_shapes(self, kind: int) -> PyTree:
        """Returns the shapes and dtypes of the parameters of a layer."""

    @abstractmethod
    def embed(self, outer: Outer, batch: PyTree, key: Any) -> Any:
        """Returns the input of the first layer, of all rows."""

    def x_of_kind(self, kind: int, batch: PyTree, key: Any) -> PyTree:
        """Returns the shapes of x that enters layers of a kind."""
        del kind
        return self.x_of_loss(batch, key)

    def x_of_loss(self, batch: PyTree, key: Any) -> PyTree:
        """Returns the shapes of x that leaves the last layer: those of x everywhere."""
        return jax.eval_shape(lambda *given: self.embed(*given), self.cut.outer, batch, key)

    @abstractmethod
    def layer_and_extras(
        self, w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any, kind: int = 0
    ) -> tuple[PyTree, list[Any], dict[str, Any]]:
        """Returns the output of a layer, its extras, and auxiliary losses of its own."""

    @abstractmethod
    def extras(self, batch: PyTree) -> list[list[jax.ShapeDtypeStruct]]:
        """Returns the shapes of extras of all n layers of each kind, [n, ...] or [rows, n, ...]."""

    @abstractmethod
    def module_output(
        self, outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any
    ) -> PyTree:
        """Returns the output of the module, from what left the last layer and all extras."""

    def layer(
        self, w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any, kind: int = 0
    ) -> Any:
        """Returns the output of a layer; as (x, aux) if there are auxiliary losses or metrics."""
        x, extras, aux = self.layer_and_extras(w, shared, x, batch, key, kind)
        counts = [len(of_kind) for of_kind in self.extras(batch)]
        first = sum(counts[:kind])
        for name, weights in self.weights(batch).items():
            pairs = zip(weights[first : first + counts[kind]], extras, strict=True)
            terms = [jnp.sum(c * extra) for c, extra in pairs if c is not None]
            if terms or counts[kind]:
                aux = aux | {name: sum(terms) + aux.get(name, 0.0)}
        return (x, aux) if aux else x

    def loss_of(self, outer: Outer, x: PyTree, batch: PyTree, key: Any) -> Any:
        """Returns the loss, from what left the last layer, without the terms of layers."""
        weights = self.weights(batch)
        zeros = [jnp.zeros(s.shape, s.dtype) for s in chain(*self.extras(batch))]

        def with_loss(outer: Outer, batch: PyTree, x: PyTree, key: Any) -> Any:
            parts = loss_parts(self.loss(self.module_output(outer, batch, x, zeros, key), batch))
            is_mean = parts.weight is None
            loss = parts.total if is_mean else Weighted(parts.total, parts.weight)
            kept = {name: m for name, m in parts.metrics.items() if name not in weights}
            return (loss, kept) if kept else loss

        return self.read(with_loss, outer, batch, x, key)[0]

    def output_of(self, outer: Outer, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        """Returns the result of `apply`, from the output of the last layer."""

        def check(batch: PyTree) -> None:
            extras = [*chain(*self.extras(batch))]
            shapes = jax.tree.map(shape_of, (x, batch))
            sources, _ = dependent_inputs(self._output, extras, self.cut.outer, *shapes, key)
            if any(any(jax.tree.leaves(used[0])) for used in sources):
                raise ValueError(
                    "The output of the module depends on what layers return besides x, and x alone "
                    "leaves the layers of a pipeline. Give `output=lambda returned, batch: ...`, "
                    "which takes the other results of the module, such as its logits."
                )

        self.of_form("output", batch, check)
        return self.read(self._output_without_extras, outer, x, batch, key)[0]

    def _output(
        self, extras: list[Any], outer: Outer, x: PyTree, batch: PyTree, key: Any
    ) -> PyTree:
        returned = self.module_output(outer, batch, x, extras, key)
        return returned if self.output is None else self.output(returned, batch)

    def _output_without_extras(self, outer: Outer, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        zeros = [jnp.zeros(s.shape, s.dtype) for s in chain(*self.extras(batch))]
        return self._output(zeros, outer, x, batch, key)

    def weights(self, batch: PyTree) -> Weights:
        """Returns the factors of the extras of a layer, for the loss and each metric."""
        return self.of_form("weights", batch, self._weights)

    def _weights(self, batch: PyTree) -> Weights:
        batch, shapes = jax.tree.map(shape_of, batch), [*chain(*self.extras(batch))]
        if not shapes:
            return {}
        key = shape_of_key(self.cut.takes_key)
        x = self.x_of_loss(batch, key)

        def parts(extras: list[Any], outer: Outer, batch: PyTree, x: PyTree, key: Any) -> Any:
            loss = loss_parts(self.loss(self.module_output(outer, batch, x, extras, key), batch))
            return {"loss": loss.total, **loss.metrics}, loss.weight is None

        others = self.cut.outer, batch, x, key
        return _weights_of_extras(parts, shapes, others, int(self.cut.by_row))

    def of_form(self, name: Hashable, batch: PyTree, find: Callable) -> Any:
        """Returns `find(batch)`, which is found once for batches of one form."""
        leaves, tree = jax.tree.flatten(batch)
        dtypes = tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
        form = name, tree, dtypes
        if form not in self.forms:
            self.forms[form] = find(batch)
        return self.forms[form]

    def read(self, function: Callable, outer: Outer, *arguments: PyTree) -> tuple[Any, set[str]]:
        """Runs what a function needs for its result; returns also the outer parameters it reads."""
        all_outer = self.cut.outer | dict(outer)
        part, used = pruned(function, all_outer, *arguments)
        names = {name for name, tree in used[0].items() if any(jax.tree.leaves(tree))}
        missing = sorted(names - set(outer))
        if missing:
            raise ValueError(
                f"Layers, or the loss, read the parameters {', '.join(missing[:8])}, which are "
                "not theirs. Pass what layers share as an argument. If `batch=` is given, give one "
                "of the same form as the batches of the training."
            )
        return part(all_outer, *arguments), names

    def uses(self, batch: PyTree) -> tuple[set[str], set[str], list[bool]]:
        """Returns the parameters of embedding, and of loss and output; and who reads a key."""
        cut, key = self.cut, shape_of_key(self.cut.takes_key)
        used: list[tuple[set[str], bool]] = []

        def call(function: Callable, *arguments: PyTree) -> None:
            _, is_used = pruned(function, *arguments)
            names = {n for n, tree in is_used[0].items() if any(jax.tree.leaves(tree))}
            used.append((names, any(jax.tree.leaves(is_used[-1]))))

        call(self.embed, cut.outer, batch, key)
        for kind in range(self.num_kinds):

            def layer(w: Outer, x: PyTree, batch: PyTree, key: Any, kind: int = kind) -> Any:
                return self.layer_and_extras(w["layer"], w["shared"], x, batch, key, kind)[0]

            weights = {"layer": self.layer_shapes(kind), "shared": self.shared_shapes}
            call(layer, weights, self.x_of_kind(kind, batch, key), batch, key)
        x = self.x_of_loss(batch, key)
        call(self.loss_of, cut.outer, x, batch, key)
        try:
            call(self._output_without_extras, cut.outer, x, batch, key)
        except TypeError:
            if self.output is not None:
                raise
            # A module may return what is no array, which matters to `apply` alone.
            used.append((set(), cut.takes_key))
        return used[0][0], used[-2][0] | used[-1][0], [reads_key for _, reads_key in used]

    def over_rows(self, function: Callable, num_shared: int) -> Callable:
        """Returns a function of all rows, whose last argument is a key."""
        if not self.cut.by_row:
            return function

        def run(*arguments: PyTree) -> PyTree:
            *trees, key = arguments
            rows = jnp.shape(jax.tree.leaves(trees[num_shared])[0])[0]
            keys = None if key is None else jax.random.split(key, rows)
            axes = (None,) * num_shared + (0,) * (len(trees) - num_shared)
            return jax.vmap(function, in_axes=(*axes, None if key is None else 0))(*trees, keys)

        return run

    def row(self, batch: PyTree) -> PyTree:
        """Returns the shapes of what `run` takes of a batch: of one row, or of all."""
        return jax.tree.map(partial(shape_of, skipped=int(self.cut.by_row)), batch)

    def with_layers_and_rows(
        self, shapes: Sequence[Any], num_layers: int, batch: PyTree
    ) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of extras of some layers, from those of one layer and row."""
        lead = (num_layers,)
        if self.cut.by_row:
            lead = jnp.shape(jax.tree.leaves(batch)[0])[0], *lead
        return [jax.ShapeDtypeStruct((*lead, *s.shape), s.dtype) for s in shapes]


def packed(x: PyTree, carried: list[Any]) -> PyTree:
    """Returns x, together with arrays that travel with it."""
    return {"x": x, "carried": carried} if carried else x


def unpacked(x: PyTree, carried: Sequence[Any]) -> tuple[PyTree, list[Any]]:
    """Returns the tree that `packed` has packed."""
    return (x["x"], x["carried"]) if carried else (x, [])


def or_none(key: Any) -> Any:
    """Returns a key, or None for ()."""
    return key if jax.tree.leaves(key) else None


def shape_of_key(takes_key: bool) -> Any:
    """Returns the shape of a random key, or None."""
    return jax.eval_shape(partial(jax.random.key, 0)) if takes_key else None


_GIVE_A_STACK = (
    "Give the attribute with a list of layers, or with a stack of them, as `vmap` makes it: arrays "
    "[layers, ...]."
)


def num_stacked(
    stack: Mapping[str, Any],
    what: str = "a module with the arrays",
    way_out: str = _GIVE_A_STACK,
) -> int:
    """Returns the number of layers in a stack of their parameters; errors say what it is."""
    sizes = {leaf.shape[:1] for leaf in stack.values()}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(f"{name} {leaf.shape}" for name, leaf in list(stack.items())[:8])
        raise ValueError(f"`layers` names {what} {shapes or 'none'}. {way_out}")
    return sizes.pop()[0]


def refuse_state(names: Sequence[str]) -> None:
    """Raises a `ValueError` if a module has state besides parameters."""
    if names:
        raise ValueError(
            f"The module has the state {', '.join(names[:8])}. A pipeline has several "
            "microbatches in different layers at the same time, so layers have no state: normalize "
            "without batch statistics, and run without caches."
        )


_ADVICE = (
    "Layers run at other times than the loss, so it may only add what they return, times "
    "constants: such as their sum or mean over layers."
)


def _weights_of_extras(
    parts: Callable, extras: Sequence[jax.ShapeDtypeStruct], others: tuple, axis: int
) -> Weights:
    """Finds the constants by which a loss and its metrics depend on extras of layers.

    `parts` is `(extras, *others) -> (scalars by name, whether the loss is a mean)`; `axis` is the
    dim of layers in extras.
    """
    is_mean = True

    def scalars(extras: list[Any], *others: Any) -> dict[str, Any]:
        nonlocal is_mean
        by_name, is_mean = parts(extras, *others)
        return by_name

    extras = list(extras)
    shapes = jax.eval_shape(scalars, extras, *others)
    sources, _ = dependent_inputs(scalars, extras, *others)
    weights: Weights = {}
    for name, (of_extras, *of_others) in zip(sorted(shapes), sources, strict=True):
        if not any(of_extras):
            continue
        if shapes[name].shape:
            raise ValueError(
                f"The metric {name!r} of `loss` is an array that depends on what layers return "
                "besides x. Return a scalar of it, or make what a row needs a part of x."
            )
        if name != "loss" and any(jax.tree.leaves(of_others)):
            raise ValueError(
                f"The metric {name!r} of `loss` depends on what layers return besides x and on "
                "more. Return what the layers make of it as a metric of its own."
            )
        if name == "loss" and not is_mean:
            raise ValueError(
                "`loss` returns a `Weighted`, and its total depends on what layers return "
                "besides x. Return a mean: what layers return is averaged over microbatches."
            )
        weights[name] = _factors(scalars, name, of_extras, extras, others, axis)
        if name != "loss":
            _check_sum(scalars, name, extras, others)
    return weights


def _check_sum(scalars: Callable, name: str, extras: list[Any], others: tuple[PyTree, ...]) -> None:
    """Raises a `ValueError` if a metric that depends on extras alone adds a constant to them."""

    def at_zero(*others: Any) -> Any:
        return scalars([jnp.zeros(s.shape, s.dtype) for s in extras], *others)[name]

    constant, _ = pruned(at_zero, *others)
    with jax.ensure_compile_time_eval():
        value = float(constant(*others))
    if value:
        raise ValueError(
            f"The metric {name!r} of `loss` is {value} if layers return zeros besides x. Return "
            "the sum of what they return, times constants, and add the constant outside."
        )


def _factors(
    scalars: Callable,
    name: str,
    used: list[bool],
    extras: list[Any],
    others: tuple[PyTree, ...],
    axis: int,
) -> list[np.ndarray | None]:
    """Returns the factors of every extra of a layer for one scalar."""
    ids = [i for i, is_used in enumerate(used) if is_used]
    if not all(jnp.issubdtype(extras[i].dtype, jnp.floating) for i in ids):
        raise ValueError(f"`loss` depends on integers that layers return. {_ADVICE}")

    def gradients(extras: list[Any], *others: Any) -> list[Any]:
        def scalar(read: list[Any]) -> Any:
            all_extras = list(extras)
            for i, value in zip(ids, read, strict=True):
                all_extras[i] = value
            return scalars(all_extras, *others)[name]

        return jax.grad(scalar)([extras[i] for i in ids])

    constant, reads = pruned(gradients, extras, *others)
    if any(jax.tree.leaves(reads)):
        raise ValueError(f"`loss` computes {name!r} from what layers return besides x. {_ADVICE}")
    with jax.ensure_compile_time_eval():
        values = [np.asarray(value) for value in constant(extras, *others)]
    factors: list[np.ndarray | None] = [None] * len(extras)
    for i, value in zip(ids, values, strict=True):
        first = np.take(value, [0], axis)
        if not np.array_equal(np.broadcast_to(first, value.shape), value):
            raise ValueError(
                f"`loss` weighs what layers return besides x by other factors for other layers, "
                f"in {name!r}. Layers of one pipeline run one program: let each multiply its own."
            )
        factors[i] = np.squeeze(first, axis)
    return factors
