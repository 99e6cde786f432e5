"""Adapts to differences between versions of JAX, from 0.10 on, and wraps JAX's private interfaces.

No other module of the package uses a private interface of JAX.
"""

import io
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import (
    api_util,
    config,
    core,
    distributed,
    pjit,
    shard_map,
    sharding_impls,
    xla_bridge,
)
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow import conditionals, loops
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.state import discharge
from jax.experimental import serialize_executable
from jax.extend import core as extend_core
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from .sharding.specs import with_axis_type

ClosedJaxpr = extend_core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""A jaxpr with its constants; from JAX 0.12 on it is `Jaxpr`, which has them itself."""


ABORTS_ON_UNSORTED_MANUAL_AXES = jax.__version_info__ >= (0, 11)
"""Whether XLA aborts on a `jax.shard_map` in another one if an inner axis precedes an outer one in
the mesh and other axes stay automatic: `named_sharding.cc`, "Manual axes must be sorted"."""


def rematerialized_jaxpr(params: Mapping[str, Any]) -> Any:
    """Returns the jaxpr of `jax.checkpoint` under `jax_remat3`, from JAX 0.11 on; else None."""
    called: Any = params.get("_prim")
    return called.jaxpr if type(called).__name__ == "RematTraced" else None


def jaxprs_in_params(params: Mapping[str, Any]) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation, which JAX's own leaves out partly."""
    jaxprs, called = extend_core.jaxprs_in_params(dict(params)), rematerialized_jaxpr(params)
    return [*jaxprs] if called is None else [*jaxprs, getattr(called, "jaxpr", called)]


def import_pallas_gpu_attention() -> tuple[Any, Any]:
    """Imports `BlockSizes` and `mha` of JAX's Pallas flash attention for GPUs."""
    # jax 0.12 warns that the module is deprecated in favour of tokamax, which JAX does not install.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "jax.experimental.pallas.ops.gpu", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
    return BlockSizes, mha


def import_pallas_triton() -> Any:
    """Imports Pallas's dialect of Triton, which GPUs alone need and which takes a second."""
    from jax.experimental.pallas import triton

    return triton


def widest_cudnn_head() -> int:
    """Returns the most channels of a head that JAX gives cuDNN's attention.

    JAX asks the GPU of this process, not the one that is compiled for: 256 on Hopper and newer.
    """
    is_new = (
        xla_bridge.backends_are_initialized()
        and fused_attention_stablehlo.check_compute_capability("9.0")
    )
    return 256 if is_new else 128


def check_cudnn() -> None:
    """Checks that JAX finds the library cuDNN, whose version its attention asks for.

    Raises:
        ValueError: If it does not; to compile for GPUs that are not there XLA does not need it.
    """
    try:
        fused_attention_stablehlo.check_cudnn_version()
    except RuntimeError as error:
        raise ValueError(
            f"JAX's attention by cuDNN asks for its version, and {error} Install the library "
            '(`pip install "jaxpipe[aot-gpu]"`; no GPU is needed), or give `attention=pallas`.'
        ) from error


