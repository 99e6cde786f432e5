"""Says where every array of the user's tree is stored.

An optimizer sees the user's tree and a state that it makes of it. Both are stored in the groups of
engines: "embed", "stages", "head" and "shared". A slot says where an array of the user is stored.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from .._params import NumLayers


class Slot(NamedTuple):
    """The group, the layer and the name under which an array of the user's tree is stored.

    Attributes:
        group: "embed", "stages", "head" or "shared".
        kind: The kind of layers; "" if there is one kind, or for another group.
        name: The path in the group or in a layer.
        layer: The layer of its kind; -1 in another group, and for an array of all layers.
        dim: The dim of layers of an array of all of them, None for others.
    """

    group: str
    kind: str
    name: str
    layer: int
    dim: int | None = None


@dataclass(frozen=True)
class UserTree:
    """The user's tree of parameters.

    Attributes:
        structure: The structure of the tree.
        slots: The slot of every leaf. What is made of arrays of several layers, or of none, is in
            "shared".
    """

    structure: Any
    slots: tuple[Slot, ...]

    def is_like(self, tree: PyTree) -> bool:
        """Returns whether a tree has the user's structure, with any subtrees at its leaves."""
        try:
            self.structure.flatten_up_to(tree)
        except (ValueError, TypeError):
            return False
        return True


def layer_counts(num_layers: NumLayers) -> dict[str, int]:
    """Returns the number of layers of each kind."""
    return {"": num_layers} if isinstance(num_layers, int) else dict(num_layers)


def slots_of_groups(groups: PyTree, num_layers: NumLayers, in_list: bool) -> list[Slot]:
    """Returns the slot of every leaf of the groups of the user's tree, arrays or shapes."""
    slots: list[Slot] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(groups):
        group, *rest = path
        if group.key != "layers":
            slots.append(Slot(group.key, "", jax.tree_util.keystr(tuple(rest)), -1))
            continue
        kind = "" if isinstance(num_layers, int) else str(rest.pop(0).key)
        if in_list:
            layer, *rest = rest
            slots.append(Slot("stages", kind, jax.tree_util.keystr(tuple(rest)), layer.idx))
        else:
            slots.append(Slot("stages", kind, jax.tree_util.keystr(tuple(rest)), -1, 0))
    return slots


def user_tree(
    from_groups: Callable[[dict[str, PyTree]], PyTree], groups: PyTree, slots: Sequence[Slot]
) -> UserTree:
    """Returns the user's tree, whose leaves have the names of the arrays they are made of."""
    closed, shapes = jax.make_jaxpr(from_groups, return_shape=True)(groups)
    sources: dict[Any, frozenset[int]] = {
        var: frozenset({i}) for i, var in enumerate(closed.jaxpr.invars)
    }

    def of(variables: Sequence[Any]) -> frozenset[int]:
        return frozenset().union(*(sources.get(v, frozenset()) for v in map(_var, variables)))

    for equation in closed.jaxpr.eqns:
        read = of(equation.invars)
        sources |= dict.fromkeys(equation.outvars, read)
    of_leaves = [
        _joint_slot([slots[i] for i in sorted(of([v]))]) or Slot("shared", "", f"leaf {k}", -1)
        for k, v in enumerate(closed.jaxpr.outvars)
    ]
    return UserTree(jax.tree.structure(shapes), tuple(_with_own_names(of_leaves)))


def _var(x: Any) -> Any:
    return None if hasattr(x, "val") else x  # a literal has no source


def _joint_slot(slots: Sequence[Slot]) -> Slot | None:
    """Returns the slot of what is made of some arrays, if they are of one layer or one group."""
    owners = {(slot.group, slot.kind, slot.layer, slot.dim) for slot in slots}
    if len(owners) != 1:
        return None
    return slots[0]._replace(name=" and ".join(slot.name for slot in slots))


def _with_own_names(slots: Sequence[Slot]) -> list[Slot]:
    """Returns slots with a number behind the names of several leaves that share one."""
    uses: Counter[Slot] = Counter()
    named: list[Slot] = []
    for slot in slots:
        count = uses[slot]
        uses[slot] += 1
        named.append(slot._replace(name=f"{slot.name}#{count}") if count else slot)
    return named
