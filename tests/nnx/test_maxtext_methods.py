"""Every method of MaxText's pipeline modules, overridden: the call computes another thing, or none.

The lists are those of MaxText's `NNXPipeline` and `NNXCircularPipeline` (46 in all, of which both
have 19), and of the Linen modules that its documentation of 2025 describes.
"""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from harness.frontends import Row
from jaxpipe.compat import maxtext

SHARED = (
    "need_circ_storage",
    "iterations_to_complete_first_microbatch_one_repeat",
    "iterations_to_complete_first_microbatch",
    "get_iteration_inputs",
    "get_microbatch_and_repeat_ids",
    "get_pipeline_remat_policy",
    "get_weight_sharding",
    "get_main_vmap_func_for_iterations",
    "init_states",
    "run_one_iteration",
)
BUFFERS = (
    "shard_dim_by_stages",
    "vmap_parallel_gather",
    "vmap_gather",
    "get_new_loop_state",
    "permute_output_micro_per_stage_dim",
    "get_current_stage_weights",
    "get_logical_spec_repeats_removed",
    "all_gather_over_fsdp",
)
WINDOWS = (
    "gather_microbatch_inputs_vmap",
    "gather_weights_across_stages_vmap",
    "from_all_variables_to_repeat_weights",
    "from_repeat_weights_to_bsw",
    "weight_prefetching",
    "fetch_active_stage_weights",
    "get_current_weights_from_bsw",
)
OF_2025 = ("get_vmap_func_for_init",)
REALIGN = "realign_output_microbatches"
METHODS = {
    "NNXPipeline": (*SHARED, *BUFFERS, REALIGN, "get_current_repeat_from_stages"),
    "NNXCircularPipeline": (*SHARED, *BUFFERS, REALIGN, *WINDOWS),
    "Pipeline": (*SHARED, *BUFFERS, *OF_2025, "get_current_repeat_from_stages"),
    "CircularPipeline": (*SHARED, *WINDOWS, *OF_2025, "advance_circular_buffers", REALIGN),
}
REFUSED = {
    ("NNXCircularPipeline", "all_gather_over_fsdp"),
    ("NNXCircularPipeline", "get_current_stage_weights"),
}
ONLY_2025 = {*METHODS["Pipeline"], *METHODS["CircularPipeline"]} - {
    *METHODS["NNXPipeline"],
    *METHODS["NNXCircularPipeline"],
}
CASES = [(kind, name) for kind, names in METHODS.items() for name in names]
PRIVATE = (
    "_setup_pipeline_attributes",
    "_maybe_shard_with_logical",
    "_maybe_shard_with_name",
    "_remove_fsdp_from_physical_partition_spec",
    "_stamp_at_current_trace",
)
M, WIDTH, MESH = 4, 4, Row(2, 2, 1, fsdp=2).mesh
X, POSITIONS = jnp.arange(96.0).reshape(8, 3, WIDTH), jnp.ones((8, 3))


class Scale(nn.Module):
    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        return inputs * self.param("w", init, (WIDTH,)) * positions[..., None]


class NNXScale(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed",))
        self.w = nnx.Param(init(rngs.params(), (WIDTH,)))

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        return inputs * self.w * positions[..., None]


def marks(kind: str, name: str) -> Any:
    """The modules of Linen have the same methods; CI runs those that only they have."""
    return () if kind.startswith("NNX") or name in ONLY_2025 else (pytest.mark.slow,)


def changed(name: str, result: Any) -> Any:
    """Another thing of the kind that the method returns."""
    if name == "get_pipeline_remat_policy":
        return jax.checkpoint_policies.everything_saveable
    if name in ("get_weight_sharding", "get_logical_spec_repeats_removed"):
        return jax.tree.map(lambda _: PartitionSpec(), result)
    if callable(result):
        return lambda *arguments: twice(result(*arguments))
    return twice(result)


def twice(tree: Any) -> Any:
    def change(x):
        if isinstance(x, bool):
            return not x
        if isinstance(x, int) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x + 1
        return 2 * x

    return jax.tree.map(change, tree)


def subclass(kind: str, name: str, change: bool) -> Any:
    def method(self, *arguments, **more):
        result = getattr(super(overriding, self), name)(*arguments, **more)
        return changed(name, result) if change else result

    overriding: Any = type("Own", (getattr(maxtext, kind),), {name: method})
    return overriding


def built(kind: str, cls: Any, fields: str = "") -> Any:
    """A module of two ranks and two repeats."""
    fields = "repeat" if "Circular" in kind else fields
    config = Row(2, 2, 1, fields, fsdp=2).config(num_pipeline_microbatches=M)
    return cls(config, NNXScale if kind.startswith("NNX") else Scale(), MESH())


@cache
def program(kind: str, name: str, change: bool, fields: str) -> str:
    """The equations that the result of a call needs, of `init` too in Linen."""
    pipeline = built(kind, subclass(kind, name, change), fields)
    if kind.startswith("NNX"):
        graph, state = nnx.split(pipeline)
        closed = jax.make_jaxpr(lambda s: nnx.merge(graph, s)(X, None, POSITIONS, True))(state)
    else:
        run = lambda key: pipeline.init_with_output(key, X, None, POSITIONS, True)[1]  # noqa: E731
        apply = lambda v: pipeline.apply(v, X, None, POSITIONS, True)  # noqa: E731
        closed = jax.make_jaxpr(lambda key: (v := run(key), apply(v)))(jax.random.key(0))
    kept, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    return re.sub(r" at 0x[0-9a-f]+", "", str(kept))


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*case, marks=marks(*case), id="-".join(case)) for case in CASES]
)
def test_a_method_that_returns_another_thing_changes_the_program(kind, name):
    fields = "once" if name == "all_gather_over_fsdp" else ""
    if (kind, name) in REFUSED:
        with pytest.raises(ValueError, match=f"`{name}` is defined in `Own`, which no call of"):
            program(kind, name, True, fields)
        return
    same = name if name == "get_vmap_func_for_init" else "init_states"
    assert program(kind, name, True, fields) != program(kind, same, False, fields)


