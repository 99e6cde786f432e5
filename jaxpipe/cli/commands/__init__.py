"""The commands of `jaxpipe`, one module each; they import JAX only when they run."""

from ._convert import parse_size as parse_size
from ._parser import make_parser as make_parser
from ._parser import parse as parse
