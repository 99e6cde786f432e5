"""Makes the C library keep the memory that XLA:CPU frees after every call."""

import ctypes
import sys

# Names and numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for the next allocation, up to 1 GiB at the end of its heap."""
    # XLA:CPU allocates the temporaries of a program whenever it runs. By default glibc asks the
    # kernel for large ones, and returns them: every call then takes a page fault for each 4 KiB. Of
    # a step of matrix products with 40 MB of temporaries that was a tenth of the CPU time. The
    # process holds some more memory for it, which is why a library does not do it on its own.
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