def test_the_lists_are_complete():
    today = METHODS["NNXPipeline"], METHODS["NNXCircularPipeline"]
    assert sum(len({*names}) for names in today) == 46 and len({*today[0]} & {*today[1]}) == 19


@pytest.mark.parametrize("kind", METHODS)
def test_what_the_call_would_not_read_is_refused(kind):
    base = getattr(maxtext, kind)
    for name in PRIVATE:
        own = type("Own", (base,), {name: lambda self, *_: None})
        with pytest.raises(ValueError, match=f"`{name}` is defined in `Own`, which no call of a"):
            call(kind, built(kind, own))
    for name, value in (("num_stages", 3), ("batch_axis_name", "rows")):
        own = type("Own", (base,), {name: value})
        with pytest.raises(ValueError, match=f"`{name}` is replaced in `Own`, which the call does"):
            call(kind, built(kind, own))


def call(kind: str, pipeline: Any) -> jax.Array:
    arguments = X, None, POSITIONS, True
    if kind.startswith("NNX"):
        return pipeline(*arguments)
    variables = getattr(maxtext, kind)(pipeline.config, pipeline.layers, pipeline.mesh).init(
        jax.random.key(0), *arguments
    )
    return pipeline.apply(variables, *arguments)


def test_run_one_iteration_has_the_arguments_of_maxtexts_nnx_modules_where_it_is_overridden():
    """The layer multiplies by positions: twice as large ones give 2^4 times the outputs."""

    class Own(maxtext.NNXPipeline):
        def run_one_iteration(
            self,
            loop_state,
            pipeline_weights_graph,
            pipeline_weights_state,
            positions,
            segment_ids,
            deterministic,
            model_mode,
            logical_partition_spec=None,
        ):
            assert isinstance(pipeline_weights_state, nnx.State) and deterministic is True
            return super().run_one_iteration(
                loop_state,
                pipeline_weights_graph,
                jax.tree.map(lambda w: 3 * w, pipeline_weights_state),
                2 * positions,
                segment_ids,
                deterministic,
                model_mode,
                logical_partition_spec,
            )

    class OwnCircular(maxtext.NNXCircularPipeline):
        def run_one_iteration(
            self,
            loop_state,
            bsw,
            pipeline_weights_graph,
            layers_metrics,
            current_layer_mutables,
            positions,
            *rest,
        ):
            bsw, rest = jax.tree.map(lambda w: 3 * w, bsw), (2 * positions, *rest)
            parts = pipeline_weights_graph, layers_metrics, current_layer_mutables
            return super().run_one_iteration(loop_state, bsw, *parts, *rest)

    for kind, own in (("NNXPipeline", Own), ("NNXCircularPipeline", OwnCircular)):
        y = nnx.jit(lambda p: p(X, None, POSITIONS, True))(built(kind, own))
        np.testing.assert_allclose(y, (2 * 3) ** 4 * X, rtol=1e-6)


def test_the_function_of_all_stages_has_maxtexts_arguments():
    class Own(maxtext.NNXPipeline):
        def get_main_vmap_func_for_iterations(self):
            run = super().get_main_vmap_func_for_iterations()

            def doubled(graph, state, stages_inputs, segment_ids, positions, deterministic, mode):
                rest = segment_ids, 3 * positions, deterministic, mode
                y, state = run(graph, state, 2 * stages_inputs, *rest)
                return y, state

            return doubled

    class OwnLinen(maxtext.Pipeline):
        def get_main_vmap_func_for_iterations(self):
            run = super().get_main_vmap_func_for_iterations()

            def doubled(body_instance, weights, stages_inputs, segment_ids, positions, *options):
                rest = segment_ids, 3 * positions, *options
                return run(body_instance, weights, 2 * stages_inputs, *rest)

            return doubled

    for kind, own in (("NNXPipeline", Own), ("Pipeline", OwnLinen)):
        np.testing.assert_allclose(call(kind, built(kind, own)), 6**4 * X, rtol=1e-6)


