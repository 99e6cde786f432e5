"""Compiles a function to one program over a mesh."""

import math
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..ir.transforms import additions_in_products
from ..spmd.ranks import ON_ALL_RANKS
from ..xla.compiler_flags import FLAGS, StepTraits, adds_in_products, default_options
from ..xla.hlo import audit
from ._engine import PipelineSpec


class OneProgram:
    """A function from `jax.jit` whose scalars are on all devices of a mesh from the first call on.

    An optimizer makes its count of steps on one device, Orbax restores it there, and a program
    returns it on all devices of the mesh. To `jax.jit` these are different types of arguments: the
    second step of a training run would compile once more, and the first after a restart would be an
    error. Attributes are those of the function from `jax.jit`.
    """

    def __init__(
        self, function: Callable, program: Callable, replicated: NamedSharding, *, may_hang: bool
    ):
        update_wrapper(self, function, updated=())
        self._program = program
        self._replicated = replicated
        self._may_hang = may_hang
        self._checked: set[Any] = set()  # the types of arguments for which it does not hang

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _replicate_scalars((args, kwargs), self._replicated)
        if self._may_hang:
            self._check(args, kwargs)
        return self._program(*args, **kwargs)

    def _check(self, args: Any, kwargs: Any) -> None:
        """Checks what is compiled for arguments of new types; inside of `jax.jit` it cannot."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        types = structure, tuple(map(jax.typeof, leaves))
        if types not in self._checked and not any(isinstance(leaf, Tracer) for leaf in leaves):
            _require_no_permutes_in_branches(self._program.lower(*args, **kwargs))
            self._checked.add(types)

    def __get__(self, instance: Any, owner: Any = None) -> Callable:
        return self if instance is None else partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "_program":  # not yet set, such as in a copy
            raise AttributeError(name)
        return getattr(self._program, name)


def jit(spec: PipelineSpec, function: Callable, donate_argnums: tuple[int, ...]) -> OneProgram:
    """Compiles a function to one program."""
    options = _options(spec)
    traced = adding_in_products(function, spec.mesh.devices.flat[0].device_kind, options)
    program = jax.jit(
        traced,
        donate_argnums=donate_argnums,
        # With explicit axes zeros such as an optimizer's first state have shardings of the mesh in
        # their types, and `jax.jit` (0.10 to 0.12) compiles for the devices of what it keeps.
        keep_unused=AxisType.Explicit in spec.mesh.axis_types,
        compiler_options=options or None,
    )
    replicated = NamedSharding(spec.mesh, PartitionSpec())
    return OneProgram(function, program, replicated, may_hang=_may_hang(spec))


def adding_in_products(
    function: Callable, device_kind: str, options: Mapping[str, Any]
) -> Callable:
    """Makes a function add products to sums where it computes them, if that is faster.

    Args:
        function: The function that `jax.jit` compiles with these options.
        device_kind: The kind of its devices, as JAX names it.
        options: XLA's options for it.

    Returns:
        A function like `function`.
    """

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with additions_in_products(adds_in_products(device_kind, options)):
            return function(*args, **kwargs)

    return traced


def _may_hang(spec: PipelineSpec) -> bool:
    """Returns whether XLA:CPU's partitioner may put a permute into a branch of some ranks."""
    shape, platform = spec.mesh.shape, spec.mesh.devices.flat[0].platform
    inside_layers = math.prod(shape.get(axis, 1) for axis in ("tensor", "expert", "context"))
    return platform == "cpu" and spec.schedule is not None and inside_layers > 1


def _require_no_permutes_in_branches(lowered: Any) -> None:
    """Raises a `ValueError` for a program that XLA:CPU would never end.

    Its devices wait for all others at a permute, also for those of ranks that do not take the
    branch; other collectives wait for those of their group (docs/dev/LOG.md).
    """
    sites = audit(lowered.compile().as_text()).sites  # `jax.jit` keeps what is compiled
    for site in sites:
        in_branch = site.conditional and f"/{ON_ALL_RANKS}/" not in site.op_name
        if in_branch and site.kind == "collective-permute":
            raise ValueError(
                f"On CPUs this step would never end: `{site.op_name}` moves numbers between the "
                "devices of a rank, in a branch that other ranks do not take. Functions do so that "
                "split or pad a dim which the mesh divides, such as `tensor`, in parts of another "
                "size. Give `engine='mpmd'` or `schedule='circular'`, keep the parts as weights of "
                "their own, or run it on TPUs or GPUs."
            )


def _options(spec: PipelineSpec) -> dict[str, Any]:
    """Returns XLA's options for a program: the user's, or by the table of flags."""
    if spec.compiler_options is not None:
        return dict(spec.compiler_options)
    device, is_pipeline = spec.mesh.devices.flat[0], spec.schedule is not None
    traits = StepTraits(
        device.platform,
        device.device_kind,
        "pipeline" if is_pipeline else "none",
        pipelines=is_pipeline,
        has_experts=spec.mesh.shape.get("expert", 1) > 1,
    )
    return default_options(FLAGS, traits, device)


def _replicate_scalars(arguments: PyTree, replicated: NamedSharding) -> PyTree:
    """Returns arguments whose scalars are on all devices, if another argument is."""
    leaves, tree = jax.tree.flatten(arguments)
    size = replicated.mesh.size
    if size == 1 or not any(_num_devices(leaf) == size for leaf in leaves):
        return arguments
    return tree.unflatten([_replicate_scalar(leaf, replicated) for leaf in leaves])


def _replicate_scalar(x: Any, replicated: NamedSharding) -> Any:
    """Returns a scalar of one device on all of them, and others as they are.

    Keys are left alone: a step has a new one each time.
    """
    if _num_devices(x) != 1 or x.shape or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    # Unlike `jax.device_put`, it does not compare the values of all processes.
    return jax.make_array_from_callback((), replicated, lambda _: np.asarray(x))


def _num_devices(x: Any) -> int:
    """Returns the number of devices that have an array; 0 for what is no array with values."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return len(x.sharding.device_set) if is_array else 0
