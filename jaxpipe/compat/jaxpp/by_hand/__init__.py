"""Programs of tasks and transfers that are written by hand, as `jaxpp.experimental.mpmd` has them.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
    >>> mesh = MpmdMesh(Mesh(jax.devices()[:2], ("stage",)), "stage")
    >>> first, second = (NamedSharding(m, PartitionSpec()) for m in mesh.unstack)
    >>> @mpmd(mesh, in_shardings=(first,))
    ... def double_twice(x):
    ...     x = task(lambda x: 2 * x, out_shardings=first)(x)
    ...     x = transfer(x, out_shardings=second).done()
    ...     return task(lambda x: 2 * x, out_shardings=second)(x)
    >>> print(double_twice(jax.device_put(jnp.arange(3), first)))
    [0 4 8]
"""

from ._operations import MpmdMesh as MpmdMesh
from ._operations import TransferFuture as TransferFuture
from ._operations import slice as slice
from ._operations import stack as stack
from ._operations import task as task
from ._operations import transfer as transfer
from ._program import FunctionByHand as MpmdFunction
from ._program import LoweredMpmdFun as LoweredMpmdFun
from ._program import mpmd as mpmd

__all__ = [
    "LoweredMpmdFun",
    "MpmdFunction",
    "MpmdMesh",
    "TransferFuture",
    "mpmd",
    "slice",
    "stack",
    "task",
    "transfer",
]
