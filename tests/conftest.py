"""Eight emulated CPU devices, strict dtypes, and the package under jaxtyping and beartype."""

import os
from importlib.metadata import version

# Tests compile much and compute little: without LLVM's optimizations they take half the time.
# XLA's own passes, the partitioner's among them, run as ever.
# And without fused multiply-add, which AVX does not have: with it a number's last bit depends on
# what XLA fuses, and where it is then rounded to FP8 that bit may become a large one.
# And without an MLIR context for every fusion, which took half of the time that compiling took.
flags = " --xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
if version("jaxlib").startswith("0.10."):  # later ones do not know the flag, and stop
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + flags).strip()

from jaxpipe.cli import emulate_devices

emulate_devices(8)

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

settings.register_profile("patient", deadline=None)  # the first example compiles or imports
settings.load_profile("patient")
jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook(
    [
        "jaxpipe.schedules",
        "jaxpipe.sharding",
        "jaxpipe.autodiff",
        "jaxpipe.spmd",
        "jaxpipe.linen",
        "jaxpipe.nnx",
        "jaxpipe.plan",
        "jaxpipe.models",
        "jaxpipe.mpmd",
        "jaxpipe.data",
        "jaxpipe.train",
        "jaxpipe.report",
    ],
    "beartype.beartype",
)
