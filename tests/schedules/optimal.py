"""Writes optimal.csv: small problems with the step time that CP-SAT proves to be optimal.

    pip install ortools; python tests/schedules/optimal.py > tests/schedules/optimal.csv

Rows that are not proved within twelve seconds are left out. ortools is needed here alone, so it is
no dependency of the tests.
"""

import random

from jaxpipe.schedules.analysis.search import Problem, rank_of_each_stage

COLUMNS = "ranks,placement,microbatches,forward,input,weight,transfer,stored,kept,cap,synchronous"
SECONDS = 12


def main(count: int = 275) -> None:
    print(f"{COLUMNS},optimum")
    source = random.Random(20)
    for _ in range(count):
        ranks, microbatches = source.randint(2, 4), source.randint(2, 8)
        placement = source.choice(("straight", "straight", "v", "loop"))
        chunks = 1 if placement == "straight" else 2
        microbatches = microbatches if chunks == 1 else min(microbatches, 5)
        times = [source.randint(1, 12) for _ in range(3)]
        transfer, kept, stored = source.choice((0, 0, 1, 3)), source.choice((2, 2, 1)), 2
        cap = stored * chunks * source.randint(1, 2 * ranks)
        synchronous = source.random() < 0.6
        rank_of = rank_of_each_stage(placement, ranks, chunks)
        problem = Problem(
            rank_of,
            microbatches,
            tuple((time,) * len(rank_of) for time in times),
            transfer,
            (stored,) * len(rank_of),
            (kept,) * len(rank_of),
            (cap,) * ranks,
            synchronous,
        )
        best = optimum(problem)
        if best is not None:
            row = (ranks, placement, microbatches, *times, transfer, stored, kept, cap)
            print(*row, int(synchronous), best, sep=",", flush=True)


def optimum(problem: Problem) -> int | None:
    """The optimal step time of a problem of integers; None if it is not proved in time."""
    from ortools.sat.python import cp_model  # pyright: ignore[reportMissingImports]

    S, M, times = problem.num_stages, problem.num_microbatches, problem.times
    latest = int(M * sum(map(sum, times)) + 2 * S * problem.transfer)
    model = cp_model.CpModel()
    start = {
        (op, s, m): model.new_int_var(0, latest, "")
        for op in range(3)
        for s in range(S)
        for m in range(M)
    }

    def follows(after: tuple[int, int, int], before: tuple[int, int, int], hop: float = 0) -> None:
        model.add(start[after] >= start[before] + times[before[0]][before[1]] + hop)

    for s in range(S):
        for m in range(M):
            if s:
                follows((0, s, m), (0, s - 1, m), problem.hops[s - 1])
            if s < S - 1:
                follows((1, s, m), (1, s + 1, m), problem.hops[s])
            else:
                follows((1, s, m), (0, s, m))
            follows((2, s, m), (1, s, m))
            for op in range(3) if m else ():
                follows((op, s, m), (op, s, m - 1))  # microbatches are equal
    step_time = model.new_int_var(0, latest, "")
    for rank, stages in enumerate(problem.stages):
        mine = [key for key in start if key[1] in stages]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[k], times[k[0]][k[1]], "") for k in mine]
        )
        model.add_reservoir_constraint(
            [start[op, s, m] + (times[op][s] if op else 0) for op, s, m in mine],
            [
                (problem.stored[s], problem.kept[s] - problem.stored[s], -problem.kept[s])[op]
                for op, s, _ in mine
            ],
            0,
            int(problem.caps[rank]),
        )
        begin = 0 if problem.synchronous else start[0, stages[0], 0]
        for s in stages:
            model.add(step_time >= start[2, s, M - 1] + times[2][s] - begin)
    model.minimize(step_time)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS
    proved = solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value) if proved else None


if __name__ == "__main__":
    main()
