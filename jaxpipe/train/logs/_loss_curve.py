"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath

# Told apart by people with any colour vision (Okabe and Ito, 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def loss_curve(
    path: str | PathLike[str], curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]
) -> None:
    """Draws losses over steps as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    _check(curves)
    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global state and no display
    axes = figure.add_subplot()
    for i, (label, (steps, losses)) in enumerate(curves.items()):
        # Equal curves, which this project is about, stay visible: each is thinner than the last.
        width = 1.4 + 4 * (1 - (i + 1) / len(curves))
        color = COLORS[i % len(COLORS)]
        axes.plot(steps, losses, label=label, color=color, linewidth=width, solid_capstyle="round")
    axes.set_xlabel("step")
    axes.set_ylabel("loss", rotation=0, ha="right", va="top", y=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(fspath(path), format="png")


def _check(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    if not curves:
        raise ValueError("`curves` is empty. Give `{label: (steps, losses)}`.")
    for label, (steps, losses) in curves.items():
        if len(steps) != len(losses) or len(steps) == 0:
            raise ValueError(
                f"`curves[{label!r}]` has {len(steps)} steps and {len(losses)} losses. Give one "
                "loss a step, and at least one."
            )
