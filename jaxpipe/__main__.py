"""`python -m jaxpipe`"""

from .cli import script

script()
