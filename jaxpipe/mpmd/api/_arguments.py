"""The arguments of a compiled function: checks, their way to the groups, and their donation.

Error messages name paths such as `args[0]['w']` and shapes. They never show the contents of arrays.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ..._input import shorten
from ..ir._program import MpmdProgram, Send
from ._array import MpmdArray
from ._mesh import MpmdSharding

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


@dataclass(frozen=True)
class StaticArguments:
    """The static arguments of a function by name and by index; negative ones count from the end."""

    argnums: frozenset[int]
    argnames: frozenset[str]

    def indices(self, num_args: int) -> frozenset[int]:
        """Returns the indices of the static arguments of `num_args` positional arguments."""
        return frozenset(i + num_args if i < 0 else i for i in self.argnums)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, "Static"]:
        """Returns the dynamic arguments (pytrees of arrays) and the static arguments of a call."""
        if not self.argnums and not self.argnames:
            return (args, kwargs), Static()
        indices = self.indices(len(args))
        dynamic = tuple(x for i, x in enumerate(args) if i not in indices)
        named = {name: x for name, x in kwargs.items() if name not in self.argnames}
        by_key = dict(enumerate(args)) | dict(sorted(kwargs.items()))
        static = {k: x for k, x in by_key.items() if k in indices or k in self.argnames}
        return (dynamic, named), Static(tuple((k, type(x), x) for k, x in static.items()))


@dataclass(frozen=True)
class Static:
    """Index or name, type and value of static arguments: the type tells 1, 1.0 and True apart."""

    items: tuple[tuple[int | str, type, Any], ...] = ()

    def values(self) -> tuple[Any, ...]:
        """Returns the values of the static arguments."""
        return tuple(value for _, _, value in self.items)


def static_arguments(
    fun: Callable[..., Any], argnums: Sequence[int], argnames: Sequence[str]
) -> StaticArguments:
    """Returns the static arguments by index and by name, of which the caller may give either.

    An index adds the name of its parameter and a name the index, if `fun` can be inspected.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except ValueError:
        parameters = []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in parameters if p.kind in kinds]
    any_number = not names or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    prefix = {i % len(names) if i < 0 and not any_number else i for i in argnums}
    by_name = {i for i, name in enumerate(names) if name in argnames}
    names_of_argnums = {name for i, name in enumerate(names) if i in prefix}
    return StaticArguments(frozenset(prefix | by_name), frozenset({*argnames, *names_of_argnums}))


def type_of(leaf: Any) -> Any:
    """Returns the shape and dtype of an array or scalar, and whether the dtype is weak."""
    if isinstance(leaf, jax.Array | MpmdArray | jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))  # keys have no weak type
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def leaves_like(tree: Any, arguments: Arguments) -> list[Any]:
    """Returns the leaves of `arguments`, in the order of `tree`, whose structure they must have."""
    try:
        return tree.flatten_up_to(arguments)
    except ValueError:
        pass
    expected = _paths(tree.unflatten(range(tree.num_leaves)))
    leaves = _paths(arguments)
    missing = [path for path in expected if path not in leaves]
    new = [path for path in leaves if path not in expected]
    differences = [
        f"{what} {_list_paths(paths)}"
        for what, paths in (("they lack", missing), ("they have in addition", new))
        if paths
    ]
    kinds = str(jax.tree.structure(arguments))
    reason = " and ".join(differences) or f"their containers differ: {shorten(kinds, 300)}"
    raise ValueError(
        f"The arguments are not like those that the function was compiled for: {reason}. Compile "
        "it for these arguments, or call the uncompiled function, which compiles again if needed."
    )


def check_types(
    arguments: Arguments, leaves: Sequence[Any], shapes: Sequence[Any], dtypes: Sequence[Any]
) -> None:
    """Checks that arguments have the shapes and dtypes that a function was compiled for."""
    for i, (leaf, shape, dtype) in enumerate(zip(leaves, shapes, dtypes, strict=True)):
        if isinstance(leaf, jax.Array | MpmdArray):
            actual = leaf.shape, leaf.dtype
        else:
            actual = type_of(leaf)[:2]
        if actual[0] != shape or actual[1] != dtype:
            raise ValueError(
                f"`{list(_paths(arguments))[i]}` is {actual[1]}{list(actual[0])}, and the function "
                f"was compiled for {dtype}{list(shape)}. Compile it for this shape and dtype, or "
                "call the uncompiled function, which compiles again if needed."
            )


def check_given_once(arguments: Arguments, leaves: Sequence[Any], donated: Collection[int]) -> None:
    """Checks that the array of a donated argument is not the array of another argument too."""
    if not donated:
        return
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        arrays = leaf.local_arrays if isinstance(leaf, MpmdArray) else [leaf]
        for array in arrays:
            j = first.setdefault(id(array), i)
            if j == i or not isinstance(array, jax.Array) or not {i, j}.intersection(donated):
                continue
            paths = list(_paths(arguments))
            one, other = (j, i) if j in donated else (i, j)
            raise ValueError(
                f"`{paths[one]}` is donated, and `{paths[other]}` is the same array. Results take "
                "the memory of what is donated, so give a copy (`jnp.copy`) as one of them, or "
                "donate neither."
            )


def _paths(arguments: Arguments) -> dict[str, Any]:
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        which, *rest = path
        if getattr(which, "idx", 0):
            name, rest = getattr(rest[0], "key", ""), rest[1:]
        else:
            name = "args"
        leaves[f"{name}{jax.tree_util.keystr(tuple(rest))}"] = leaf
    return leaves


