"""Transfers arrays between the submeshes of two ranks: copied in a process, pulled across two.

A channel is resolved before the first step: `mover`, `sender` and `receiver` inspect the types of
the arrays and return a function without branches. Across processes the receiver pulls: it returns
its arrays at once, before their data has arrived, and the sender only offers the data. Both ends
use the same peer-to-peer id: `to << 48 | channel << 24 | n` for the n-th use of a channel.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..._compat import batched_device_put
from ..api._mesh import MpmdMesh
from ..ir._program import Buffer, MpmdProgram, RankBuffer, Recv, Send
from ._rendezvous import Transport, connect

Spec = jax.ShapeDtypeStruct
"""Shape, dtype and sharding of an array on the submesh of one rank."""
Arrays = Sequence[jax.Array]

MAX_LAYOUT_LENGTH = 200
"""Number of characters of a layout that are kept: for a thousand devices it has over 10,000."""


def mover(sources: Sequence[Spec], targets: Sequence[Spec]) -> Callable[[Arrays], Arrays]:
    """Returns a function that copies arrays to other devices of this process, asynchronously."""
    shardings = [_sharding(target) for target in targets]
    keys = any(_is_key(target) for target in targets)
    if not keys and layout(sources) == layout(targets):
        return batched_device_put(shardings)
    return lambda arrays: jax.device_put(list(arrays), shardings)


def sender(
    transport: Transport, peer: int, channel: int, specs: Sequence[Spec]
) -> Callable[[Arrays], None]:
    """Returns a function that offers arrays to a peer, without waiting for them or for the peer.

    The memory of the arrays is kept until the peer has pulled them, even if this process holds no
    reference to them. If they are donated or deleted earlier, the peer gets an error.
    """
    layout(specs)
    await_pull, uuids = transport.server.await_pull, _uuids(peer, channel)
    if not any(map(_array_maker, specs)):
        return lambda arrays: await_pull(next(uuids), arrays)

    def send(arrays: Arrays) -> None:
        data = [
            jax.random.key_data(array) if _is_key(spec) else array
            for spec, array in zip(specs, arrays, strict=True)
            if spec.size
        ]
        if data:
            await_pull(next(uuids), data)

    return send


def receiver(
    transport: Transport, peer: int, channel: int, specs: Sequence[Spec]
) -> Callable[[], Arrays]:
    """Returns a function that returns the arrays of a peer at once; their data arrives later.

    It pulls whatever the peer offers. Use `check_agreement` on the `layout` of both ends to check
    that they match: if they do not, the transfer hangs or its values are wrong.
    """
    layout(specs)
    pull, uuids = connect(transport, peer).pull, _uuids(transport.process, channel)
    data = [_data_spec(spec) for spec in specs if spec.size]
    makers = [_array_maker(spec) for spec in specs]
    if not any(makers):
        return lambda: pull(next(uuids), data)

    def receive() -> Arrays:
        pulled = iter(pull(next(uuids), data) if data else ())
        return [make(pulled) if make else next(pulled) for make in makers]

    return receive


def layout(specs: Sequence[Spec]) -> str:
    """Returns the layout of arrays as text: two ends of a channel match if their texts are equal.

    Names of devices and axes do not matter, only which elements are stored on which device.
    """
    return "; ".join(map(_layout, specs))


def _layout(spec: Spec) -> str:
    sharding = _sharding(spec)
    if not sharding.is_fully_addressable:
        raise ValueError(
            f"{spec} has devices of several processes. Only arrays whose devices are all in one "
            "process are sent: lay the mesh out so that each rank is in one."
        )
    index_ranges = [
        ",".join("{}:{}".format(*i.indices(n)[:2]) for i, n in zip(index, spec.shape, strict=True))
        for index in sharding.devices_indices_map(spec.shape).values()
    ]
    return f"{spec.dtype}{list(spec.shape)} as [{' | '.join(index_ranges)}]"


def _sharding(spec: Spec) -> Sharding:
    assert isinstance(spec.sharding, Sharding), f"{spec} does not say where it is"
    return spec.sharding


def _is_key(spec: Spec) -> bool:
    return jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)


def _uuids(to: int, channel: int) -> Iterator[int]:
    """Returns the ids of the transfers of a channel, without end.

    Ids repeat after 2^24 uses, when the first transfer is long complete.
    """
    if not 0 <= channel < 1 << 24:
        raise ValueError(
            f"`channel` is {channel}. Channels between two processes are numbered below 2^24."
        )
    return (to << 48 | channel << 24 | use % (1 << 24) for use in itertools.count())


def _data_spec(spec: Spec) -> Spec:
    """Returns the type of the pulled array, which is key data in place of typed keys."""
    if not _is_key(spec):
        return spec
    data = jax.eval_shape(jax.random.key_data, spec)
    return Spec(data.shape, data.dtype, sharding=spec.sharding)


def _array_maker(spec: Spec) -> Callable[[Iterator[jax.Array]], jax.Array] | None:
    """Returns a function that makes an array of the pulled ones; None if it is the next one."""
    data = _data_spec(spec)

    def empty(pulled: Iterator[jax.Array]) -> jax.Array:
        # A pull of zero bytes never completes. The array is new each time: it may be donated.
        return jax.device_put(np.zeros(data.shape, data.dtype), spec.sharding)

    take = next if spec.size else empty
    if not _is_key(spec):
        return None if take is next else take
    impl = _key_impl(spec)
    return lambda pulled: jax.random.wrap_key_data(take(pulled), impl=impl)


def _key_impl(spec: Spec) -> Any:
    """Returns the generator of a key dtype. JAX returns it for keys only, including traced ones."""
    impls = []

    def look(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look, spec)
    return impls[0]


def channel_layouts(
    program: MpmdProgram, mesh: MpmdMesh, specs: Mapping[RankBuffer, PartitionSpec]
) -> tuple[dict[str, str], set[int]]:
    """Returns the layouts of this process's channels by name, and the processes at other ends.

    A receiver pulls bytes, not arrays. If the two ends of a channel expect different arrays, the
    receiver waits forever or interprets the bytes wrongly.
    """
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
    return layouts, peers


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
