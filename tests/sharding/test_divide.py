import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.sharding.layout import LayerLayout, divide_exactly, even_layout

counts = st.integers(1, 12)


@given(counts, counts, counts)
def test_the_dims_of_a_layout_multiply_to_the_layers(repeats: int, ranks: int, per_stage: int):
    num_layers = repeats * ranks * per_stage
    made = even_layout(num_layers, num_ranks=ranks, layers_per_stage=per_stage)
    assert made == LayerLayout(repeats, ranks, per_stage)
    assert made.dims == (repeats, ranks, per_stage)
    assert made.num_layers == num_layers
    given_repeats = even_layout(
        num_layers, num_ranks=ranks, layers_per_stage=per_stage, num_repeats=repeats
    )
    assert given_repeats == made


@given(st.integers(1, 100), counts, counts)
def test_layers_have_a_layout_exactly_if_they_divide(layers: int, ranks: int, per_stage: int):
    if layers % (ranks * per_stage) == 0:
        made = even_layout(layers, num_ranks=ranks, layers_per_stage=per_stage)
        assert made.num_layers == layers
    else:
        with pytest.raises(ValueError, match=f"is {layers}, not a multiple of"):
            even_layout(layers, num_ranks=ranks, layers_per_stage=per_stage)


def test_layers_that_do_not_divide_are_refused_with_their_keys():
    message = (
        r"`base_num_decoder_layers` is 10, not a multiple of ranks x "
        r"`num_layers_per_pipeline_stage` = 4\. Choose ranks and layers per stage"
    )
    with pytest.raises(ValueError, match=message):
        even_layout(10, num_ranks=2, layers_per_stage=2)


@pytest.mark.parametrize("repeats", [1, 3, 0])
def test_repeats_that_the_layers_do_not_make_are_refused(repeats: int):
    message = f"`num_pipeline_repeats` is {repeats}, but 8 layers over 2 ranks .* Give 2 or -1"
    with pytest.raises(ValueError, match=message):
        even_layout(8, num_ranks=2, layers_per_stage=2, num_repeats=repeats)


def test_a_division_is_exact_or_names_both_sides():
    assert divide_exactly(12, 4, name="a", into="b", fix="Fix.") == 3
    with pytest.raises(ValueError, match=r"^a is 12, not a multiple of b = 5\. Fix\.$"):
        divide_exactly(12, 5, name="a", into="b", fix="Fix.")
    with pytest.raises(ValueError, match=r"^b is 0\. Give at least 1\.$"):
        divide_exactly(12, 0, name="a", into="b", fix="Fix.")
