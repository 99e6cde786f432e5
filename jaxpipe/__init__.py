"""Pipeline parallelism for JAX: exactly the numbers of the unpipelined program.

`jaxpipe.pipeline` is the front door. Everything else is in a folder of its own:
`jaxpipe.schedules` (needs no JAX), `jaxpipe.sharding`, `jaxpipe.autodiff`, `jaxpipe.spmd`,
`jaxpipe.mpmd`, `jaxpipe.engines`, `jaxpipe.linen`, `jaxpipe.nnx`, `jaxpipe.equinox`,
`jaxpipe.compat`, `jaxpipe.models`, `jaxpipe.xla`, `jaxpipe.cost`, `jaxpipe.data`, `jaxpipe.train`,
`jaxpipe.report`, `jaxpipe.testing`.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from . import equinox as equinox
    from . import linen as linen
    from . import mpmd as mpmd
    from . import nnx as nnx
    from . import schedules as schedules
    from .api import Model as Model
    from .api import PipelinedModel as PipelinedModel
    from .api import Weighted as Weighted
    from .api import pipeline as pipeline
    from .api import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from .cli import emulate_devices as emulate_devices
    from .planner import plan as plan
    from .sharding import make_mesh as make_mesh

__version__ = "0.1.0"

_LAZY = {
    "Model": "api",
    "PipelinedModel": "api",
    "Weighted": "api",
    "pipeline": "api",
    "vocab_parallel_cross_entropy": "api",
    "emulate_devices": "cli",
    "plan": "planner",
    "make_mesh": "sharding",
    "equinox": "equinox",
    "linen": "linen",
    "mpmd": "mpmd",
    "nnx": "nnx",
    "schedules": "schedules",
}
"""Names of this package that are imported at their first use: `jaxpipe.schedules` needs no JAX."""


if not typing.TYPE_CHECKING:

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY} - {"importlib", "typing"})

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            folder = importlib.import_module(f"{__name__}.{_LAZY[name]}")
        except ModuleNotFoundError as error:
            if error.name not in ("flax", "equinox"):
                raise
            install = f'pip install "jaxpipe[{error.name}]"'
            raise ModuleNotFoundError(
                f"`jaxpipe.{name}` needs {error.name}. Run `{install}`.", name=error.name
            ) from error
        return folder if name == _LAZY[name] else getattr(folder, name)
