"""What the processes of test_transport.py do. Arguments: CASE PROCESS NUM_PROCESSES PORT."""

import json
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd.runtime import (
    Spec,
    check_agreement,
    check_same_program,
    layout,
    open_transport,
    receiver,
    resolve,
    sender,
    start_watchdog,
    wait,
    watch,
)

TIMEOUT = 4.0


def submesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()), ("fsdp",))


def some_of_everything() -> dict[str, jax.Array]:
    key = jax.random.key(7)
    arrays = {
        "divided": (jnp.arange(32, dtype=jnp.float32).reshape(8, 4), P("fsdp")),
        "divided along the second dimension": (jnp.arange(8.0).reshape(2, 4), P(None, "fsdp")),
        "whole on each": (jnp.arange(6, dtype=jnp.int32), P()),
        "bfloat16": (jnp.arange(4, dtype=jnp.bfloat16) / 3, P("fsdp")),
        "bool": (jnp.array([True, False, True]), P()),
        "a number": (jnp.float32(3.5), P()),
        "nothing": (jnp.zeros((0, 3), jnp.int32), P()),
        "a key": (key, P()),
        "keys": (jax.random.split(key, 4), P("fsdp")),
        "keys of another kind": (jax.random.key(7, impl="rbg"), P()),
    }
    mesh = submesh()
    return {name: jax.device_put(x, NamedSharding(mesh, s)) for name, (x, s) in arrays.items()}


def specs_of(arrays) -> list[Spec]:
    return [Spec(x.shape, x.dtype, sharding=x.sharding) for x in arrays]


def numbers(x: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def travel(process: int, num_processes: int) -> None:
    """Process 0 sends some of everything, twice; 1 first sends one thing, and says what came."""
    transport = open_transport(60.0)
    expected = some_of_everything()
    specs = specs_of(expected.values())
    if process == 0:
        send = sender(transport, 1, 3, specs)
        back = receiver(transport, 1, 3, specs[:1])()
        print(json.dumps({"back": numbers(back[0]).tolist()}))
        for _ in range(2):
            send(list(some_of_everything().values()))
        return
    receive = receiver(transport, 0, 3, specs)
    posted = [receive() for _ in range(2)]
    first: Any = posted[0][0]
    at_once = first.is_ready()
    sender(transport, 0, 3, specs[:1])([expected["divided"]])  # for which 0 has waited
    same = {
        name: [
            bool(np.array_equal(numbers(x), numbers(got[i])))
            and (x.dtype, x.sharding) == (got[i].dtype, got[i].sharding)
            for got in posted
        ]
        for i, (name, x) in enumerate(expected.items())
    }
    print(json.dumps({"at_once": at_once, "same": same}))


def ring(process: int, num_processes: int) -> None:
    """Everyone adds one to what the process before has. Sends are not in the order of the tags."""
    transport = open_transport(60.0)
    before, after = (process - 1) % num_processes, (process + 1) % num_processes
    spec = Spec((4,), jnp.float32, sharding=NamedSharding(submesh(), P("fsdp")))
    channels = [
        (sender(transport, after, tag, [spec]), receiver(transport, before, tag, [spec]))
        for tag in range(3)
    ]
    has = [jax.device_put(np.full(4, 10.0 * tag, np.float32), spec.sharding) for tag in range(3)]
    for step in range(2 * num_processes):
        time.sleep(0.02 * ((process + step) % 3))
        if process % 2:
            came = [receive()[0] for _, receive in channels]
            for tag in (2, 0, 1):
                channels[tag][0]([has[tag]])
        else:
            for (send, _), x in zip(channels, has, strict=True):
                send([x])
            came = [receive()[0] for _, receive in channels]
        has = [x + 1 for x in came]
    print(json.dumps([np.asarray(x).tolist() for x in has]))


def line(process: int, num_processes: int, victim: int) -> None:
    """Activations go down a line and come back, until the victim is killed in the middle."""
    watchdog = start_watchdog(TIMEOUT)
    transport = open_transport(60.0)
    spec = [Spec((4,), jnp.float32, sharding=NamedSharding(submesh(), P("fsdp")))]
    last = num_processes - 1
    down = receiver(transport, process - 1, 0, spec) if process else None
    send_down = sender(transport, process + 1, 0, spec) if process < last else None
    up = receiver(transport, process + 1, 1, spec) if process < last else None
    send_up = sender(transport, process - 1, 1, spec) if process else None
    x = [jax.device_put(np.ones(4, np.float32), spec[0].sharding)]
    for step in range(100_000):
        if process == victim and step == 20:
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if down:
            receiving = watch(watchdog, f"rank {process}: {process}F{step} from rank {process - 1}")
            x = down()
            resolve(receiving, x)
        if send_down and up:
            send_down(x)
            receiving = watch(watchdog, f"rank {process}: {process}B{step} from rank {process + 1}")
            x = up()
            resolve(receiving, x)
        if send_up:
            send_up([x[0] + 1])
        jax.block_until_ready(x)


def killed_0(process: int, num_processes: int) -> None:
    line(process, num_processes, victim=0)


def killed_2(process: int, num_processes: int) -> None:
    line(process, num_processes, victim=2)


def stuck(process: int, num_processes: int) -> None:
    """A program of process 1 never ends. Process 0 waits for what it makes, in `wait`."""
    watchdog = start_watchdog(2.0)
    transport = open_transport(60.0)
    sharding = NamedSharding(submesh(), P())
    spec = [Spec((4,), jnp.float32, sharding=sharding)]
    check_agreement("routes", {"1F0 from 1 to 0": layout(spec)}, [1 - process], timeout=60.0)
    if process == 0:
        receive = receiver(transport, 1, 0, spec)
        receiving = watch(watchdog, "rank 0: 1F0 from rank 1 (process 1)")
        x = receive()
        resolve(receiving, x)
        wait(watchdog, x)
    else:

        def sleep(x):
            time.sleep(1000)
            return x

        @jax.jit
        def program(x):
            return jax.pure_callback(sleep, x, x)

        watch(watchdog, "rank 1: 1F0")
        program(jax.device_put(np.ones(4, np.float32), jax.local_devices()[0]))


def aborted(process: int, num_processes: int) -> None:
    """Aborts, as JAX does when process 0 is gone, between the reason and the end of the process."""
    watchdog = start_watchdog(1.0)
    watch(watchdog, "rank 1: 1F0")
    while not watchdog.reasons:
        time.sleep(1e-3)
    os.abort()


def differ(process: int, num_processes: int) -> None:
    """Process 1 has another program, and another idea of a channel; 0 is alone at one occasion."""
    if process == 0:
        try:
            check_same_program("x", "a lonely place", timeout=0.5)
        except TimeoutError as error:
            print(error)
    facts = {"the route 1F0": "a" if process == 0 else "b", f"of {process}": "alone"}
    try:
        check_agreement("routes", facts, [0, 1], timeout=60.0)
    except ValueError as error:
        print(error)
    check_same_program("cafe", "step 0", timeout=60.0)
    check_same_program("beef" if process == 1 else "cafe", "step 1", timeout=60.0)


if __name__ == "__main__":
    case, process, num_processes, port = sys.argv[1], *map(int, sys.argv[2:])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)
    globals()[case](process, num_processes)
