import io
import re

import jax
import pytest

from jaxpipe.train.estimate import memory_metrics
from jaxpipe.train.logs import compiling, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, *, log_period: int = 1, steps: int = 3, **options) -> str:
    with progress(stream, num_steps=steps, log_period=log_period, **options) as report:
        for step in range(1, steps + 1):
            report.step(step, {"loss": 4.12345 / step, "learning_rate": 1e-5})
    return stream.getvalue()


def test_without_a_terminal_every_step_is_a_line():
    assert show(io.StringIO()) == (
        "step 1/3  loss 4.123       learning_rate 1e-05\n"
        "step 2/3  loss 2.062       learning_rate 1e-05\n"
        "step 3/3  loss 1.374       learning_rate 1e-05\n"
    )


def test_lines_come_every_log_period_and_at_the_end():
    lines = show(io.StringIO(), steps=7, log_period=3).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]


@pytest.mark.parametrize(
    ("stream", "bar", "is_bar"),
    [
        (Terminal(), "auto", True),
        (Terminal(), False, False),
        (io.StringIO(), "auto", False),
        (io.StringIO(), True, True),
    ],
)
def test_a_terminal_gets_a_bar_unless_told_otherwise(stream, bar, is_bar: bool):
    shown = show(stream, bar=bar)
    assert ("\x1b[" in shown) == is_bar
    assert "3/3" in shown
    assert "loss 1.374" in shown


def test_columns_are_aligned_whatever_the_values_are():
    stream = io.StringIO()
    with progress(stream, num_steps=100, log_period=1) as report:
        report.step(9, {"loss": 4.0, "learning_rate": 1e-5})
        report.step(10, {"loss": -1.2345e-05, "learning_rate": 0.5})
    nine, ten = stream.getvalue().splitlines()
    assert nine.index("learning_rate") == ten.index("learning_rate")
    assert (nine[:10], ten[:10]) == ("step   9/1", "step  10/1")


def test_beside_the_bar_are_the_important_metrics_that_fit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    stream = Terminal()
    with progress(stream, num_steps=1000, log_period=1) as report:
        metrics = {"loss": 4.0, "accuracy": 0.5, "gradient_norm": 1.0, "learning_rate": 1e-5}
        report.step(999, metrics | {"step_time_seconds": 0.25, "tokens_per_second": 4096.0})
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()[-1]
    assert last.split("\r")[-1].startswith("step  999/1000 ")
    assert last.rstrip().endswith("loss 4  step_time_seconds 0.25")


def test_a_compilation_is_one_line_that_says_how_long_it_took_and_what_the_cache_saved():
    stream = io.StringIO()
    with compiling(stream, "the train step"):
        jax.monitoring.record_event_duration_secs(
            "/jax/compilation_cache/compile_time_saved_sec", 38.04
        )
    with compiling(stream, "the train step"):  # the saved time of another compilation is not its
        pass
    assert stream.getvalue() == (
        "compiled the train step in 0.0 s: 1 program(s) from the compile cache saved 38.0 s\n"
        "compiled the train step in 0.0 s\n"
    )


def test_on_a_terminal_a_compilation_shows_the_seconds_so_far():
    stream = Terminal()
    with compiling(stream, "the train step"):
        pass
    assert "compiling the train step ... 0 s" in stream.getvalue()
    assert stream.getvalue().endswith("compiled the train step in 0.0 s\n")
    with pytest.raises(KeyboardInterrupt), compiling(stream := io.StringIO(), "the train step"):
        raise KeyboardInterrupt
    assert stream.getvalue() == ""


class Accelerator:
    def __init__(self, peak: int):
        self.peak = peak

    def memory_stats(self) -> dict[str, int]:
        return {"peak_bytes_in_use": self.peak, "bytes_limit": 10**12}


def test_the_memory_of_a_step_is_that_of_the_fullest_device_that_reports_it():
    full, other = Accelerator(3 * 10**9), Accelerator(10**9)
    assert memory_metrics([other, full, *jax.devices("cpu")]) == {"peak_memory_gb": 3.0}
