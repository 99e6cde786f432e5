"""`python -m jaxpipe`"""

import sys

from .cli import main

sys.exit(main())