def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns an array of arbitrary values, which no device fills if that can be avoided."""
    # XLA:GPU cannot split an unfilled array over automatic axes: every device would have all of it.
    mesh = jax.sharding.get_abstract_mesh()
    if platform() == "gpu" and any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        return jax.numpy.zeros(shape, dtype)
    return jax.lax.empty(shape, dtype)


def platform() -> str:
    """Returns the platform of the mesh in context, "cpu", "gpu" or "tpu"; "" without devices."""
    return getattr(jax.sharding.get_abstract_mesh().abstract_device, "platform", "")


def nan_errors() -> tuple[type[Exception], ...]:
    """Returns the errors that `jax_debug_nans` and `jax_debug_infs` raise for a program."""
    internal = getattr(api_util, "InternalFloatingPointError", FloatingPointError)
    return FloatingPointError, internal


def trace_settings() -> Hashable:
    """Returns the settings, without the mesh in context, by which `jax.jit` keeps traces apart."""
    names = config.trace_context_names()
    values = zip(names, config.trace_context(), strict=True)
    return tuple(x for name, x in values if not name.endswith("mesh_context_manager"))


def partition_spec_of(sharding: Sharding, mesh: Mesh) -> P:
    """Returns the partition spec, on the axes of `mesh`, of a compiled program's sharding."""
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    # JAX returns no `NamedSharding` if it cannot tell which mesh the compiler's choice is for.
    over_devices = sharding._to_xla_hlo_sharding(mesh.devices.ndim)
    return sharding_impls.parse_flatten_op_sharding(over_devices, mesh)[0]


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of consts and carries among the inputs of a `lax.scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 stores trees of the inputs instead.
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def load_on_devices(
    compiled: Any, source_devices: Sequence[Any], target_devices: Sequence[Any]
) -> Any:
    """Loads a compiled program on other devices of the same kind; returns None if it cannot."""
    # A program that JAX has loaded from its persistent cache cannot be saved again on CPU
    # (`Function wrapped_broadcast not found` when it runs). Another compilation finds it in the
    # cache.
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return None
    try:  # JAX saves programs for the same devices: others replace them, also in compiler options
        payload, in_tree, out_tree = serialize_executable.serialize(compiled)
        unpickler = _DeviceUnpickler(
            io.BytesIO(payload), target_devices[0].client, tuple(target_devices)
        )
        unpickler.devices_by_id = {
            device.id: other for device, other in zip(source_devices, target_devices, strict=True)
        }
        unloaded, args_info, no_kwargs = unpickler.load()
        if list(unloaded.xla_executable.local_devices()) != list(target_devices):
            return None
        info = in_tree.unflatten(args_info)
        return jax.stages.Compiled(unloaded.load(), [], info, out_tree, no_kwargs=no_kwargs)
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError):
        return None  # another version of JAX, or a device whose programs cannot be saved


def without_refs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose own references, of `jax.new_ref`, are values in place of effects."""
    if not any(isinstance(e, core.InternalMutableArrayEffect) for e in closed.effects):
        return closed
    return discharge.discharge_state(closed, should_discharge=False)


def distributed_state() -> Any:
    """Returns the state of `jax.distributed`, whose `client` is None until it is initialised."""
    return distributed.global_state


def batched_device_put(
    shardings: Sequence[Sharding],
) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """Returns a function that moves arrays to devices as `jax.device_put` does, unchecked."""
    # This takes a third of the time of `jax.device_put`.
    try:
        copy = xla_client.batched_copy_array_to_devices_with_sharding
        semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)
        devices = [s._internal_device_list.addressable_device_list for s in shardings]
    except AttributeError:
        return lambda arrays: jax.device_put(list(arrays), shardings)
    return lambda arrays: copy(arrays, devices, shardings, semantics)


class _DeviceUnpickler(serialize_executable._JaxPjrtUnpickler):
    """Reads a saved program for other devices than it was compiled for."""

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        options = xla_client.CompileOptions()
        build = options.executable_build_options
        ids = np.array([[device.id for device in self.execution_devices]])
        build.num_replicas, build.num_partitions = ids.shape
        build.device_assignment = xla_client.DeviceAssignment.create(ids)
        return self.backend.deserialize_executable(pid[1], self.execution_devices, options)


_translate: ContextVar[Callable[[NamedSharding], NamedSharding] | None] = ContextVar(
    "translate", default=None
)
_nest: ContextVar[Callable[..., Callable] | None] = ContextVar("nest", default=None)
_constraint_of: ContextVar[Callable[[Any], NamedSharding | None] | None] = ContextVar(
    "constraint_of", default=None
)
_vary: ContextVar[Callable[[Any], Any] | None] = ContextVar("vary", default=None)
_is_users: ContextVar[bool] = ContextVar("is_users", default=False)
_patching = threading.Lock()
_patches: list[tuple[Any, str, Any]] = []
_patched = 0


@contextmanager
def translated_shardings(
    translate: Callable[[NamedSharding], NamedSharding],
    nest: Callable[..., Callable] | None = None,
    constraint_of: Callable[[NamedSharding | P], NamedSharding | None] | None = None,
    vary: Callable[[Any], Any] | None = None,
) -> Iterator[None]:
    """Lets traced functions name shardings of a mesh even where some of its axes are manual.

    `translate` returns a sharding in terms of the current context, or the same object. `nest`
    replaces `jax.shard_map` with a mesh; it is called with the function, JAX's own result for it,
    and the arguments.

    `constraint_of` lets functions that are written for explicit axes run on automatic ones. It
    returns the constraint that an `out_sharding` means, or None to leave it to JAX. The results of
    the functions in `_CONSTRAINED` are constrained. Other functions ignore their `out_sharding`:
    the compiler chooses.

    `vary` marks an array as varying over all manual axes, as loops of a user's function need where
    they begin with a constant: `of_user`.
    """
    # The functions are wrapped while any thread is in this context, and translate in it alone.
    global _patched
    with _patching:
        _patched += 1
        if _patched == 1:
            _patches.extend(_patch(*patch) for patch in _sharding_patches())
    token, nest_token = _translate.set(translate), _nest.set(nest)
    constraint_token, vary_token = _constraint_of.set(constraint_of), _vary.set(vary)
    try:
        yield
    finally:
        _translate.reset(token)
        _nest.reset(nest_token)
        _constraint_of.reset(constraint_token)
        _vary.reset(vary_token)
        with _patching:
            _patched -= 1
            while not _patched and _patches:
                owner, name, old = _patches.pop()
                delattr(owner, name) if old is None else setattr(owner, name, old)


def _patch(owner: Any, name: str, new: Callable) -> tuple[Any, str, Any]:
    """Replaces an attribute; returns (owner, name, old value), None for an inherited one."""
    old = vars(owner).get(name)
    setattr(owner, name, new)
    return owner, name, old


def _sharding_patches() -> list[tuple[Any, str, Any]]:
    """Returns the attributes of JAX's modules to replace: (owner, name, new value)."""
    # `jax.lax.with_sharding_constraint`, `jax.sharding.reshard`, `out_sharding=` and the shardings
    # of `jax.jit` refuse a mesh that is not the one in context, and JAX has no public interface to
    # change that. A user's import cannot bypass the functions that implement them.
    canonicalize = sharding_impls.canonicalize_sharding
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("jax._src") and vars(module).get("canonicalize_sharding") is canonicalize
    ]
    return [
        (pjit.sharding_constraint_p, "bind", _constrain(pjit.sharding_constraint_p.bind)),
        (pjit.reshard_p, "bind", _reshard(pjit.reshard_p.bind)),
        (lax.dot_general_p, "bind", _product(lax.dot_general_p.bind)),
        (shard_map, "_shard_map", _nested(shard_map._shard_map)),
        (pjit.jit_p, "bind", _jit(pjit.jit_p.bind)),
        (pjit, "check_shardings_are_auto", _check(pjit.check_shardings_are_auto)),
        (pjit, "assert_shardings_equal", _check(pjit.assert_shardings_equal)),
        (loops, "_promote_weak_typed_input", _varying_init(loops._promote_weak_typed_input)),
        (loops, "pe", _VaryingResults(partial_eval, floats_alone=True)),
        (conditionals, "pe", _VaryingResults(partial_eval, floats_alone=False)),
        *((module, "canonicalize_sharding", _canonicalize(canonicalize)) for module in users),
    ]


@contextmanager
def of_user() -> Iterator[None]:
    """Lets loops and branches of a user's function hold constants, where axes are manual.

    There an array varies over axes by its type, and constants over none. JAX wants equal types of
    what enters a loop and what its body returns, and of what branches return, and refuses
    `lax.scan(f, jnp.zeros(...), xs)`. https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    token = _is_users.set(True)
    try:
        yield
    finally:
        _is_users.reset(token)


_ARRAYS = jax.Array | np.ndarray | np.generic | bool | int | float | complex


def _varied(x: Any, *, floats_alone: bool) -> Any:
    """Returns an array of a user's function that varies over all manual axes in this thread."""
    vary = _vary.get()
    if vary is None or not _is_users.get() or not isinstance(x, _ARRAYS):
        return x
    # Integers, which count iterations, may be the same on all devices.
    if floats_alone and not jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.inexact):
        return x
    return vary(jax.numpy.asarray(x))


def _varying_init(promote: Callable) -> Callable:
    """Returns JAX's function that casts what enters a loop to what its body returns."""

    def promoted(value: Any, aval: Any, out_aval: Any) -> tuple[Any, bool]:
        value, changed = promote(value, aval, out_aval)
        same = jax.typeof(value).manual_axis_type == getattr(out_aval, "manual_axis_type", None)
        varied = _varied(value, floats_alone=same)
        return varied, changed or varied is not value

    return promoted


class _VaryingResults:
    """JAX's module that traces bodies of loops and branches, which then return what varies."""

    def __init__(self, module: Any, *, floats_alone: bool) -> None:
        self.module, self.floats_alone = module, floats_alone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def trace_to_jaxpr(self, f: Callable, *arguments: Any, **options: Any) -> Any:
        if _vary.get() is None or not _is_users.get():
            return self.module.trace_to_jaxpr(f, *arguments, **options)

        def varying(*args: Any, **kwargs: Any) -> Any:
            vary = partial(_varied, floats_alone=self.floats_alone)
            return jax.tree.map(vary, f(*args, **kwargs))

        return self.module.trace_to_jaxpr(varying, *arguments, **options)


def _translated(sharding: Any) -> Any:
    """Returns `sharding` translated, if this thread translates and it is a `NamedSharding`."""
    translate = _translate.get()
    if translate is None or not isinstance(sharding, NamedSharding):
        return sharding
    return translate(sharding)


def _constrain(bind: Callable) -> Callable:
    def constrain(x: Any, *, sharding: Any, **params: Any) -> Any:
        meant = _translated(sharding)
        if meant is sharding:
            return bind(x, sharding=sharding, **params)
        mesh, spec = meant.mesh, meant.spec
        if AxisType.Explicit in mesh.axis_types:
            typed = with_axis_type(spec, mesh, AxisType.Explicit)
            now = jax.typeof(x).sharding.spec.partitions
            pairs = itertools.zip_longest(now, typed.partitions)
            dims = [a if b is P.UNCONSTRAINED else b for a, b in pairs]
            x = jax.sharding.reshard(x, NamedSharding(mesh, typed.update(partitions=dims)))
        if AxisType.Auto not in mesh.axis_types:
            return x
        meant = meant.update(spec=with_axis_type(spec, mesh, AxisType.Auto))
        return bind(x, sharding=meant, **(params | {"context_mesh": mesh}))

    return constrain


def _reshard(bind: Callable) -> Callable:
    def reshard(x: Any, *, dst_sharding: Any, concrete_mesh: Any, **params: Any) -> Any:
        if _is_constraint(dst_sharding):
            return pjit.with_sharding_constraint(x, dst_sharding)
        meant = _translated(dst_sharding)
        mesh = concrete_mesh if meant is dst_sharding else None
        return bind(x, dst_sharding=meant, concrete_mesh=mesh, **params)

    return reshard


def _product(bind: Callable) -> Callable:
    def product(*operands: Any, out_sharding: Any, **params: Any) -> Any:
        if not _is_constraint(out_sharding):
            return bind(*operands, out_sharding=out_sharding, **params)
        return pjit.with_sharding_constraint(
            bind(*operands, out_sharding=None, **params), out_sharding
        )

    return product


def _is_constraint(sharding: Any) -> bool:
    """Returns whether a sharding is one that `constraint_of` has returned to this thread."""
    return (
        _constraint_of.get() is not None
        and sharding is not None
        and sharding.mesh.are_all_axes_auto
    )


def _nested(jax_shard_map: Callable) -> Callable:
    def nested(f: Callable, *, mesh: Any, check_vma: bool, **options: Any) -> Callable:
        plain = jax_shard_map(f, mesh=mesh, check_vma=check_vma, **options)
        nest = _nest.get()
        if nest is None or mesh is None:
            return plain
        return nest(f, plain, mesh=mesh, check_vma=check_vma, **options)

    return nested


def _jit(bind: Callable) -> Callable:
    """Returns `bind` of `jax.jit`, wrapped so that translated shardings become constraints."""

    def constrained(x: Any, sharding: Any) -> Any:
        is_own = _translated(sharding) is sharding
        return x if is_own else pjit.with_sharding_constraint(x, sharding)

    def left(shardings: Sequence[Any]) -> tuple[Any, ...]:
        own = sharding_impls.UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
        return tuple(s if _translated(s) is s else own for s in shardings)

    def call(*inputs: Any, in_shardings: Any, out_shardings: Any, **params: Any) -> list[Any]:
        inputs = tuple(map(constrained, inputs, in_shardings))
        shardings = {"in_shardings": left(in_shardings), "out_shardings": left(out_shardings)}
        outputs = bind(*inputs, **shardings, **params)
        return list(map(constrained, outputs, out_shardings))

    return call


def _check(check: Callable) -> Callable:
    """Returns JAX's `check`, skipped if its last argument is a sharding that is translated."""

    def check_own(*arguments: Any) -> None:
        if _translated(arguments[-1]) is arguments[-1]:
            check(*arguments)

    return check_own


# `repeat` and `percentile` read `out_sharding.mesh`, so they cannot be given None.
_CONSTRAINED = ("einsum", "dot_general", "reshard", "repeat", "jnp.percentile")
"""The functions, as JAX names them to itself, whose results are constrained to `out_sharding`."""


def _canonicalize(canonicalize: Callable) -> Callable:
    def translated(sharding: Any, api_name: str, *rest: Any, **options: Any) -> Any:
        constraint_of = _constraint_of.get()
        if constraint_of is not None and isinstance(sharding, NamedSharding | P):
            constraint = constraint_of(sharding)
            if constraint is not None:
                return constraint if api_name in _CONSTRAINED else None
        return canonicalize(_translated(sharding), api_name, *rest, **options)

    return translated
