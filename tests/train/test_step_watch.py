"""Of several processes the one that holds the others up is named, and whatever waits ends."""

from dataclasses import replace

import jax
import pytest

from jaxpipe.train.runtime import (
    FIRST_SECONDS,
    LOST_SECONDS,
    Position,
    ProcessLedger,
    StepWatch,
    may_be_caused_by_peer,
)


def ledger(timeout: float = 60.0, *, process: int = 0, count: int = 2) -> ProcessLedger:
    return ProcessLedger(process, timeout, {p: Position() for p in range(count)})


def at(step: int, phase: str, progress: int, heartbeat: int, **more) -> Position:
    return replace(Position(step, phase, progress, is_first=False, heartbeat=heartbeat), **more)


def waits(
    found: ProcessLedger, seconds: int, *positions: Position, silent: tuple[int, ...] = ()
) -> None:
    """Seconds in which no process goes on; those in `silent` do not even say so."""
    for second in range(seconds):
        known = {
            p: position if p in silent else replace(position, heartbeat=position.heartbeat + second)
            for p, position in enumerate(positions)
        }
        found.update(known, 1.0, answered=True)


def test_a_process_that_is_stopped_is_named_with_its_step_and_phase():
    found = ledger()
    positions = at(12, "step", 40, 9), at(12, "data", 39, 9)
    waits(found, 59, *positions, silent=(1,))
    assert found.describe_stall() == ""
    waits(found, 2, *positions, silent=(1,))
    assert found.describe_stall() == (
        "no process has gone on for 60 seconds, while this one is in step 12 (step): process 1 has "
        "given no sign of life for 60 seconds, last heard of in step 12 (data) (dead, stopped or "
        "cut off). Where that is no fault raise `step_timeout_minutes`"
    )


def test_of_processes_that_live_those_in_the_earliest_phase_are_behind():
    found = ledger(count=4)
    positions = [at(7, "checkpoint", 30, 9), at(7, "data", 28, 9), at(7, "step", 29, 9)]
    waits(found, 62, *positions, at(7, "data", 28, 9))
    assert "processes 1, 3 are behind, in step 7 (data)." in found.describe_stall()
    found = ledger()
    waits(found, 62, at(7, "step", 29, 9), at(7, "step", 29, 9))
    assert "all of them are in step 7 (step)." in found.describe_stall()


def test_a_run_is_not_stuck_while_one_process_goes_on_or_is_at_something_for_the_first_time():
    found = ledger()
    for progress in range(100):
        found.update(
            {0: at(7, "step", 29, progress), 1: at(7, "data", progress, progress)},
            1.0,
            answered=True,
        )
    assert found.describe_stall() == ""
    found = ledger()
    compiling = at(1, "step", 2, 9, is_first=True)
    waits(found, 1000, at(1, "step", 2, 9), compiling)
    assert found.describe_stall() == ""
    waits(found, int(FIRST_SECONDS), at(1, "step", 2, 9), compiling)
    assert "all of them are in step 1 (step)" in found.describe_stall()
    never = ledger(timeout=0.0)
    waits(never, 1000, at(7, "step", 29, 9), at(7, "step", 29, 9))
    assert never.describe_stall() == ""


def test_a_process_that_was_last_heard_of_while_it_compiled_has_no_hour():
    found = ledger()
    compiling = at(1, "step", 2, 9, is_first=True)
    waits(found, 62, at(2, "step", 4, 9), compiling, silent=(1,))
    assert "process 1 has given no sign of life for 61 seconds" in found.describe_stall()


def test_who_is_done_holds_nobody_up_and_need_not_say_more():
    found = ledger()
    waits(found, 62, at(9, "end", 50, 9), at(9, "end", 50, 9), silent=(1,))
    assert found.describe_stall() == "" and found.silent_processes(LOST_SECONDS) == []


def test_when_nobody_answers_it_is_process_0_at_which_all_meet():
    found = ledger(process=1, count=3)
    for _ in range(12):
        found.update({}, 1.0, answered=False)
    assert found.silent_processes(10.0) == [0]
    assert found.describe_silence([0]) == (
        "process 0 has given no sign of life for 12 seconds, last heard of in its start (dead, "
        "stopped or cut off)"
    )


def test_who_leaves_by_an_error_is_named_with_it():
    found = ledger()
    waits(found, 20, at(3, "step", 9, 1), at(3, "data", 8, 1, error="OSError: no"), silent=(1,))
    assert found.describe_exit() == "process 1 has left the run: OSError: no"
    assert found.silent_processes(LOST_SECONDS) == []


def test_alone_nothing_is_watched():
    with pytest.raises(KeyError, match="mine"), StepWatch(0.001) as watch:
        watch.enter(1, "data")
        watch.record_progress()
        assert not watch._threads
        raise KeyError("mine")


def raised(*errors: Exception) -> BaseException:
    """The last of some errors, each raised from the one before."""
    try:
        for error in errors[:-1]:
            errors[-1].__cause__ = error
        raise errors[-1]
    except Exception as error:
        return error


def test_errors_of_the_runtime_may_be_caused_by_another_process():
    reset = jax.errors.JaxRuntimeError("Gloo: Connection reset by peer")
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert may_be_caused_by_peer(raised(reset))
    assert may_be_caused_by_peer(raised(reset, RuntimeError("A checkpoint could not be written")))
    assert may_be_caused_by_peer(raised(ValueError("FAILED_PRECONDITION: Gloo all-reduce failed")))
    assert not may_be_caused_by_peer(raised(full))
    assert not may_be_caused_by_peer(raised(ValueError("wrong")))
