"""Keeps libraries from writing to standard error what no user of a command can act on."""

import os
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

_LOG_LEVELS = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA: errors alone, no warnings
    "TPU_MIN_LOG_LEVEL": "3",  # libtpu: nothing but what ends the process
    "TPU_STDERR_LOG_LEVEL": "3",
    "GRPC_VERBOSITY": "ERROR",
}


def set_log_levels(environment: MutableMapping[str, str]) -> None:
    """Lets compilers and runtimes report errors alone. Call it before JAX is imported."""
    for name, level in _LOG_LEVELS.items():
        environment.setdefault(name, level)


@contextmanager
def quiet_stderr(*, verbose: bool = False) -> Iterator[None]:
    """Hides what native code writes to standard error, unless it raises more than a ValueError."""
    # libtpu ignores its log levels while it loads, and off TPUs it complains of a machine that it
    # does not know.
    if verbose:
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        is_unexpected = True
        try:
            yield
            is_unexpected = False
        except ValueError:  # a user's mistake, which says itself what is wrong
            is_unexpected = False
            raise
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            if is_unexpected:
                hidden.seek(0)
                os.write(2, hidden.read())
