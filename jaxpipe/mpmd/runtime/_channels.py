"""Describes the transfers between processes as text, to compare both ends of a channel.

A receiver pulls bytes, not arrays. If the two ends of a channel expect different arrays, the
receiver waits forever or interprets the bytes wrongly.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from ..api._mesh import MpmdMesh
from ..ir._program import Buffer, MpmdProgram, RankBuffer, Recv, Send
from ._transfers import Spec, layout

MAX_LAYOUT_LENGTH = 200
"""Number of characters of a layout that are kept: for a thousand devices it has over 10,000."""


class ChannelLayouts(NamedTuple):
    """The layout of the arrays on each channel by its name, and the processes at the other ends."""

    layouts: dict[str, str]
    peers: set[int]


def channel_layouts(
    program: MpmdProgram, mesh: MpmdMesh, specs: Mapping[RankBuffer, PartitionSpec]
) -> ChannelLayouts:
    """Returns the layouts of all transfers between this process and others."""
    local, num_channels, peers = set(mesh.local_ranks), Counter[tuple[type, int, int]](), set[int]()
    layouts = {}
    for instruction in program.instructions:
        match instruction:
            case Send(rank, other, buffers, name):
                source, to = rank, other
            case Recv(rank, other, buffers, name):
                source, to = other, rank
            case _:
                continue
        if rank not in local or other in local:
            continue
        num_channels[type(instruction), source, to] += 1
        index = num_channels[type(instruction), source, to]
        channel = f"channel {index} from rank {source} to rank {to}, behind {name},"
        layouts[channel] = abbreviate(layout([buffer_spec(b, rank, mesh, specs) for b in buffers]))
        peers.add(mesh.process_of(other))
    return ChannelLayouts(layouts, peers)


def buffer_spec(
    buffer: Buffer, rank: int, mesh: MpmdMesh, specs: Mapping[RankBuffer, PartitionSpec]
) -> Spec:
    """Returns the shape, dtype and sharding of a buffer on a rank."""
    aval, sharding = buffer.value.aval, NamedSharding(mesh.unstack[rank], specs[buffer, rank])
    return Spec(aval.shape, aval.dtype, sharding=sharding)


def abbreviate(text: str) -> str:
    """Returns a text, or its beginning and a digest: different texts stay different."""
    if len(text) <= MAX_LAYOUT_LENGTH:
        return text
    return f"{text[:MAX_LAYOUT_LENGTH]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
