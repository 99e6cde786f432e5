"""What travels between processes, in words: the two ends of a route must say the same of it.

A peer pulls bytes, not arrays: ends that disagree wait forever, or get numbers of something else.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

from jax.sharding import NamedSharding, PartitionSpec

from ..api._mesh import MpmdMesh
from ..ir._program import Buffer, Code, Receive, Send
from ._transport import Spec, layout

MOST_LETTERS = 200
"""Of a layout: one of a thousand devices has tens of thousands."""


def layouts_of_routes(
    code: Code, mesh: MpmdMesh, specs: Mapping[tuple[Buffer, int], PartitionSpec]
) -> tuple[dict[str, str], set[int]]:
    """What this process sends and receives.

    Args:
        code: Of all ranks.
        mesh: The groups.
        specs: How each buffer is divided on each rank.

    Returns:
        The layout of what takes each route, by its name; and the processes at their other ends.
    """
    local, counts, peers = set(mesh.local_ranks), Counter[tuple[type, int, int]](), set[int]()
    found = {}
    for instruction in code.instructions:
        match instruction:
            case Send(rank, other, buffers, name):
                source, to = rank, other
            case Receive(rank, other, buffers, name):
                source, to = other, rank
            case _:
                continue
        if rank not in local or other in local:
            continue
        counts[type(instruction), source, to] += 1
        number = counts[type(instruction), source, to]
        route = f"route {number} from rank {source} to rank {to}, behind {name},"
        found[route] = brief(layout([on_rank(b, rank, mesh, specs) for b in buffers]))
        peers.add(mesh.process_of(other))
    return found, peers


def on_rank(
    buffer: Buffer,
    rank: int,
    mesh: MpmdMesh,
    specs: Mapping[tuple[Buffer, int], PartitionSpec],
) -> Spec:
    """Shape, dtype and sharding of a buffer on a rank."""
    aval, sharding = buffer.value.aval, NamedSharding(mesh.unstack[rank], specs[buffer, rank])
    return Spec(aval.shape, aval.dtype, sharding=sharding)


def brief(text: str) -> str:
    """A text, or its beginning and a digest of all of it: different ones stay different."""
    if len(text) <= MOST_LETTERS:
        return text
    return f"{text[:MOST_LETTERS]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
