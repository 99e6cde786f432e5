"""Arrays arrive as they left, in one process and across several; and nobody waits forever."""

import itertools
import json
import os
import re
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.transfer import make_error_array, start_transfer_server
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd.runtime import (
    MpmdError,
    Spec,
    Transport,
    Watchdog,
    abbreviate,
    check_same_program,
    layout,
    mover,
    resolve,
    sender,
    start_watchdog,
    stop,
    wait,
    watch,
)

from .processes import Ended, run_processes

SCRIPT = Path(__file__).parent / "transport_script.py"
TIMEOUT = 4.0  # of `line` in the script


def mesh(rank: int, **sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    devices = jax.devices()[rank * count : (rank + 1) * count]
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def placed(x, sharding) -> tuple[jax.Array, Spec]:
    x = jax.device_put(x, sharding)
    return x, Spec(x.shape, x.dtype, sharding=sharding)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (P("fsdp"), P("fsdp")),
        (P("fsdp", "tensor"), P("fsdp", "tensor")),
        (P(), P()),
        (P("fsdp"), P("tensor")),  # divided anew
        (P(), P("fsdp")),
    ],
    ids=str,
)
def test_a_move_is_a_device_put(source, target):
    here, there = (mesh(rank, fsdp=2, tensor=2) for rank in range(2))
    x, spec = placed(np.arange(32, dtype=np.float32).reshape(4, 8), NamedSharding(here, source))
    flags, flags_spec = placed(np.array([True, False]), NamedSharding(here, P()))
    targets = [
        Spec(x.shape, x.dtype, sharding=NamedSharding(there, target)),
        Spec(flags.shape, flags.dtype, sharding=NamedSharding(there, P())),
    ]
    moved = mover([spec, flags_spec], targets)([x, flags])
    for got, array, to in zip(moved, (x, flags), targets, strict=True):
        expected = jax.device_put(array, to.sharding)
        np.testing.assert_array_equal(got, expected)
        assert (got.sharding, got.committed) == (expected.sharding, True)
        for mine, its in zip(got.addressable_shards, expected.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (its.device, its.index)
            np.testing.assert_array_equal(mine.data, its.data)


def test_keys_move():
    keys, spec = placed(jax.random.split(jax.random.key(1), 4), NamedSharding(mesh(0, f=2), P("f")))
    target = Spec(spec.shape, spec.dtype, sharding=NamedSharding(mesh(1, f=2), P("f")))
    (moved,) = mover([spec], [target])([keys])
    assert (moved.dtype, moved.sharding) == (keys.dtype, target.sharding)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_what_has_been_moved_may_be_donated():
    x, spec = placed(np.ones((64, 64), np.float32), NamedSharding(mesh(0, f=2), P("f")))
    target = Spec(spec.shape, spec.dtype, sharding=NamedSharding(mesh(1, f=2), P("f")))
    (moved,) = mover([spec], [target])([x])
    jax.jit(lambda x: x * 0, donate_argnums=0)(x).block_until_ready()
    assert x.is_deleted()
    np.testing.assert_array_equal(moved, np.ones((64, 64)))


def test_a_layout_says_which_numbers_lie_where():
    def laid_out(rank, spec, shape=(4, 2), **sizes):
        return layout([Spec(shape, jnp.float32, sharding=NamedSharding(mesh(rank, **sizes), spec))])

    assert laid_out(0, P("f"), f=2) == "float32[4, 2] as [0:2,0:2 | 2:4,0:2]"
    assert laid_out(0, P("f"), f=2) == laid_out(1, P("g", None), g=2)
    assert laid_out(0, P("f"), f=2) != laid_out(0, P(None, "f"), f=2)
    assert laid_out(0, P("f"), f=2) != laid_out(0, P("f"), (2, 4), f=2)
    assert laid_out(0, P(), (), f=2) == "float32[] as [ | ]"


def test_a_long_layout_is_told_by_its_beginning_and_differs_where_it_differs():
    assert abbreviate("float32[] as [ | ]") == "float32[] as [ | ]"
    long = "float32[4096]" + "x" * 10_000
    assert abbreviate(long).startswith("float32[4096]") and len(abbreviate(long)) < 250
    assert abbreviate(long) != abbreviate(long + "y")


def test_a_tag_out_of_range_is_refused():
    _, spec = placed(np.ones(4, np.float32), NamedSharding(mesh(0, f=2), P("f")))
    transport = Transport(0, 1.0, jax)  # of a server it only asks for the function
    transport.server.await_pull = None
    with pytest.raises(ValueError, match=r"`channel` is 16777216\. Channels .* below 2\^24"):
        sender(transport, 1, 1 << 24, [spec])


def test_a_single_process_agrees_with_itself():
    check_same_program("cafe", "step", timeout=1.0)


@pytest.fixture
def watchdog():
    watchdog = start_watchdog(0.3)
    yield watchdog
    stop(watchdog)


def watch_array(watchdog: Watchdog, label: str, x: jax.Array) -> None:
    resolve(watch(watchdog, label), [x])


def test_the_watchdog_lets_go_of_what_is_there(watchdog):
    x = jnp.ones(4) + 1
    watch_array(watchdog, "0F0", x)
    wait(watchdog, [x])
    gone = weakref.ref(x)
    del x
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


@pytest.fixture(scope="module")
def late():
    """A function of seconds and of an array: a copy that is there that much later."""
    server = start_transfer_server(jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
    connection = server.connect(server.address())
    numbers = itertools.count()

    def pull(seconds: float, x: jax.Array) -> jax.Array:
        number = next(numbers)
        threading.Timer(seconds, server.await_pull, (number, [x])).start()
        return connection.pull(number, [Spec(x.shape, x.dtype, sharding=x.sharding)])[0]

    return pull


def test_what_is_stuck_raises_where_the_main_thread_waits(watchdog, late, capfd):
    watch_array(watchdog, "0F0", jnp.zeros(4) + 1)
    stuck = late(0.6, jnp.zeros(4))
    watch_array(watchdog, "rank 1: 1F0", stuck)
    with pytest.raises(MpmdError, match=r"process 0: rank 1: 1F0 .* within 0\.3 seconds"):
        wait(watchdog, [stuck])
    assert "jaxpipe: process 0: rank 1: 1F0 has not finished" in capfd.readouterr().err
    stuck.block_until_ready()


def test_the_clock_runs_for_the_oldest_only(watchdog, late):
    slow = [late(0.15 * n, jnp.zeros(4)) for n in range(1, 6)]
    for n, x in enumerate(slow):
        watch_array(watchdog, f"0F{n}", x)
    wait(watchdog, slow)


def test_alone_an_error_is_left_to_whoever_reads_the_array(watchdog):
    spec = Spec((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    x = make_error_array(spec, "no such file")
    watch_array(watchdog, "0F0", x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such file"):
        wait(watchdog, [x])


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match=r"`timeout` is 0\.0"):
        start_watchdog(0.0)


@pytest.fixture(scope="module")
def travelled() -> list[Ended]:
    return run_processes(SCRIPT, "travel", 2, seconds=120)


def test_arrays_of_every_kind_arrive_as_they_left(travelled):
    assert [ended.code for ended in travelled] == [0, 0], travelled
    same = json.loads(travelled[1].out)["same"]
    assert all(both == [True, True] for both in same.values()), same
    assert len(same) == 10


def test_what_is_received_is_there_before_its_numbers(travelled):
    assert json.loads(travelled[1].out)["at_once"] is False


def test_the_same_tag_serves_both_directions(travelled):
    back = json.loads(travelled[0].out)["back"]
    np.testing.assert_array_equal(back, np.arange(32.0).reshape(8, 4))


def test_four_processes_send_in_whatever_order():
    ended = run_processes(SCRIPT, "ring", 4, seconds=120)
    assert [one.code for one in ended] == [0] * 4, ended
    for one in ended:
        assert json.loads(one.out) == [[10.0 * tag + 8] * 4 for tag in range(3)]


@pytest.mark.parametrize("victim", [0, 2])
def test_when_a_process_is_killed_all_others_say_what_they_waited_for_and_end(victim):
    ended = run_processes(SCRIPT, f"killed_{victim}", 4, seconds=120)
    death = ended[victim]
    assert death.code == -9
    for process, one in enumerate(ended):
        if process != victim:
            assert one.code != 0
            assert one.seconds - death.seconds < 2 * TIMEOUT, one
            assert re.search(rf"jaxpipe: process {process}: .*{process}[FB]\d+ from", one.err), one


def test_a_program_that_hangs_is_an_error_on_both_sides():
    waits, hangs = run_processes(SCRIPT, "stuck", 2, seconds=120)
    assert waits.code != 0
    assert "MpmdError: process 0: rank 0: 1F0 from rank 1 (process 1)" in waits.err
    assert hangs.code == os.EX_SOFTWARE
    assert "jaxpipe: process 1: rank 1: 1F0 has not finished within" in hangs.err


def test_an_abort_after_the_reason_is_said_does_not_take_its_exit_code():
    ended = run_processes(SCRIPT, "aborted", 2, seconds=120)
    for one in ended:
        assert one.code == os.EX_SOFTWARE, one
        assert "rank 1: 1F0 has not finished within" in one.err


def test_processes_with_different_programs_hear_of_it_before_the_first_step():
    ended = run_processes(SCRIPT, "differ", 2, seconds=120)
    for one in ended:
        assert "Of the route 1F0 they say: a on [0]; b on [1]." in one.out
        assert "ValueError: Processes differ in `step 1`." in one.err
        assert "Of the program they say: cafe on [0]; beef on [1]." in one.err
    assert "Processes [1] have not come to `a lonely place` within 0.5 seconds" in ended[0].out
