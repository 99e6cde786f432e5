"""The commands of `jaxpipe`, one module each; they import JAX only when they run."""
