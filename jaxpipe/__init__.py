"""Pipeline parallelism for JAX: any schedule, exactly the numbers of the unpipelined program.

Each folder stands alone and is imported by its name: `jaxpipe.schedules` (needs no JAX),
`jaxpipe.sharding`, `jaxpipe.spmd`, `jaxpipe.models`, `jaxpipe.train`.
"""

__version__ = "0.1.0"