def test_by_hand_the_graph_and_the_state_of_the_layers_may_be_given():
    pipeline = built("NNXPipeline", maxtext.NNXPipeline)
    graph, state = nnx.split(pipeline.layers)
    xs, positions = X.reshape(M, 2, *X.shape[1:]), 2 * POSITIONS.reshape(M, 2, -1)
    loop_state = pipeline.init_states(xs)
    step = jax.jit(
        lambda s: pipeline.run_one_iteration(s, graph, state, positions, None, True, "train")[0]
    )
    for _ in range(M * 2 + 1):
        loop_state = step(loop_state)
    y = pipeline.permute_output_micro_per_stage_dim(loop_state["state_io"]).reshape(X.shape)
    np.testing.assert_allclose(y, 2**4 * X, rtol=1e-6)
    stage_state = jax.tree.map(lambda w: w[0], state)
    run = pipeline.get_main_vmap_func_for_iterations()
    y, _ = jax.jit(run, static_argnums=(0, 5, 6))(
        graph, stage_state, xs[:2], None, positions[:2], True, "train"
    )
    np.testing.assert_allclose(y, 2 * xs[:2], rtol=1e-6)
    with pytest.raises(ValueError, match="the graph of another module"):
        other = nnx.graphdef(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        pipeline.run_one_iteration(loop_state, other, state, positions, None, True, "train")


def test_a_window_of_one_repeat_is_refused():
    class Own(maxtext.NNXCircularPipeline):
        def weight_prefetching(self, weights, physical_partition_spec, loop_iteration):
            repeat = self.from_all_variables_to_repeat_weights(weights, loop_iteration + 1)
            return self.from_repeat_weights_to_bsw(repeat, physical_partition_spec)

    with pytest.raises(ValueError, match=r"shapes \[\(2, 4\)\], and a window has \[\(2, 2, 4\)\]"):
        call("NNXCircularPipeline", built("NNXCircularPipeline", Own))


class NNXCounting(NNXScale):
    """A stage with a random stream and a value that an earlier call has sown."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.report = nnx.Intermediate(jnp.zeros(()))


def changed_state(state: Any, kind: Any) -> Any:
    """The state with other variables of a kind, as MaxText's scan would carry them."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    change = lambda v: v.replace(2 * v.get_value()) if isinstance(v, kind) else v  # noqa: E731
    return jax.tree.map(change, state, is_leaf=is_variable)


@pytest.mark.parametrize(
    ("kind", "variables", "path"),
    [
        ("NNXPipeline", nnx.RngCount, "dropout.rngs.count"),
        ("NNXCircularPipeline", nnx.Intermediate, "report"),
    ],
)
def test_a_state_that_an_override_changes_is_refused(kind, variables, path):
    """MaxText carries what is returned to the next iteration; parameters are not in it."""

    def pipeline(changed: Any) -> Any:
        def run_one_iteration(self, loop_state, graph_or_bsw, state_or_graph, *rest):
            own = getattr(maxtext, kind).run_one_iteration
            loop_state, state = own(self, loop_state, graph_or_bsw, state_or_graph, *rest)
            return loop_state, changed_state(state, changed)

        own = type("Own", (getattr(maxtext, kind),), {"run_one_iteration": run_one_iteration})
        fields = "repeat" if "Circular" in kind else ""
        config = Row(2, 2, 1, fields, fsdp=2).config(num_pipeline_microbatches=M)
        return own(config, NNXCounting, MESH())

    arguments = X, None, POSITIONS, True
    with pytest.raises(ValueError, match=f"`run_one_iteration` returns a state .* in {path}"):
        pipeline(variables)(*arguments)
    np.testing.assert_allclose(pipeline(nnx.Param)(*arguments), X, rtol=1e-6)


def test_a_state_that_the_function_of_all_stages_changes_is_refused():
    class Own(maxtext.NNXPipeline):
        def get_main_vmap_func_for_iterations(self):
            run = super().get_main_vmap_func_for_iterations()

            def reporting(*arguments):
                y, state = run(*arguments)
                return y, {**state, "mean": jnp.mean(y)}

            return reporting

    match = "The function of `get_main_vmap_func_for_iterations` returns a state .* in mean"
    with pytest.raises(ValueError, match=match):
        call("NNXPipeline", built("NNXPipeline", Own))
