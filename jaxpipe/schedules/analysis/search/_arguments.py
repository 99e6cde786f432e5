"""The arguments of a search: costs, bytes and caps, checked against each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...builders._require import require
from .._simulate import Costs, PerStage, Time, check_costs


@dataclass(frozen=True)
class ActivationMemory:
    """The bytes of one microbatch, one number or one per stage, in the unit of the cap.

    Attributes:
        stored: The bytes that an F stores.
        kept: The bytes of `stored` that stay until the W; the I frees the others. A B frees all.
    """

    stored: PerStage = 1
    kept: PerStage = 1


def checked_arguments(
    ranks: int,
    costs: Costs,
    memory: ActivationMemory | None,
    memory_cap: Time | Sequence[Time],
    placement: Sequence[int] | None,
) -> tuple[Costs, ActivationMemory, tuple[Time, ...]]:
    """Returns costs, bytes and the cap of every rank, from the arguments of `search`."""
    if placement is not None:
        require(
            sorted(set(placement)) == list(range(ranks)),
            f"`placement` names the ranks {sorted(set(placement))} of {ranks} ranks.",
            "Give the rank of every stage, and every rank a stage.",
        )
    num_stages = ranks if placement is None else len(placement)
    check_costs(costs, num_stages)
    memory = memory or ActivationMemory()
    for name, values in (
        *((name, getattr(costs, name)) for name in ("forward", "input", "weight")),
        ("stored", memory.stored),
        ("kept", memory.kept),
    ):
        require(
            placement is not None or not isinstance(values, tuple),
            f"`{name}` is one cost per stage, but families have different numbers of stages.",
            "Give one number, of a whole rank, or a `placement`.",
        )
        require(
            not isinstance(values, tuple) or len(values) == num_stages,
            f"`{name}` does not have one entry for each of {num_stages} stages.",
            "Give one number, or one per stage in forward order.",
        )
    sizes = zip(each(memory.stored, num_stages), each(memory.kept, num_stages), strict=True)
    require(
        all(0 <= kept <= stored for stored, kept in sizes),
        f"`memory` is {memory}.",
        "Give bytes of 0 or more, and keep no more than is stored.",
    )
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * ranks
    require(
        len(caps) == ranks,
        f"`memory_cap` has {len(caps)} entries for {ranks} ranks.",
        "Give one number, or one per rank.",
    )
    return costs, memory, caps


def memory_of_slots(
    memory: ActivationMemory, caps: tuple[Time, ...], synchronous: bool
) -> tuple[ActivationMemory, tuple[Time, ...]]:
    """Returns the bytes and the caps of one program that runs all ranks.

    A slot of its buffers has the bytes of the largest stage, from F to W. All ranks have the
    buffers of the fullest, so the least cap is that of all.
    """
    require(
        synchronous,
        "`lock_step` is True and `synchronous` False, but ranks in ticks wait for each other.",
        "Leave one of them out.",
    )
    size = max(memory.stored) if isinstance(memory.stored, tuple) else memory.stored
    return ActivationMemory(size, size), (min(caps),) * len(caps)


def each(value: PerStage, num_stages: int) -> tuple[Time, ...]:
    """Returns [num_stages] values."""
    return value if isinstance(value, tuple) else (value,) * num_stages
