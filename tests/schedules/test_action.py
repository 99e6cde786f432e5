"""An action, a pair and a schedule print in torch's grammar, and read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedules import Action, FusedPair, Op, parse
from jaxpipe.schedules.language import parse_action, parse_step

from .legal import Case, cases, made

numbers = st.integers(0, 10**6)


def actions(ops=tuple(Op)):
    return st.builds(Action, numbers, st.sampled_from(ops), numbers, st.none() | numbers)


def test_actions_print_as_torch_prints_them():
    assert str(Action(2, Op.F, 0)) == "2F0"
    assert str(Action(7, Op.I, 3)) == "7I3"
    assert str(Action(0, Op.F, 0, 1)) == "0F0s1"
    assert str(FusedPair(Action(4, Op.F, 4), Action(3, Op.B, 0))) == "(4F4;3B0)OVERLAP_F_B"


@given(actions())
@settings(deadline=None)
def test_an_action_reads_back(action: Action):
    assert parse_action(str(action)) == action


@given(st.builds(FusedPair, actions((Op.F,)), actions((Op.B, Op.I))))
@settings(deadline=None)
def test_a_pair_reads_back(pair: FusedPair):
    assert parse_step(str(pair)) == pair


@given(st.text("0123FBIWs();OVERLAP_ \n٣", max_size=12))
@settings(deadline=None)
def test_what_reads_prints_as_it_was(text: str):
    try:
        action = parse_action(text)
    except ValueError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X0", "00F0", "0F00", "-1F0", "0F0s", " 0F0", "0F0\n"]
)
def test_what_is_no_action_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match="is not an action") as caught:
        parse_action(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["(3B0;4F4)OVERLAP_F_B", "(3F0;4W4)OVERLAP_F_B"])
def test_a_pair_is_a_forward_and_then_a_backward(text: str):
    with pytest.raises(ValueError, match="does not pair a forward with a backward"):
        parse_step(text)


@given(cases())
@settings(deadline=None)
def test_a_schedule_reads_back(case: Case):
    schedule = made(case)
    assert parse(str(schedule)) == schedule


def test_a_word_that_does_not_read_is_named_with_its_place():
    with pytest.raises(ValueError, match="Rank 1, action 2: '1X0' is not an action"):
        parse("0F0 0B0\n1F0 1B0 1X0")


def test_a_text_without_actions_is_no_schedule():
    with pytest.raises(ValueError, match="has no actions"):
        parse("")
