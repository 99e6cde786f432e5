"""The registry of schedules: every family by its name, its arguments, constraints and source."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from ..._input import short_repr
from ..language._placement import Placement
from ..language._schedule import Schedule
from ._controlled_memory import v_half, v_min
from ._dualpipe import dualpipe, dualpipev
from ._interleaved import (
    even_group_size,
    grouped_interleaved,
    interleaved_gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    kimi_k2,
)
from ._looped_bfs import circular, gpipe, looped_bfs
from ._one_f_one_b import eager_one_f_one_b, one_f_one_b, seq1f1b
from ._require import require_positive, require_small
from ._zero_bubble import zbv, zero_bubble_h1, zero_bubble_h2

Live = Callable[[int, int, int], int]
"""From ranks S, microbatches M and chunks v to residuals of stages that a rank stores at a time."""

Waiting = Callable[[int, int], int]
"""From S and M to about how many inputs and cotangents of stages wait on a rank in lock-step."""


def _live_of_1f1b(S: int, M: int, v: int) -> int:
    return 2 * S - 1


def _live_of_groups(S: int, M: int, v: int) -> int:
    """Every chunk but the last is ahead by one group, which has `even_group_size` microbatches."""
    return 2 * S - 1 + (v - 1) * (M // max(1, M // S))


def _live_in_a_v(S: int, M: int, v: int) -> int:
    """With few microbatches every forward can be run before its rank has the first backward."""
    return 2 * M if M < 2 * S else 3 * S - 1


def _live_of_all(S: int, M: int, v: int) -> int:
    return M * v


def _waiting_of_few(S: int, M: int) -> int:
    return 2


def _waiting_of_all(S: int, M: int) -> int:
    return M + 1


def _waiting_breadth_first(S: int, M: int) -> int:
    return 2 * M - S + 1


@dataclass(frozen=True)
class Family:
    """A builder, with its arguments and constraints, and what is true of all its schedules.

    Attributes:
        constraints: The counts that it can schedule, in words.
        default_group_size: From ranks and microbatches to the usual group size; None for families
            without groups.
        default_chunks: Stages per rank, unless `build` is told; 1 if every stage is on two ranks.
        is_breadth_first: Whether all microbatches pass a chunk before the next chunk begins, so
            that a rank needs the weights of each chunk once per direction.
        live: Closed form of `most_live`, without its cap.
        is_live_exact: Whether `most_live` is what lock-step makes of it, for usual counts; a bound
            where the order has no closed form.
        most_waiting: Closed form of what waits on the fullest rank.
        is_usual: Whether planners try it unless they are told what to try.
        is_variant: Whether it has the actions of another family in nearly their order, so that
            checks of all kinds of schedules need not run both.
    """

    builder: Callable[..., Schedule]
    takes: tuple[str, ...]
    constraints: str
    paper: str
    default_group_size: Callable[[int, int], int] | None = None
    placement: Placement = "straight"
    default_chunks: int = 1
    splits_backward: bool = False
    fuses_pairs: bool = False
    is_breadth_first: bool = False
    live: Live = _live_of_1f1b
    is_live_exact: bool = True
    most_waiting: Waiting = _waiting_of_few
    is_usual: bool = False
    is_variant: bool = False
    ranks_divide_microbatches: bool = False

    def most_live(self, ranks: int, microbatches: int, chunks: int) -> int:
        """Returns the number of (stage, microbatch) residuals of the fullest rank in lock-step.

        Lock-step runs forwards and backwards in the same ticks, so early ranks store more than
        `peak_activations`; at most M v.

        Example:
            >>> FAMILIES["1f1b"].most_live(4, 8, 1)
            7
        """
        return min(microbatches * chunks, self.live(ranks, microbatches, chunks))


_GROUPS = ("chunks", "group")
_CROSSING = "microbatches >= 2 ranks"


_interleaved = partial(
    Family,
    takes=_GROUPS,
    constraints="microbatches % max(1, microbatches // ranks) == 0, or a group >= ranks",
    default_group_size=even_group_size,
    placement="loop",
    default_chunks=2,
    live=_live_of_groups,
)
"""A family whose chunks take turns after groups of about as many microbatches."""

_in_a_v = partial(
    Family,
    takes=(),
    constraints="2 chunks in a V",
    placement="v",
    default_chunks=2,
    splits_backward=True,
    live=_live_in_a_v,
)
"""A family with two chunks per rank in a V, and with split backwards."""


FAMILIES: dict[str, Family] = {
    "gpipe": Family(
        gpipe,
        (),
        "",
        "Huang et al., 2019, arXiv 1811.06965",
        live=_live_of_all,
        most_waiting=_waiting_of_all,
    ),
    "1f1b": Family(one_f_one_b, (), "", "Narayanan et al., 2021, arXiv 2104.04473", is_usual=True),
    "eager_1f1b": Family(
        eager_one_f_one_b, (), "", "Zhuang et al., 2022, arXiv 2211.05322", is_variant=True
    ),
    "interleaved_1f1b": _interleaved(
        interleaved_one_f_one_b, paper="Narayanan et al., 2021, arXiv 2104.04473", is_usual=True
    ),
    "kimi_k2": _interleaved(
        kimi_k2,
        paper="Kimi K2, 2025, arXiv 2507.20534",
        live=lambda S, M, v: _live_of_groups(S, M, v) + 1,  # its warmup is longer by one
        is_variant=True,
    ),
    "looped_bfs": Family(
        looped_bfs,
        ("chunks",),
        "",
        "Lamy-Poirier, 2023, arXiv 2211.05953",
        placement="loop",
        default_chunks=2,
        is_breadth_first=True,
        live=_live_of_all,
        most_waiting=_waiting_breadth_first,
    ),
    "interleaved_gpipe": _interleaved(
        interleaved_gpipe,
        paper="NVIDIA JaxPP, 2025",
        live=_live_of_all,
        most_waiting=_waiting_of_all,
        is_variant=True,
    ),
    "zero_bubble_h1": Family(
        zero_bubble_h1,
        (),
        "microbatches >= ranks",
        "Qi et al., 2023, arXiv 2401.10241",
        splits_backward=True,
        is_usual=True,
    ),
    "zero_bubble_h2": Family(
        zero_bubble_h2,
        ("latency", "spare"),
        "microbatches >= 2 ranks - 1, and more with latency",
        "Qi et al., 2023, arXiv 2401.10241",
        splits_backward=True,
    ),
    "interleaved_zero_bubble": _interleaved(
        interleaved_zero_bubble, paper="Qi et al., 2023, arXiv 2401.10241", splits_backward=True
    ),
    "zbv": _in_a_v(zbv, paper="Qi et al., 2023, arXiv 2401.10241", is_usual=True),
    "v_half": _in_a_v(v_half, paper="Qi et al., 2024, arXiv 2405.15362", is_live_exact=False),
    "v_min": _in_a_v(v_min, paper="Qi et al., 2024, arXiv 2405.15362", is_live_exact=False),
    "dualpipe": Family(
        dualpipe,
        (),
        f"ranks and microbatches even; {_CROSSING}",
        "DeepSeek-V3, 2024, arXiv 2412.19437",
        placement="both_ways",
        splits_backward=True,
        fuses_pairs=True,
        live=lambda S, M, v: S + 1,
    ),
    "dualpipev": _in_a_v(
        dualpipev,
        paper="DeepSeek-V3, 2024, arXiv 2412.19437",
        constraints=f"2 chunks in a V; {_CROSSING}",
        fuses_pairs=True,
        live=lambda S, M, v: 2 * S + 1,
    ),
    "seq1f1b": Family(
        seq1f1b, ("slices",), "causal attention", "Sun et al., 2024, arXiv 2406.03488"
    ),
    "grouped_interleaved": Family(
        grouped_interleaved,
        _GROUPS,
        "ranks / 2 <= group <= ranks",
        "Wan et al., 2025, arXiv 2503.01328",
        lambda num_ranks, num_microbatches: (num_ranks + 1) // 2,
        placement="loop",
        default_chunks=2,
        splits_backward=True,
        live=lambda S, M, v: (2 * S - 1) * v,
        is_live_exact=False,
        is_variant=True,
    ),
    "circular": Family(
        circular,
        ("chunks",),
        "microbatches % ranks == 0",
        "Xu et al., 2021, arXiv 2105.04663",
        placement="loop",
        default_chunks=2,
        is_breadth_first=True,
        live=_live_of_all,
        most_waiting=_waiting_breadth_first,
        ranks_divide_microbatches=True,
    ),
}

# The arguments of `build`, and their names in the builders.
_KEYWORDS = {
    "chunks": "num_chunks",
    "group": "group_size",
    "slices": "num_slices",
    "latency": "latency",
    "spare": "spare",
}
_MAY_BE_ZERO = ("latency", "spare")


def get_family(name: str) -> Family:
    """Returns the family of a name."""
    if name in FAMILIES:
        return FAMILIES[name]
    nearest = get_close_matches(name[:80], FAMILIES, n=1, cutoff=0)[0]
    raise ValueError(
        f"There is no schedule {short_repr(name)}. Did you mean {nearest!r}? "
        f"Give one of {', '.join(FAMILIES)}."
    )


def family_of_1f1b(num_chunks: int) -> str:
    """Returns the name of the family that runs 1F1B with this number of stages on each rank."""
    return "1f1b" if num_chunks == 1 else "interleaved_1f1b"


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    slices: int | None = None,
    latency: int | float | None = None,
    spare: int | None = None,
) -> Schedule:
    """Builds a schedule by its name.

    Arguments that are None have the defaults of the family: 2 chunks, 2 slices, no latency, its own
    group size.

    Args:
        name: A key of `FAMILIES`.
        ranks: Devices, or groups of devices, the stages are spread over.
        microbatches: Pieces of the batch.
        chunks: The number of stages on each rank.
        group: Microbatches that pass a chunk in a row before the next chunk has its turn.
        slices: Pieces of each sequence.
        latency: Time of a transfer as a multiple of the time of one action.
        spare: Microbatches a rank may hold beyond the fewest that keep it busy.

    Returns:
        A schedule that passes `check`.

    Raises:
        ValueError: If no schedule has that name; if it does not take an argument that is given; or
            if it cannot schedule these counts.

    Example:
        >>> print(build("zero_bubble_h1", ranks=2, microbatches=2))
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    chosen = get_family(name)
    options = {
        "chunks": chunks,
        "group": group,
        "slices": slices,
        "latency": latency,
        "spare": spare,
    }
    arguments = {option: value for option, value in options.items() if value is not None}
    for option, value in arguments.items():
        if option not in chosen.takes:
            takers = ", ".join(n for n, f in FAMILIES.items() if option in f.takes)
            raise ValueError(
                f"`{option}` is {value}, but {name} takes "
                f"{' and '.join(f'`{taken}`' for taken in chosen.takes) or 'none such'}. "
                f"Leave `{option}` out, or choose one of {takers}."
            )
    counts = {"ranks": ranks, "microbatches": microbatches, **arguments}
    require_positive(**{name: counts[name] for name in counts if name not in _MAY_BE_ZERO})
    require_small(ranks, microbatches, arguments.get("chunks", 2), arguments.get("slices", 1))
    if chosen.default_group_size is not None and group is None:
        arguments["group"] = chosen.default_group_size(ranks, microbatches)
    keywords = {_KEYWORDS[option]: value for option, value in arguments.items()}
    try:
        return chosen.builder(ranks, microbatches, **keywords)
    except ValueError as error:
        raise ValueError(_with_argument_names_of_build(str(error))) from None


def _with_argument_names_of_build(message: str) -> str:
    """Returns a builder's message with the names that `build` has for its arguments."""
    builders = {"num_ranks": "ranks", "num_stages": "ranks", "num_microbatches": "microbatches"}
    for name, theirs in (*((v, k) for k, v in _KEYWORDS.items()), *builders.items()):
        message = message.replace(f"`{name}`", f"`{theirs}`")
    return message
