"""Maps the leaves of a checkpoint to the tensors of Hugging Face: two views of the same numbers.

Both views of a slice have the same shape. Copying one onto the other, in either direction, changes
no number, so a conversion in both directions is exact to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

ViewFn = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class TensorSlice:
    """The numbers that a leaf of a checkpoint and a tensor of Hugging Face have in common."""

    tensor: str  # the name of the tensor
    shape: tuple[int, ...]  # the shape of the whole tensor
    leaf_view: ViewFn  # from the leaf to a view of these numbers
    tensor_view: ViewFn  # from the tensor to a view of them, equal in shape


LeafSlices = dict[str, tuple[TensorSlice, ...]]
"""The slices of every leaf by its path, such as `attention/query`. Together they are all of it."""


def same_tensor(tensor: str, shape: tuple[int, ...]) -> tuple[TensorSlice, ...]:
    """Returns the slice of a leaf that equals a tensor."""
    return (TensorSlice(tensor, shape, _identity, _identity),)


def linear_weight(
    tensor: str, ins: tuple[int, ...], outs: tuple[int, ...]
) -> tuple[TensorSlice, ...]:
    """Returns the slice of a leaf [*ins, *outs], which torch stores transposed as [outs, ins]."""
    num_outs, num_dims = len(outs), len(ins) + len(outs)
    order = (*range(num_outs, num_dims), *range(num_outs))

    def tensor_view(x: np.ndarray) -> np.ndarray:
        return x.reshape(*outs, *ins).transpose(order)

    shape = (int(np.prod(outs)), int(np.prod(ins)))
    return (TensorSlice(tensor, shape, _identity, tensor_view),)


def head_rows(
    tensor: str,
    sizes: tuple[int, int, int],
    rows: slice = slice(None),
    *,
    leaf_rows: slice = slice(None),
    in_pairs: bool = False,
) -> TensorSlice:
    """Returns the slice of some rows of each head of a tensor [heads C, ins].

    The leaf is [ins, heads, channels], of which `leaf_rows` are these channels. `in_pairs` says
    that rotary channels turn in pairs 0 1, 2 3 and so on in the tensor. In the leaf, all first
    channels of pairs precede all second ones: `[pairs, 2]` there is `[2, pairs]` here.
    """
    H, C, num_ins = sizes
    pairs = len(range(C)[rows]) // 2

    def leaf_view(x: np.ndarray) -> np.ndarray:
        x = x.reshape(num_ins, H, -1)[..., leaf_rows]
        return x.reshape(num_ins, H, 2, pairs) if in_pairs else x

    def tensor_view(x: np.ndarray) -> np.ndarray:
        x = x.reshape(H, C, num_ins)[:, rows]
        if in_pairs:
            return x.reshape(H, pairs, 2, num_ins).transpose(3, 0, 2, 1)
        return x.transpose(2, 0, 1)

    return TensorSlice(tensor, (H * C, num_ins), leaf_view, tensor_view)


def swiglu_weights(
    prefix: str,
    embed_dim: int,
    mlp_dim: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> LeafSlices:
    """Returns the slices of a gated MLP."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {
        "gate": linear_weight(gate, (embed_dim,), (mlp_dim,)),
        "up": linear_weight(up, (embed_dim,), (mlp_dim,)),
        "down": linear_weight(down, (mlp_dim,), (embed_dim,)),
    }


def expert_weights(prefix: str, num_experts: int, *sizes_and_names: Any) -> LeafSlices:
    """Returns the slices of routed experts, each a gated MLP as `swiglu_weights` takes it."""
    each = [swiglu_weights(f"{prefix}.{e}", *sizes_and_names) for e in range(num_experts)]
    return {name: stacked_entries([parts[name] for parts in each]) for name in each[0]}


def boundary(embed_dim: int, vocab_size: int, *, tied: bool) -> LeafSlices:
    """Returns the slices of the leaves before and after all layers."""
    slices = {
        "embed/table": same_tensor("model.embed_tokens.weight", (vocab_size, embed_dim)),
        "head/norm": same_tensor("model.norm.weight", (embed_dim,)),
    }
    if not tied:
        slices["head/logits"] = linear_weight("lm_head.weight", (embed_dim,), (vocab_size,))
    return slices


def with_prefix(path: str, parts: LeafSlices) -> LeafSlices:
    """Returns the same leaves in a branch of the tree."""
    return {f"{path}/{name}": slices for name, slices in parts.items()}


def stacked_entries(slices_by_entry: list[tuple[TensorSlice, ...]]) -> tuple[TensorSlice, ...]:
    """Stacks the slices of entries along the first dim of a leaf: experts, or layers."""
    return tuple(
        replace(part, leaf_view=_entry(i, part.leaf_view))
        for i, parts in enumerate(slices_by_entry)
        for part in parts
    )


def stacked_layers(parts: LeafSlices, layer_ids: range) -> LeafSlices:
    """Returns the slices of a stack of these layers of the model."""
    return {
        path: stacked_entries(
            [
                tuple(replace(x, tensor=f"model.layers.{n}.{x.tensor}") for x in slices)
                for n in layer_ids
            ]
        )
        for path, slices in parts.items()
    }


def _entry(i: int, leaf_view: ViewFn) -> ViewFn:
    return lambda x: leaf_view(x[i])


def _identity(x: np.ndarray) -> np.ndarray:
    return x
