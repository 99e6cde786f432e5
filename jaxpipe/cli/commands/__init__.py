"""The commands of `jaxpipe`, one a file."""