def _list_paths(paths: Sequence[str], most: int = 3) -> str:
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(f"`{path}`" for path in paths[:most]) + more


def broadcast_prefix(prefix: PyTree, tree: PyTree, name: str) -> list[tuple[str, Any]]:
    """Returns the path (`in_specs[0]['w']`) and the spec or sharding of each leaf of `tree`.

    `name` is the user's argument that holds the prefix tree.
    """
    if prefix is None or isinstance(prefix, PartitionSpec | Sharding | MpmdSharding):
        return [(name, prefix)] * len(jax.tree.leaves(tree))
    prefix_children, kind = _children(prefix)
    of_tree, expected = _children(tree)
    is_leaf = kind.num_nodes == kind.num_leaves == 1
    if kind != expected or is_leaf:
        raise ValueError(
            f"`{name}` is {_describe(prefix)}, and the value that it describes is "
            f"{_describe(tree)}. Give a tree of PartitionSpecs or shardings that is a "
            "prefix of that value."
        )
    return [
        found_spec
        for (key, part), (_, of_part) in zip(prefix_children, of_tree, strict=True)
        for found_spec in broadcast_prefix(part, of_part, name + key)
    ]


def _children(x: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the children of a container with their keys, and the structure of the container."""
    children, kind = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    return [(jax.tree_util.keystr(path), child) for path, child in children], kind


def _describe(x: Any) -> str:
    children, _ = _children(x)
    if len(children) == 1 and not children[0][0]:
        aval = getattr(x, "_aval", x)
        if not hasattr(aval, "dtype"):
            return f"a {type(x).__name__}, which is not a spec or sharding"
        return f"one array, {aval.dtype}{list(aval.shape)}"
    keys = [key for key, _ in children]
    more = ", ..." if len(keys) > 8 else ""
    return f"a {type(x).__name__} of {len(keys)} ({', '.join(keys[:8])}{more})"


class ArgumentSlot(NamedTuple):
    """The index of an argument in the arrays of a rank, and the sharding of its array."""

    rank: int
    slot: int
    sharding: NamedSharding


def assign_arguments(
    leaves: Sequence[Any], targets: Sequence[Sequence[ArgumentSlot]], slots: list[Any]
) -> None:
    """Stores every argument in its slots. Moves an array only if its sharding is another one."""
    moving: list[tuple[Any, int, NamedSharding]] = []
    for leaf, of_leaf in zip(leaves, targets, strict=True):
        is_mpmd = isinstance(leaf, MpmdArray)
        if is_mpmd:
            leaf.check_not_deleted()
        for rank, slot, sharding in of_leaf:
            array: Any = leaf.on_rank(rank) if is_mpmd else leaf
            if array is None:
                moving.append((leaf.first_local_array(), slot, sharding))
            elif (is_mpmd or isinstance(array, jax.Array)) and (
                array.sharding is sharding or array.sharding == sharding
            ):
                slots[slot] = array
            else:
                moving.append((array, slot, sharding))
    if moving:
        arrays, indices, shardings = map(list, zip(*moving, strict=True))
        for array in arrays:
            _check_reduced_argument(array)
        for slot, array in zip(indices, jax.device_put(arrays, shardings), strict=True):
            slots[slot] = array


def _check_reduced_argument(array: Any) -> None:
    """Checks that the devices of an array have its values, and not parts of their sums."""
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        raise ValueError(
            f"An argument, {array.dtype}{list(array.shape)}, has the spec {sharding.spec}, whose "
            "sums over devices are not computed yet. Reduce it before the call, with "
            "`jax.sharding.reshard`."
        )


DeletedArguments = dict[int, tuple[int, ...]]
"""Maps the index of each deleted argument among all leaves to the ranks that keep its array."""


def deleted_arguments(
    program: MpmdProgram, donated: frozenset[int], *, crosses: bool
) -> DeletedArguments:
    """Returns the arguments that a call deletes.

    As with `jax.jit`, a donated argument is deleted if a result has its shape and dtype. Each
    result accounts for one argument: arguments that are returned unchanged are matched first. An
    argument that a rank returns unchanged, or sends to another rank while there are several
    processes, shares its memory with the result or the transfer. That rank keeps its array.
    """
    results = Counter(_type(buffer.value.aval) for buffer, _ in program.outputs)
    shared: dict[Any, set[int]] = {}
    for buffer, ranks in program.outputs:
        shared.setdefault(buffer, set()).update(ranks)
    for instruction in program.instructions if crosses else ():
        if isinstance(instruction, Send):
            for buffer in instruction.buffers:
                shared.setdefault(buffer, set()).add(instruction.rank)
    returned = {buffer for buffer, _ in program.outputs}
    deleted: DeletedArguments = {}
    for i in sorted(donated, key=lambda i: (program.inputs[i][0] not in returned, i)):
        buffer, _ = program.inputs[i]
        kind = _type(buffer.value.aval)
        if results[kind]:
            results[kind] -= 1
            deleted[i] = tuple(shared.get(buffer, ()))
    return deleted


def delete_arguments(leaves: Sequence[Any], deleted: DeletedArguments) -> None:
    """Deletes the donated arguments of a call after all its programs have been started."""
    for i, ranks in deleted.items():
        leaf = leaves[i]
        if isinstance(leaf, MpmdArray):
            leaf.delete_except(ranks)
        elif isinstance(leaf, jax.Array) and not ranks and not leaf.is_deleted():
            leaf.delete()


def _type(aval: Any) -> Any:
    return aval.shape, aval.dtype
