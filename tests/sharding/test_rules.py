import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.sharding import (
    DEFAULT_RULES,
    Constrain,
    make_mesh,
    named_shardings,
    no_constraint,
    override_rules,
    partition_spec,
)
from jaxpipe.sharding.specs import check_divisible

ACTIVATION = ("activation_batch", "activation_length", "activation_mlp")


def test_a_spec_follows_the_rules():
    assert partition_spec(("embed", "mlp"), DEFAULT_RULES) == P(
        ("fsdp", "context", "expert"), "tensor"
    )
    assert partition_spec(("norm",), DEFAULT_RULES) == P(None)
    assert partition_spec((None, "vocab"), DEFAULT_RULES) == P(None, "tensor")
    assert partition_spec((), DEFAULT_RULES) == P()


def test_the_first_dim_that_asks_for_a_mesh_axis_has_it():
    rules = (("a", ("fsdp", "tensor")), ("b", ("tensor", "data")))
    assert partition_spec(("a", "b"), rules) == P(("fsdp", "tensor"), "data")
    assert partition_spec(("b", "a"), rules) == P(("tensor", "data"), "fsdp")
    assert partition_spec(("a", "a"), rules) == P(("fsdp", "tensor"), None)


def test_a_logical_axis_without_a_rule_is_an_error_that_lists_the_others():
    message = r"No rule for the logical axis 'c'\. `logical_axis_rules` has a, b\."
    with pytest.raises(ValueError, match=message):
        partition_spec(("a", "c"), (("b", ()), ("a", ("fsdp",))))


def test_changed_rules_replace_those_of_the_same_name_and_keep_the_rest():
    rules = override_rules((("embed", ("tensor",)), ("mlp", ("data", "stage"))))
    assert dict(rules) == dict(DEFAULT_RULES) | {"embed": ("tensor",), "mlp": ("data", "stage")}
    assert override_rules(()) == DEFAULT_RULES


def test_a_rule_for_a_logical_axis_that_nothing_bears_is_refused():
    with pytest.raises(ValueError, match=r"has a rule for 'mpl', .* Logical axes are activation_"):
        override_rules((("mpl", ("tensor",)),))


def test_a_rule_for_an_axis_that_no_mesh_has_is_refused():
    message = r"maps 'embed' to 'model'\. Mesh axes are data, stage, fsdp, tensor, expert, context"
    with pytest.raises(ValueError, match=message):
        override_rules((("embed", ("fsdp", "model")),))


def test_two_rules_for_one_logical_axis_are_refused():
    with pytest.raises(ValueError, match="has 2 rules for 'embed'"):
        override_rules((("embed", ("fsdp",)), ("mlp", ()), ("embed", ())))


def test_every_leaf_gets_the_sharding_of_its_logical_axes():
    mesh = make_mesh({"stage": 2, "fsdp": 2, "tensor": 2})
    shapes = {"w": jax.ShapeDtypeStruct((4, 6, 8), jnp.float32), "n": {"s": np.zeros(3)}}
    axes = {"w": ("stage", "embed", "mlp"), "n": {"s": ("norm",)}}
    shardings = named_shardings(shapes, axes, mesh)
    spec = P("stage", ("fsdp", "context", "expert"), "tensor")
    assert shardings == {"w": NamedSharding(mesh, spec), "n": {"s": NamedSharding(mesh, P(None))}}
    placed = jax.device_put(jnp.arange(4.0 * 6 * 8).reshape(4, 6, 8), shardings["w"])
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3, 4)}


def test_a_dim_that_does_not_divide_is_an_error_that_names_leaf_dim_and_sizes():
    mesh = make_mesh({"fsdp": 4, "expert": 2})
    shapes = {"stages": [{"mlp": {"up": jax.ShapeDtypeStruct((3, 12), jnp.float32)}}]}
    axes = {"stages": [{"mlp": {"up": ("layers", "embed")}}]}
    message = (
        r"`stages\.0\.mlp\.up` has 12 in dim 1 of \(3, 12\), which does not divide over "
        r"fsdp 4 x expert 2\. Change that size, the mesh, or the rule"
    )
    with pytest.raises(ValueError, match=message):
        named_shardings(shapes, axes, mesh)


def test_divisibility_is_checked_over_all_mesh_axes_of_a_dim():
    sizes = {"fsdp": 2, "tensor": 3}
    check_divisible((12, 5), P(("fsdp", "tensor"), None), sizes, "x")
    with pytest.raises(ValueError, match=r"`x` has 9 in dim 0 .* over fsdp 2 x tensor 3"):
        check_divisible((9,), P(("fsdp", "tensor")), sizes, "x")


def test_without_a_mesh_a_constraint_does_nothing():
    x = jnp.ones((3, 5, 7))  # of sizes that divide over nothing
    assert Constrain()(x, ACTIVATION) is x
    assert no_constraint(x, ACTIVATION) is x


def test_a_constraint_shards():
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: Constrain()(x, ACTIVATION))(jnp.ones((4, 3, 8)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", None, "tensor")), y.ndim)
    assert {shard.data.shape for shard in y.addressable_shards} == {(2, 3, 2)}


def test_a_constraint_inside_a_pipeline_leaves_out_its_manual_axis_and_shards_the_rest():
    mesh = make_mesh({"stage": 2, "fsdp": 2, "tensor": 2})
    rules = override_rules((("activation_batch", ("stage", "fsdp")),))

    def rank(x):
        return Constrain(rules)(2 * x, ACTIVATION)

    x = np.arange(4.0 * 3 * 8, dtype=np.float32).reshape(4, 3, 8)
    with jax.set_mesh(mesh):
        run = jax.jit(
            jax.shard_map(rank, axis_names={"stage"}, in_specs=P("stage"), out_specs=P("stage"))
        )
        text = run.lower(x).as_text()
        y = run(x)
    lines = [line for line in text.splitlines() if "sdy.sharding_constraint" in line]
    (constraint,) = [line for line in lines if '"fsdp"' in line]
    assert '"tensor"' in constraint and '"stage"' not in constraint
    np.testing.assert_array_equal(y, 2 * x)
    assert {shard.data.shape for shard in y.addressable_shards} == {(1, 3, 4)}


def test_a_constraint_that_does_not_divide_names_the_activation():
    with (
        jax.set_mesh(make_mesh({"tensor": 8})),
        pytest.raises(ValueError, match=r"`activation \('activation_batch'.* has 12 in dim 2"),
    ):
        Constrain()(jnp.ones((4, 3, 12)), ACTIVATION)
