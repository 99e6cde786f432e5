import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import models
from jaxpipe.models import Weight
from jaxpipe.models.weights import stack_weights, weight_shapes

NORMAL = jax.nn.initializers.normal(1.0)
LAYER = {
    "up": Weight((3, 4), ("embed", "mlp"), NORMAL),
    "norm": Weight((3,), ("norm",), NORMAL, jnp.bfloat16),
}
KEY = jax.random.key(3)


def assert_equal(x, y):
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("dims", [(2, 3, 4), (4, 2, 3), (1, 1, 24)])
def test_a_layer_starts_equal_in_every_pipeline_layout(dims: tuple[int, ...]):
    flat = models.initialize_layers(LAYER, KEY, (24,))
    shaped = models.initialize_layers(LAYER, KEY, dims)
    for x, y in zip(jax.tree.leaves(flat), jax.tree.leaves(shaped), strict=True):
        assert y.shape == (*dims, *x.shape[1:])
        assert_equal(x, y.reshape(x.shape))


def test_the_first_layers_do_not_depend_on_how_many_follow():
    few, many = (models.initialize_layers(LAYER, KEY, (n,))["up"] for n in (2, 5))
    assert_equal(few, many[:2])
    assert len({float(x[0, 0]) for x in many}) == 5


def test_a_leaf_depends_on_its_path_and_not_on_its_neighbours():
    whole = models.initialize({"a": LAYER, "b": LAYER}, KEY)
    assert_equal(models.initialize({"a": {"up": LAYER["up"]}}, KEY)["a"]["up"], whole["a"]["up"])
    assert not np.array_equal(whole["a"]["up"], whole["b"]["up"])


def test_arrays_are_what_the_abstract_tree_says():
    arrays, shapes = models.initialize(LAYER, KEY), weight_shapes(LAYER)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(
        lambda s: (s.shape, s.dtype), shapes
    )


def test_stacking_puts_dims_and_their_axes_in_front():
    stacked = stack_weights(LAYER, (5, 2), ("circular_repeats", "stage"))
    assert stacked["up"].shape == (5, 2, 3, 4)
    assert models.logical_axes(stacked) == {
        "up": ("circular_repeats", "stage", "embed", "mlp"),
        "norm": ("circular_repeats", "stage", "norm"),
    }
    assert models.num_parameters(stacked) == 10 * models.num_parameters(LAYER) == 150
