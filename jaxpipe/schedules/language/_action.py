"""The actions of a rank, in torch's notation: `3F0` is the forward of stage 3 for microbatch 0.

`7I2` and `7W2` are the two halves of the backward `7B2`; `0F0s1` is sequence slice 1 of `0F0`; and
`(4F4;3B0)OVERLAP_F_B` is a forward and a backward that run as one.
"""

import re
from dataclasses import dataclass
from enum import Enum

from ..._input import short_repr


class Op(Enum):
    """Names the operation on a microbatch. Zero-bubble papers write "B" for `I`: we never do."""

    F = "F"  # forward
    B = "B"  # full backward: I, then W
    I = "I"  # backward for the input: the previous stage waits for it  # noqa: E741
    W = "W"  # backward for the weights: no action waits for it, so it can fill a bubble

    # The hash of `Enum` hashes the name in Python, and every look-up hashes an action.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One `op` of one stage on one microbatch, or on one sequence slice of it.

    Example:
        >>> str(Action(stage=3, op=Op.F, microbatch=0))
        '3F0'
    """

    stage: int
    op: Op
    microbatch: int
    slice: int | None = None

    def __str__(self) -> str:
        suffix = "" if self.slice is None else f"s{self.slice}"
        return f"{self.stage}{self.op.value}{self.microbatch}{suffix}"


@dataclass(frozen=True, slots=True)
class FusedPair:
    """A forward and a backward fused, so that the communication of one overlaps the other.

    Source: DeepSeek-V3, 2024, arXiv 2412.19437, section 3.2.1.

    Example:
        >>> str(FusedPair(Action(4, Op.F, 4), Action(3, Op.B, 0)))
        '(4F4;3B0)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.op is not Op.F or self.backward.op not in (Op.B, Op.I):
            raise ValueError(
                f"{self} does not pair a forward with a backward. "
                "Give an F, then a B or I, as in (4F4;3B0)OVERLAP_F_B."
            )

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleStep = Action | FusedPair

# No leading zeros, ASCII digits: every text has one reading and every reading one text.
# (Python reads no number of thousands of digits.)
_NUMBER = "(0|[1-9][0-9]{0,99})"
_ACTION = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}(?:s{_NUMBER})?")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def parse_action(text: str) -> Action:
    """Parses the text of an action, the inverse of `str(action)`.

    Example:
        >>> parse_action("3F0").stage
        3
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{short_repr(text)} is not an action. Write stage, one of F, B, I, W, and microbatch, "
            "such as 3F0, with s and a number for a sequence slice, such as 3F0s1."
        )
    stage, op, microbatch, slice_id = match.groups()
    return Action(int(stage), Op(op), int(microbatch), None if slice_id is None else int(slice_id))


def parse_step(text: str) -> ScheduleStep:
    """Parses the text of an action or a fused pair, the inverse of `str(step)`."""
    match = _PAIR.fullmatch(text)
    if match is None:
        return parse_action(text)
    forward, backward = map(parse_action, match.groups())
    return FusedPair(forward, backward)


def actions_of(step: ScheduleStep) -> tuple[Action, ...]:
    """Returns the one or two actions of a step, a pair's forward first."""
    return (step.forward, step.backward) if isinstance(step, FusedPair) else (step,)
