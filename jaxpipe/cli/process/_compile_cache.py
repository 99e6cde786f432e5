"""Keeps compiled programs in the user's cache folder, for the next start."""

import os
from collections.abc import Mapping
from pathlib import Path


def use_compile_cache() -> Path | None:
    """Turns on JAX's persistent compilation cache, unless `JAX_COMPILATION_CACHE_DIR` is set."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    folder = user_cache_folder(os.environ) / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home, or one that is read only
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def user_cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns `jaxpipe` in `XDG_CACHE_HOME`, or in the folder `.cache` of the user's home.

    Example:
        >>> str(user_cache_folder({"XDG_CACHE_HOME": "/scratch/cache"}))
        '/scratch/cache/jaxpipe'
    """
    xdg_cache = Path(environment.get("XDG_CACHE_HOME", ""))
    caches = xdg_cache if xdg_cache.is_absolute() else Path.home() / ".cache"
    return caches / "jaxpipe"
