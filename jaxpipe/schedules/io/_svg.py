"""A timeline as a picture: one self-contained SVG, 1000 pixels wide.

The colour shows the operation, the lightness the chunk of the rank, the number the microbatch, and
empty space is the bubble. A fused pair is drawn as two halves, one above the other. The colours are
from the palette of Okabe and Ito, which colour-blind people can tell apart.

A page may change the colours of everything but actions: `--picture-ground`, `-lane`, `-line`,
`-ink` and `-quiet`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from ..analysis._measure import makespan, parallelogram_bubble, peak_activations, rectangular_bubble
from ..analysis._simulate import Costs, Time, TimedStep, Timeline, simulate
from ..language._action import Action, Op, actions_of
from ..language._schedule import Schedule, describe, draw, stages_of_rank

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 66, 18, 70
_ROW, _BAR = 36, 28
_CHARACTER = 0.64  # width of a digit, in its size
_SMALLEST = 6.5  # a label that has to be smaller is left out

COLOURS = {
    Op.F: ("#0072b2", "forward F"),
    Op.B: ("#d55e00", "backward B"),
    Op.I: ("#cc79a7", "input gradient I"),
    Op.W: ("#009e73", "weight gradient W"),
}
_NEUTRAL = {
    "ground": "#fff",
    "lane": "#e9edf2",
    "line": "#d0d7de",
    "ink": "#30363d",
    "quiet": "#6e7781",
}
# Twice, for programs that know no variables of CSS.
_FILL = {name: f"fill:{c};fill:var(--picture-{name},{c})" for name, c in _NEUTRAL.items()}
_STYLE = (
    ".schedule text{font-family:ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,"
    f"sans-serif;font-size:12px;{_FILL['ink']}}}"
    f".schedule .title{{font-size:16px;font-weight:600}}.schedule .quiet{{{_FILL['quiet']}}}"
    f".schedule .ground{{{_FILL['ground']}}}.schedule .lane{{{_FILL['lane']}}}"
    f".schedule .line{{{_FILL['line'].replace('fill', 'stroke')};stroke-width:0.7}}"
    ".schedule .n{text-anchor:middle;fill:#fff;font-weight:600}.schedule .dark{fill:#1f2328}"
)
_MAX_LUMINANCE = 0.21
"""The highest luminance of a box on which white has more contrast than dark ink."""
_MAX_BOXES = 4000
"""The most actions that are drawn with names and numbers; more are one path per colour and rank."""


def to_svg(timeline: Timeline, title: str = "") -> str:
    """Draws a timeline as a picture.

    Args:
        timeline: A timeline with at least one action.
        title: The heading; any text. Default: the counts of the schedule.

    Returns:
        The text of an SVG file, 1000 pixels wide.

    Example:
        >>> from jaxpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("zbv", ranks=2, microbatches=4), Costs())
        >>> to_svg(timeline, "ZB-V")[:4]
        '<svg'
    """
    title = title or describe(timeline.schedule)
    scale = (_WIDTH - _LEFT - _RIGHT) / (makespan(timeline) or 1)
    bottom = _TOP + _ROW * len(timeline.rows)
    height = bottom + 68
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>',
        _text(_LEFT, 28, title, "title"),
        *_legend(timeline),
        *_axis(makespan(timeline), scale, bottom),
    ]
    draw = _blocks if sum(map(len, timeline.rows)) <= _MAX_BOXES else _paths
    for rank, row in enumerate(timeline.rows):
        y = _TOP + rank * _ROW + (_ROW - _BAR) / 2
        parts += [*_lane(rank, y), *draw(row, stages_of_rank(timeline.schedule, rank), y, scale)]
    parts += [_text(_LEFT, bottom + 46 + 16 * i, line) for i, line in enumerate(_caption(timeline))]
    return "\n".join([*parts, "</svg>\n"])


@draw.register
def _draw_timeline(timeline: Timeline) -> str | None:
    """Draws a timeline; None if it has no actions."""
    return to_svg(timeline) if any(timeline.rows) else None


@draw.register
def _draw_schedule(schedule: Schedule) -> str | None:
    """Draws a schedule with equal times of F, I and W; None if it cannot run or has no actions."""
    try:
        return draw(simulate(schedule, Costs()))
    except ValueError:
        return None


def _text(x: Time, y: Time, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _legend(timeline: Timeline) -> list[str]:
    """Returns the legend: the operations that occur, and the lightness of chunks if several."""
    steps = [timed.step for row in timeline.rows for timed in row]
    used = {action.op for step in steps for action in actions_of(step)}
    parts, x = [], float(_LEFT)
    for op in Op:
        if op in used:
            colour, label = COLOURS[op]
            parts += [_box(x, 44, 12, 12, colour), _text(x + 17, 54, label)]
            x += 38 + 6.4 * len(label)
    chunks = max(len(stages_of_rank(timeline.schedule, r)) for r in range(len(timeline.rows)))
    for chunk in range(chunks if chunks > 1 else 0):
        parts.append(_box(x + 13 * chunk, 44, 12, 12, shade("#57606a", chunk, chunks)))
    if chunks > 1:
        parts.append(_text(x + 13 * chunks + 5, 54, f"chunk 0 to {chunks - 1}"))
    return parts


def _axis(end: Time, scale: Time, bottom: Time) -> list[str]:
    """Returns the time axis, in about ten round steps."""
    step = _round_step(end / 10)
    parts = []
    for i in range(int(end / step) + 1):
        x = _LEFT + i * step * scale
        parts.append(
            f'<line class="line" x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}"/>'
        )
        parts.append(_text(x, bottom + 14, f"{i * step:g}", "quiet", "middle"))
    return parts


def _round_step(least: Time) -> Time:
    """Returns the first of 1, 2, 5, 10, 20, ... times any power of ten not below `least`."""
    power = 10.0 ** (len(f"{int(least)}") - 1) if least >= 1 else 1.0
    while power > least > 0:
        power /= 10
    return next((k * power for k in (1, 2, 5) if k * power >= least), 10 * power)


def _lane(rank: int, y: Time) -> list[str]:
    where = f'x="{_LEFT}" y="{y:.2f}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_BAR}"'
    label = _text(_LEFT - 10, y + _BAR / 2 + 4, f"rank {rank}", anchor="end")
    return [label, f'<rect class="lane" {where} rx="2"/>']


def _blocks(
    row: tuple[TimedStep, ...], stages: Sequence[int], y: Time, scale: Time
) -> Iterator[str]:
    """Yields the boxes of a rank's actions, each with its name and times."""
    for timed in row:
        x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
        halves = actions_of(timed.step)
        height = _BAR / len(halves)
        yield f"<g><title>{escape(f'{timed.step} from {timed.start:g} to {timed.end:g}')}</title>"
        for i, action in enumerate(halves):
            chunk = stages.index(action.stage)
            yield from _block(action, x, y + i * height, width, height, chunk, len(stages))
        yield "</g>"


