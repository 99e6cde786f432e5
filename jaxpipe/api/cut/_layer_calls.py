"""Calls of layers inside the call of a module, and the checks that layers form a chain.

The first argument of a layer is x. The other arguments are arrays, keys, or static: anything that
is no array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._pieces import shape_of


@dataclass(frozen=True)
class LayerCall:
    """The call of one layer, which a hook receives in place of the layer.

    Attributes:
        index: The index of the layer, from 0.
        args: The positional arguments of the call.
        kwargs: Its arguments by name.
        run: Runs the layer on other arguments of the same form.
        static: The layer without its parameters: equal for layers of equal programs.
        sown: Auxiliary losses and metrics of the last `run` that the layer did not return.
        attributes: The layer's class and its settings by name, which name the kind of the layer.
    """

    index: int
    args: tuple
    kwargs: dict[str, Any]
    run: Callable[..., Any]
    static: Any = None
    sown: Callable[[], dict[str, Any]] = dict
    attributes: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class LayerArguments:
    """The arguments of a layer, taken apart.

    Attributes:
        x: The first argument, by position or by name.
        leaves: The leaves of all others.
        names: The paths of these leaves, for errors.
        tree: The structure of the arguments without x.
    """

    x: PyTree
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    tree: Any

    @property
    def array_ids(self) -> list[int]:
        """Returns the indices of leaves that are arrays and no keys."""
        ids = range(len(self.leaves))
        return [i for i in ids if _is_array(self.leaves[i]) and not self._is_key(i)]

    @property
    def form(self) -> Any:
        """Returns the form of a call: structure, shapes of arrays, and other values."""
        arrays = jax.tree.map(shape_of, self.x)
        others = [shape_of(leaf) if _is_array(leaf) else leaf for leaf in self.leaves]
        return jax.tree.structure(self.x), jax.tree.leaves(arrays), self.tree, others

    def replace(self, x: PyTree, arrays: dict[int, Any], key: Any) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of another call of the layer."""
        leaves = [arrays.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        if key is not None:
            leaves = [key if self._is_key(i) else leaf for i, leaf in enumerate(leaves)]
        first, args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return ((), {first: x} | kwargs) if first else ((x, *args), kwargs)

    def _is_key(self, index: int) -> bool:
        leaf = self.leaves[index]
        if not _is_array(leaf):
            return False
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return True
        is_raw = leaf.dtype == jnp.uint32 and leaf.shape[-1:] in ((2,), (4,))
        return is_raw and "['key']" in self.names[index]


def arguments_of(call: LayerCall) -> LayerArguments:
    """Takes the arguments of a layer apart."""
    kwargs = dict(call.kwargs)
    if not call.args and not kwargs:
        raise ValueError("A layer is called without arguments. The first one must be x.")
    first = "" if call.args else next(iter(kwargs))
    x = kwargs.pop(first) if first else call.args[0]
    rest = first, call.args[1:], kwargs
    leaves, tree = jax.tree_util.tree_flatten_with_path(rest, is_leaf=lambda leaf: leaf is None)
    names = tuple(jax.tree_util.keystr(path[1:]) for path, _ in leaves)
    return LayerArguments(x, tuple(leaf for _, leaf in leaves), names, tree)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def layer_of(path: tuple[Any, ...], layers: Sequence[tuple[Any, ...]]) -> int | None:
    """Returns the layer that has a parameter, by the paths of both; None if none has it."""
    return next((i for i, prefix in enumerate(layers) if path[: len(prefix)] == prefix), None)


def is_setting(value: Any) -> bool:
    """Returns whether an attribute of a layer is a plain value, such as a window or a name."""
    if isinstance(value, tuple):
        return all(map(is_setting, value))
    return value is None or isinstance(value, bool | int | float | str)


def read_setting(layer: Any, name: str) -> Any:
    """Returns a setting of a layer that the call of its module reads."""
    value = getattr(layer, name)
    if is_setting(value):
        return value
    error = AttributeError if name.startswith("_") else ValueError
    raise error(
        f"The call of the module reads `{name}` of a layer, which is not there in a pipeline. "
        "Only `layer(x, ...)` and settings that are no arrays are."
    )


def named_value(value: Any) -> Any:
    """Returns a setting as it is named: functions and classes without their addresses."""
    return value if is_setting(value) else getattr(value, "__name__", type(value).__name__)


def x_and_extras(result: Any, x: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Returns the x that a layer returned, and (what it returned besides x,) or ()."""
    tree = jax.tree.structure(x)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if jax.tree.structure(result) != tree and is_pair and jax.tree.structure(result[0]) == tree:
        return result[0], result[1:]
    return result, ()


def shapes_of(tree: PyTree) -> PyTree:
    """Returns the shapes of arrays and numbers."""
    return jax.tree.map(lambda leaf: shape_of(leaf), tree)


def zeros_of(shapes: PyTree) -> PyTree:
    """Returns zeros of these shapes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def stand_in(shapes: PyTree, x: PyTree) -> PyTree:
    """Returns x if it has these shapes, else zeros, where only shapes of a result are read."""
    return x if shapes_of(x) == shapes else zeros_of(shapes)


class NoChainError(ValueError):
    """A layer reads something else than what the one before has returned."""


def check_order(order: Sequence[int], names: Sequence[str]) -> None:
    """Raises a `ValueError` if a layer is not called exactly once and in order."""
    if list(order) != list(range(len(names))):
        called = ", ".join(names[i] for i in order[:12]) or "none of them"
        raise ValueError(
            f"The module has the layers {names[0]} to {names[-1]}, and its call runs {called}. A "
            "pipeline needs every layer once, in order. (A layer is called as `layer(x, ...)`.) If "
            "each call is meant to be a layer, say so by a tuple of one name, `layers=('blocks',)`."
        )


def check_chain(
    calls: Sequence[tuple[LayerCall, LayerArguments, PyTree]], names: Sequence[str]
) -> None:
    """Checks that layers run one after the other."""
    check_order([call.index for call, _, _ in calls], names)
    for (_, _, y), (call, now, _), name in zip(calls, calls[1:], names, strict=False):
        if not _same_leaves(y, now.x):
            raise NoChainError(
                f"The first argument of `{names[call.index]}` is not what `{name}` returned: "
                "something runs between them. Give `batch=`, an example of a batch: the layer "
                "that reads it then computes it too. Or move it into the layer."
            )


def check_same_arguments(a: LayerArguments, b: LayerArguments, first: str, name: str) -> None:
    """Raises a `ValueError` if two layers are given different arguments besides x."""
    if a.tree != b.tree:
        raise ValueError(f"`{name}` is called with other arguments than `{first}`.")
    for i, (left, right) in enumerate(zip(a.leaves, b.leaves, strict=True)):
        if i in a.array_ids or _is_array(left) != _is_array(right):
            same = left is right
        else:
            same = _is_array(left) or left is right or bool(left == right)
        if not same:
            raise ValueError(
                f"The argument {a.names[i]} of `{name}` is not that of `{first}`. Layers of one "
                "kind must be given the same: compute it once, before the first layer, or give "
                "`batch=`, an example of a batch, by which kinds are found."
            )


def _same_leaves(a: PyTree, b: PyTree) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
