"""Arrays on their way from one rank's submesh to another's: copied in a process, pulled across two.

A route is resolved before the first step: `mover`, `sender` and `receiver` look at what will travel
and return a function that has no choice left. Across processes the receiver pulls, and its arrays
are there at once, before their numbers; the sender only says what there is to pull. Both ends give
the same peer-to-peer number: `to << 48 | tag << 24 | n` for the n-th use of a route.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..._compat import batched_device_put
from ._remote import Transport, connect

Spec = jax.ShapeDtypeStruct
"""What travels: shape, dtype and sharding, on the submesh of the rank it is meant for."""
Arrays = Sequence[jax.Array]


def mover(sources: Sequence[Spec], targets: Sequence[Spec]) -> Callable[[Arrays], Arrays]:
    """A function that copies arrays to other devices of this process, without waiting for them.

    Args:
        sources: What it is given.
        targets: What it returns.
    """
    shardings = [_sharding(target) for target in targets]
    keys = any(_is_key(target) for target in targets)
    if not keys and layout(sources) == layout(targets):
        return batched_device_put(shardings)
    return lambda arrays: jax.device_put(list(arrays), shardings)


def sender(
    transport: Transport, peer: int, tag: int, specs: Sequence[Spec]
) -> Callable[[Arrays], None]:
    """A function that offers arrays to a peer, without waiting for them or for the peer.

    Until the peer has pulled them the memory stays, also if nobody here holds the arrays anymore.
    But if they are donated or deleted before, the peer gets an error.

    Args:
        transport: Of this process.
        peer: The process that receives.
        tag: The number of the route among all from here to the peer, over all programs.
        specs: What it is given, all of it in this process.

    Raises:
        ValueError: If an array is not wholly in this process, or `tag` has more than 24 bits.
    """
    layout(specs)
    await_pull, uuids = transport.server.await_pull, _uuids(peer, tag)
    if not any(map(_finish, specs)):
        return lambda arrays: await_pull(next(uuids), arrays)

    def send(arrays: Arrays) -> None:
        numbers = [
            jax.random.key_data(array) if _is_key(spec) else array
            for spec, array in zip(specs, arrays, strict=True)
            if spec.size
        ]
        if numbers:
            await_pull(next(uuids), numbers)

    return send


def receiver(
    transport: Transport, peer: int, tag: int, specs: Sequence[Spec]
) -> Callable[[], Arrays]:
    """A function that returns what a peer sends, at once: the numbers come later.

    It pulls whatever the peer offers: that both mean the same is for `check_agreement` on their
    `layout`. If they do not, the transfer hangs or its numbers are wrong.

    Args:
        transport: Of this process.
        peer: The process that sends.
        tag: The number of the route, as the sender has it.
        specs: What it returns, all of it in this process.

    Raises:
        ValueError: If an array is not wholly in this process, or `tag` has more than 24 bits.
        TimeoutError: If the peer has not opened its transport.
    """
    layout(specs)
    pull, uuids = connect(transport, peer).pull, _uuids(transport.process, tag)
    numbers = [_numbers(spec) for spec in specs if spec.size]
    finish = [_finish(spec) for spec in specs]
    if not any(finish):
        return lambda: pull(next(uuids), numbers)

    def receive() -> Arrays:
        pulled = iter(pull(next(uuids), numbers) if numbers else ())
        return [make(pulled) if make else next(pulled) for make in finish]

    return receive


def layout(specs: Sequence[Spec]) -> str:
    """What travels, in words: two ends of a route that say the same understand each other.

    Names of devices and axes do not matter, only which numbers lie at which place.

    Raises:
        ValueError: If an array is not wholly in this process.
    """
    return "; ".join(map(_layout, specs))


def _layout(spec: Spec) -> str:
    sharding = _sharding(spec)
    if not sharding.is_fully_addressable:
        raise ValueError(
            f"{spec} has devices of several processes. Only arrays whose devices are all in one "
            "process travel: lay the mesh out so that each rank is in one."
        )
    places = [
        ",".join("{}:{}".format(*i.indices(n)[:2]) for i, n in zip(index, spec.shape, strict=True))
        for index in sharding.devices_indices_map(spec.shape).values()
    ]
    return f"{spec.dtype}{list(spec.shape)} as [{' | '.join(places)}]"


def _sharding(spec: Spec) -> Sharding:
    assert isinstance(spec.sharding, Sharding), f"{spec} does not say where it is"
    return spec.sharding


def _is_key(spec: Spec) -> bool:
    return jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)


def _uuids(to: int, tag: int) -> Iterator[int]:
    """The names of the transfers of a route, as a server sees them.

    Numbers come round after 2^24 uses, when the first has long been pulled.
    """
    if not 0 <= tag < 1 << 24:
        raise ValueError(f"`tag` is {tag}. Routes between two processes are numbered below 2^24.")
    return (to << 48 | tag << 24 | use % (1 << 24) for use in itertools.count())


def _numbers(spec: Spec) -> Spec:
    """What is pulled: a transfer server knows no typed keys, only their numbers."""
    if not _is_key(spec):
        return spec
    data = jax.eval_shape(jax.random.key_data, spec)
    return Spec(data.shape, data.dtype, sharding=spec.sharding)


def _finish(spec: Spec) -> Callable[[Iterator[jax.Array]], jax.Array] | None:
    """What makes an array of those pulled, unless it is just the next of them."""
    numbers = _numbers(spec)

    def empty(pulled: Iterator[jax.Array]) -> jax.Array:
        # To pull no bytes takes forever. A new one every time, since it may be donated.
        return jax.device_put(np.zeros(numbers.shape, numbers.dtype), spec.sharding)

    take = next if spec.size else empty
    if not _is_key(spec):
        return None if take is next else take
    impl = _key_impl(spec)
    return lambda pulled: jax.random.wrap_key_data(take(pulled), impl=impl)


def _key_impl(spec: Spec) -> Any:
    """The generator behind a dtype of keys. JAX tells it of keys only, if only of traced ones."""
    found = []

    def look(key: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look, spec)
    return found[0]