def _paths(
    row: tuple[TimedStep, ...], stages: Sequence[int], y: Time, scale: Time
) -> Iterator[str]:
    """Yields the boxes of a rank's actions without names, as few bytes."""
    boxes_by_fill: defaultdict[str, list[str]] = defaultdict(list)
    for timed in row:
        x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
        halves = actions_of(timed.step)
        height = _BAR / len(halves)
        for i, action in enumerate(halves):
            fill = shade(COLOURS[action.op][0], stages.index(action.stage), len(stages))
            box = f"h{width:.2f}v{height:g}h-{width:.2f}z"
            boxes_by_fill[fill].append(f"M{x:.2f} {y + i * height:g}{box}")
    for fill, boxes in boxes_by_fill.items():
        yield f'<path fill="{fill}" d="{"".join(boxes)}"/>'


def _block(
    action: Action, x: Time, y: Time, width: Time, height: Time, chunk: int, chunks: int
) -> list[str]:
    """Returns the box of an action, with the number of its microbatch where that fits."""
    fill = shade(COLOURS[action.op][0], chunk, chunks)
    parts = [_box(x, y, max(width - 0.8, 0.4), height - 0.6, fill)]
    label = box_label(action)
    size = min(11.0, (width - 1.5) / len(label) / _CHARACTER)
    if size >= _SMALLEST:
        kind = "n dark" if needs_dark_ink(fill) else "n"
        where = f'x="{x + width / 2:.1f}" y="{y + height / 2 + size / 2.7:.1f}"'
        parts.append(f'<text {where} class="{kind}" style="font-size:{size:.1f}px">{label}</text>')
    return parts


def box_label(action: Action) -> str:
    """Returns the label of an action's box: its microbatch, and a letter for its slice."""
    if action.slice is None:
        return str(action.microbatch)
    letter = "abcdefgh"[action.slice] if action.slice < 8 else f".{action.slice}"
    return f"{action.microbatch}{letter}"


def _box(x: Time, y: Time, width: Time, height: Time, fill: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="2" '
        f'fill="{fill}"/>'
    )


def shade(colour: str, chunk: int, chunks: int) -> str:
    """Returns the colour of a chunk: full for chunk 0, more than half white for the last."""
    white = 0.58 * chunk / max(chunks - 1, 1)
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in channels)


def needs_dark_ink(fill: str) -> bool:
    """Returns whether dark ink has more contrast than white on a box of this colour.

    That depends on its relative luminance, from 0 to 1, as WCAG 2 defines it.
    """
    channels = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    weighted = (w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return sum(weighted) > _MAX_LUMINANCE


def _caption(timeline: Timeline) -> tuple[str, str]:
    schedule = timeline.schedule
    end, rectangular = makespan(timeline), rectangular_bubble(timeline)
    peaks = peak_activations(schedule)
    return (
        f"{len(peaks)} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} "
        f"microbatches. Makespan {end:g}; bubble {rectangular:g} ({rectangular / (end or 1):.1%}), "
        f"parallelogram bubble {parallelogram_bubble(timeline):g}.",
        f"Peak live activations {max(peaks)}, by rank {' '.join(map(str, peaks))}.",
    )
