"""Reports an error that has ended a command, and chooses the exit code."""

import logging
import os
import sys
import tempfile
import threading
import traceback

from ..._durable import PATH_ERRORS, DiskError
from ..._input import clause, short_repr, shorten

USER_ERROR = 2
"""The exit code of a user's mistake, which a restart does not repair."""

_MAX_MESSAGE = 4000
"""The most characters of an error message."""

_NO_MEMORY = (
    "There is not enough memory. These keys decide how much is needed: `base_emb_dim`, "
    "`base_mlp_dim`, `base_num_decoder_layers`, `vocab_size` and `num_experts` for weights; "
    "`per_device_batch_size`, `num_pipeline_microbatches`, `max_target_length` and `remat_policy` "
    "for activations. Make them smaller, or use more devices."
)

TRACEBACK_VARIABLE = "JAXPIPE_TRACEBACK"
"""The environment variable that lets a command print the traceback."""

_told: set[str] = set()
"""Failures of threads that have been printed."""


def hide_logged_tracebacks() -> None:
    """Keeps Orbax and threads from printing warnings and errors that a command reports itself."""
    logger = logging.getLogger("absl")
    if _is_short not in logger.filters:
        logger.addFilter(_is_short)
    threading.excepthook = lambda failed: _tell_of_failure(failed.exc_type, failed.exc_value)
    # Callbacks of Tensorstore's threads end in this one, some dozens with the same error.
    sys.unraisablehook = lambda failed: _tell_of_failure(failed.exc_type, failed.exc_value)


def _is_short(record: logging.LogRecord) -> bool:
    is_error = record.levelno >= logging.ERROR and not record.exc_info
    return is_error and len(record.getMessage()) < 1000


def _tell_of_failure(kind: type[BaseException], error: BaseException | None) -> None:
    what = " ".join(f"{kind.__name__}: {error}".split())
    if what in _told:
        return
    _told.add(what)
    print(f"jaxpipe: a thread has failed: {shorten(what, 500)}", file=sys.stderr)


def is_run_error(error: BaseException) -> bool:
    """Returns whether an exception has ended a run for a reason that needs no traceback."""
    from ...data.sources import LostFileError
    from ...mpmd import MpmdError
    from ...train import RunError  # not at the top: they import JAX

    return isinstance(error, RunError | MpmdError | LostFileError | DiskError)


def report_error(error: BaseException, command: str) -> int:
    """Prints one message for an error that has ended a command, and returns the exit code."""
    if isinstance(error, ValueError):
        return _fail(str(error))
    if isinstance(error, OSError) and error.strerror:
        name = f"{short_repr(str(error.filename))}: " if error.filename is not None else ""
        return _fail(
            f"{name}{error.strerror}.", code=USER_ERROR if error.errno in PATH_ERRORS else 1
        )
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)[:1000]:
        return _fail(f"{_NO_MEMORY} ({shorten(str(error) or 'MemoryError', 500)})", code=1)
    if "No such compile option" in str(error):  # JAX wraps the error of XLA
        return _fail(f"`compile_xla_flags` has an option that XLA does not know: {error}")
    if isinstance(error, RuntimeError) and is_run_error(error):
        return _fail(str(error), code=1)
    return _tell_unexpected(error, command)


def _fail(message: str, *, code: int = USER_ERROR) -> int:
    print(f"jaxpipe: error: {shorten(message, _MAX_MESSAGE)}", file=sys.stderr)
    return code


def _tell_unexpected(error: BaseException, command: str) -> int:
    """Prints one line that reports a bug of jaxpipe and names the file with the traceback."""
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    what = clause(f"{type(error).__name__}: {error}")
    print(
        f"jaxpipe: error: this is a bug of jaxpipe, in `jaxpipe {command}`: {what}. "
        f"{_where_to_look(error)}",
        file=sys.stderr,
    )
    return 1


def _where_to_look(error: BaseException) -> str:
    """Writes the traceback to a file that stays, and returns a sentence that names it."""
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="jaxpipe-traceback-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(text)
        return f"Please report it with {file.name}, which has the whole traceback."
    except OSError:
        return (
            f"Run it again with {TRACEBACK_VARIABLE}=1 to see the traceback, and report it, please."
        )
