"""Eight emulated CPU devices, strict dtypes, and the package under jaxtyping and beartype."""

from jaxpipe.cli import emulate_devices

emulate_devices(8)

import jax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook(
    ["jaxpipe.schedules", "jaxpipe.sharding", "jaxpipe.autodiff", "jaxpipe.spmd", "jaxpipe.models",
     "jaxpipe.train"],
    "beartype.beartype",
)
