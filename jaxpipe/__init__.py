"""Pipeline parallelism for JAX: exactly the numbers of the unpipelined program.

Import a folder by its name: `jaxpipe.schedules` (needs no JAX), `jaxpipe.sharding`,
`jaxpipe.autodiff`, `jaxpipe.spmd`, `jaxpipe.mpmd`, `jaxpipe.linen`, `jaxpipe.nnx`,
`jaxpipe.models`, `jaxpipe.plan`, `jaxpipe.data`, `jaxpipe.train`, `jaxpipe.report`.
"""

__version__ = "0.1.0"
