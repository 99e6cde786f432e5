import io

import pytest

from jaxpipe.train.logs import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, *, log_period: int = 1, steps: int = 3, **options) -> str:
    with progress(stream, num_steps=steps, log_period=log_period, **options) as report:
        for step in range(1, steps + 1):
            report(step, {"loss": 4.12345 / step, "learning_rate": 1e-5})
    return stream.getvalue()


def test_without_a_terminal_every_step_is_a_line():
    assert show(io.StringIO()) == (
        "step 1/3  loss 4.123  learning_rate 1e-05\n"
        "step 2/3  loss 2.062  learning_rate 1e-05\n"
        "step 3/3  loss 1.374  learning_rate 1e-05\n"
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
