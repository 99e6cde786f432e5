"""Ctrl-C: every command ends in one line, also while its main thread is in a long call."""

import signal
import subprocess
import sys
import time

from jaxpipe.cli.process import CLEANUP_SECONDS

# A terminal's foreground, also where the tests run in the background.
FOREGROUND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
WATCHED = FOREGROUND + "from jaxpipe.cli import process as i; i.watch_interrupts(); "
LONG_CALL = "import hashlib; print(1, flush=True); hashlib.pbkdf2_hmac('md5', b'', b'', 10**9)"


def interrupted(code: str, times: int = 1) -> tuple[int, str, float]:
    """The exit code and the errors of a script that is interrupted when it has printed a line, and
    the seconds that it took to end."""
    running = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None and running.stdout.readline()
    time.sleep(0.3)  # for the call after the line
    began = time.monotonic()
    try:
        for _ in range(times):
            running.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    return running.returncode, said, time.monotonic() - began


UNWINDS = WATCHED + "u = i.unwinding(); u.__enter__(); "


def test_a_command_whose_main_thread_is_in_a_long_call_ends_at_once_in_one_line():
    code, said, seconds = interrupted(WATCHED + LONG_CALL)
    assert (code, said) == (130, "jaxpipe: interrupted (SIGINT)\n")
    assert seconds < CLEANUP_SECONDS


def test_a_command_that_unwinds_has_some_seconds_for_it():
    code, said, seconds = interrupted(UNWINDS + LONG_CALL)
    assert (code, said) == (130, "jaxpipe: interrupted (SIGINT)\n")
    assert seconds > CLEANUP_SECONDS - 1


def test_an_error_that_an_interrupt_has_caused_is_not_shown():
    code = (
        WATCHED
        + """
import time
def run():
    with i.unwinding():
        try:
            print(1, flush=True); time.sleep(60)
        finally:
            raise ValueError("half a module")
try:
    run()
except KeyboardInterrupt:
    raise SystemExit(i.say_interrupted())
"""
    )
    assert interrupted(code)[:2] == (130, "jaxpipe: interrupted (SIGINT)\n")


def test_a_second_interrupt_ends_at_once():
    code, said, seconds = interrupted(UNWINDS + LONG_CALL, times=2)
    assert (code, said) == (130, "jaxpipe: interrupted (SIGINT)\n")
    assert seconds < CLEANUP_SECONDS


def test_a_run_that_takes_interrupts_ends_by_itself_or_at_the_second():
    takes = "signal.signal(2, lambda *_: None); import time; print(1, flush=True); time.sleep(1); "
    assert interrupted(WATCHED + takes + "raise SystemExit(5)")[:2] == (5, "")
    code, said, _ = interrupted(WATCHED + takes + "time.sleep(60)", times=2)
    assert (code, said) == (130, "jaxpipe: interrupted (SIGINT)\n")


def test_interrupts_that_are_ignored_stay_so():
    ignored = WATCHED.replace("signal.default_int_handler", "signal.SIG_IGN")
    code, said, _ = interrupted(ignored + "import time; print(1, flush=True); time.sleep(1)")
    assert (code, said) == (0, "")


def test_a_command_that_is_interrupted_ends_in_one_line():
    command = """
from jaxpipe import report
from jaxpipe.cli import main
def read_run(folder):
    print(1, flush=True)
    time.sleep(60)
report.read_run = read_run
raise SystemExit(main(["report", "folder"]))
"""
    code, said, _ = interrupted(f"{FOREGROUND}import time{command}")
    assert (code, said) == (130, "jaxpipe: interrupted (SIGINT)\n")
