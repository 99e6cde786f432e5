"""A step with a clock: which tasks there were, and that the clock changes nothing."""

import re
from collections.abc import Iterable
from typing import Any

import jax
import pytest

from jaxpipe.mpmd import mpmd_jit_with_loop
from jaxpipe.mpmd.api import as_schedule
from jaxpipe.mpmd.jaxpp import GPipe, Interleaved1F1B, Std1F1B, ZeroBubble
from jaxpipe.mpmd.profiling import collect_task_times_ms, timed_step, to_timeline, trace_step
from jaxpipe.schedules import language
from mpmd.small import assert_equal, batch, gradients, groups, layers, runs

STEPS = {
    "Std1F1B": Std1F1B(2),
    "Interleaved1F1B": Interleaved1F1B(4, 2),
    "GPipe": GPipe(2),
    "ZeroBubble": ZeroBubble(2),
}


def compiled(schedule: Any) -> tuple[Any, tuple[Any, ...]]:
    def step(weights: Any, *data: Any) -> Any:
        value, grads = gradients(schedule)(weights, *data)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    args = layers(schedule.num_stages), *batch(4)
    return mpmd_jit_with_loop(step, groups(2)).compile(*args), args


def parts(tasks: Iterable[str]) -> list[str]:
    """Of fused tasks, both."""
    return sorted(part for task in tasks for part in re.findall(r"\w+__\d+", task))


@pytest.mark.parametrize("name", STEPS)
def test_collect_task_times_ms(name: str):
    """Names are those of the tasks, each with the milliseconds of its program."""
    schedule = STEPS[name]
    step, args = compiled(schedule)
    times = collect_task_times_ms(step, *args)
    tasks = parts(str(task) for of_rank in schedule.tasks(4) for task in of_rank)
    if name == "ZeroBubble":  # the first stage hands nothing back, so it has no such half
        tasks = [task for task in tasks if not task.startswith("bwd_i_0")]
    assert parts(task for task in times if "@" not in task) == tasks
    outside = {f"{what}@{rank}" for what in ("start", "after_loop") for rank in range(2)}
    assert {task for task in times if "@" in task} == outside
    assert all(isinstance(ms, float) and 0 < ms < 60_000 for ms in times.values())
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))


def test_a_step_with_a_clock_gives_the_same_numbers():
    step, args = compiled(Std1F1B(2))
    result, times = timed_step(step, *args)
    assert_equal(result, step(*args))
    tasks = runs(step.lowered.program)
    assert [run for run, _, _ in times] == tasks
    assert all(start < end for _, start, end in times)
    ends = [end for _, _, end in times]
    assert ends == sorted(ends)


def test_a_timeline_has_every_task_of_the_loop_on_its_rank():
    step, args = compiled(Interleaved1F1B(4, 2))
    _, times = timed_step(step, *args)
    timeline = to_timeline(step, times)
    (schedule,) = step.lowered.schedules
    for row, program in zip(timeline.rows, schedule.programs, strict=True):
        actions = [a for timed in row for a in language.actions_of(timed.step)]
        assert actions == [a for each in program for a in language.actions_of(each)]
        assert all(timed.start < timed.end for timed in row)
    assert min(timed.start for row in timeline.rows for timed in row) == 0


def compiled_with_two_loops() -> tuple[Any, tuple[Any, ...]]:
    """A step with a loop of gradients, and a loop of another schedule with the new weights."""

    def step(weights: Any, *data: Any) -> Any:
        first, grads = gradients(Std1F1B(2))(weights, *data)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return first, gradients(GPipe(2))(weights, *data)

    args = layers(2), *batch(4)
    return mpmd_jit_with_loop(step, groups(2)).compile(*args), args


def test_each_of_several_loops_has_a_timeline_of_its_own_tasks():
    step, args = compiled_with_two_loops()
    _, times = timed_step(step, *args)
    assert [str(schedule) for schedule in step.lowered.schedules] == [
        str(as_schedule(schedule, 4, 2)) for schedule in (Std1F1B(2), GPipe(2))
    ]
    for loop, schedule in enumerate(step.lowered.schedules):
        timeline = to_timeline(step, times, loop)
        assert timeline.schedule is schedule
        for row, program in zip(timeline.rows, schedule.programs, strict=True):
            actions = [a for timed in row for a in language.actions_of(timed.step)]
            assert actions == [a for each in program for a in language.actions_of(each)]
        assert min(timed.start for row in timeline.rows for timed in row) == 0
    with pytest.raises(ValueError, match="`loop` is 2, and the function has 2 loops"):
        to_timeline(step, times, 2)


def test_times_of_several_loops_are_not_mixed():
    step, args = compiled_with_two_loops()
    times = collect_task_times_ms(step, *args, repeats=1)
    assert {name for name in times if name.endswith("fwd_0__0")} == {
        "loop_0.fwd_0__0",
        "loop_1.fwd_0__0",
    }
    assert {"loop_0.fwd_0__0@0", "loop_1.fwd_0__0@0"} < set(step.programs)
    assert {f"loop_{loop}.start@{rank}" for loop in range(2) for rank in range(2)} < set(times)
    with collect_task_times_ms() as found:
        step(*args)
    assert found is not None
    assert len(found["loop_0.fwd_0"]) == len(found["loop_1.fwd_0"]) == 4


def test_a_traced_step_with_several_loops_has_two_timelines_for_each():
    step, args = compiled_with_two_loops()
    _, found = trace_step(step, *args)
    kinds = ("measured", "predicted")
    assert list(found) == [f"{kind}_loop_{loop}" for loop in range(2) for kind in kinds]
    for loop, schedule in enumerate(step.lowered.schedules):
        for kind in kinds:
            assert found[f"{kind}_loop_{loop}"].schedule is schedule


def test_a_function_without_a_loop_has_no_timeline():
    step = mpmd_jit_with_loop(lambda x: 2 * x, groups(2)).compile(1.0)
    _, times = timed_step(step, 1.0)
    with pytest.raises(ValueError, match="The function has no loop over microbatches"):
        to_timeline(step, times)
