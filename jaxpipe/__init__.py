"""Pipeline parallelism for JAX: exactly the numbers of the unpipelined program.

`jaxpipe.pipeline` is the front door. Everything else is in a folder of its own:
`jaxpipe.schedules` (needs no JAX), `jaxpipe.sharding`, `jaxpipe.autodiff`, `jaxpipe.spmd`,
`jaxpipe.mpmd`, `jaxpipe.engines`, `jaxpipe.linen`, `jaxpipe.nnx`, `jaxpipe.equinox`,
`jaxpipe.compat`, `jaxpipe.kernels`, `jaxpipe.models`, `jaxpipe.xla`, `jaxpipe.cost`,
`jaxpipe.data`, `jaxpipe.train`, `jaxpipe.report`, `jaxpipe.testing`.
"""

import typing

from . import _lazy

if typing.TYPE_CHECKING:
    from . import equinox as equinox
    from . import linen as linen
    from . import mpmd as mpmd
    from . import nnx as nnx
    from . import schedules as schedules
    from . import testing as testing
    from .api import Model as Model
    from .api import PipelinedModel as PipelinedModel
    from .api import Weighted as Weighted
    from .api import layer_flops as layer_flops
    from .api import pipeline as pipeline
    from .api import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from .cli import emulate_devices as emulate_devices
    from .kernels import attention as attention
    from .sharding import make_mesh as make_mesh
    from .train.planning import plan as plan
else:
    _get, __dir__, _ = _lazy.names(__name__)

    def __getattr__(name: str) -> object:
        try:
            return _get(name)
        except ModuleNotFoundError as error:
            if error.name not in ("flax", "equinox"):
                raise
            install = f'pip install "jaxpipe[{error.name}]"'
            raise ModuleNotFoundError(
                f"`jaxpipe.{name}` needs {error.name}. Run `{install}`.", name=error.name
            ) from error


__version__ = "0.1.0"
