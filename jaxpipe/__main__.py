"""Runs the command `jaxpipe` for `python -m jaxpipe`."""

from .cli import script

script()
