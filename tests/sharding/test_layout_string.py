"""Layouts of stages as text."""

import pytest

from jaxpipe.sharding.layout import parse_layout


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*3|t*4|t*4|t*3L", (3, 4, 4, 3)),
        ("EtL", (1,)),
        ("E|(tt|)*3L", (0, 2, 2, 2, 0)),
        ("Et*3|(tt|)*2,tL", (3, 2, 2, 1)),
        ("Et | ((t)*2|)*2 tL", (1, 2, 2, 1)),
    ],
)
def test_a_layout_is_the_layers_of_every_stage(text, layers):
    assert parse_layout(text) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et*3|t*3mL", "m is a layer that predicts further tokens"),
        ("Et|xL", "Give E, then t for every layer"),
        ("Et*3*2|tL", "Give E, then t for every layer"),
        ("Et*x|tL", "Give E, then t for every layer"),
        ("t|tL", "begins with the one E"),
        ("EtL|t", "begins with the one E"),
        ("Et||tL", "stage 1 has no layer"),
    ],
)
def test_what_is_no_layout_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(text)
