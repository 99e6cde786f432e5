"""Which mesh axes a spec names, and the spec without some of them."""

import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.sharding.specs import axes_of, without_axes

FREE = P.UNCONSTRAINED


@pytest.mark.parametrize(
    ("spec", "axes", "rest"),
    [
        (P(), {"a"}, P()),
        (P("a", "b"), {"a"}, P(None, "b")),
        (P(("a", "b", "c"), None), {"b"}, P(("a", "c"), None)),
        (P(("a", "b"), FREE), {"a", "b"}, P(None, FREE)),
        (
            P("a", unreduced=frozenset("bc"), reduced=frozenset("d")),
            {"b", "d"},
            P("a", unreduced=frozenset("c")),
        ),
        (P(reduced=frozenset("a")), {"b"}, P(reduced=frozenset("a"))),
    ],
    ids=["empty", "an axis of its own", "an axis among others", "unconstrained", "sets", "reduced"],
)
def test_axes_leave_the_dims_and_the_sets_of_a_spec(spec: P, axes: set[str], rest: P):
    assert without_axes(spec, axes) == rest
    assert axes_of(rest) == axes_of(spec) - axes
    assert without_axes(spec, ()) == spec
