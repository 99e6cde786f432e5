"""A picture as text: boxes, labels and arrows of one SVG, legible on light and on dark pages.

Colours are those of Okabe and Ito (2008), which people who see two basic colours tell apart. They
keep their lightness on a dark page, so labels on them are always black. Only generic fonts are
named, so a picture needs no other file.
"""

from html import escape

WIDTH = 1000

FILLS = {
    "blue": "#56b4e9",
    "orange": "#e69f00",
    "green": "#2fb48c",
    "red": "#e8824a",
    "purple": "#cc79a7",
    "yellow": "#f0e442",
}
LIGHT = {"ground": "#ffffff", "lane": "#eef1f4", "line": "#57606a", "ink": "#1f2328"}
DARK = {"ground": "#0d1117", "lane": "#21262d", "line": "#9198a1", "ink": "#e6edf3"}


def _rules(colours: dict[str, str]) -> str:
    return (
        f".ground{{fill:{colours['ground']}}}.lane{{fill:{colours['lane']}}}"
        f"text{{fill:{colours['ink']}}}.head{{fill:{colours['line']}}}"
        f".line{{fill:none;stroke:{colours['line']}}}"
    )


STYLE = (
    "text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px}"
    "text.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".title{font-size:17px;font-weight:600}.bold{font-weight:600}.small{font-size:11px}"
    ".line{stroke-width:1.4}.dashed{stroke-dasharray:4 3}"
    + "".join(f".{name}{{fill:{colour}}}" for name, colour in FILLS.items())
    + _rules(LIGHT)
    + "text.on{fill:#000000}"
    + f"@media (prefers-color-scheme:dark){{{_rules(DARK)}text.on{{fill:#000000}}}}"
)


class Picture:
    """The parts of a picture, in the order in which they are drawn."""

    def __init__(self, title: str, height: float) -> None:
        self.title, self.height = title, height
        self._parts: list[str] = []
        self.text(20, 30, title, "title")

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draws a rectangle; `kind` is a name of FILLS, `lane`, or `line` for the frame alone."""
        size = f'width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size} rx="3"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Writes one line whose baseline is at `y`."""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'xml:space="preserve">{escape(text, quote=False)}</text>'
        )

    def labelled(self, x: float, y: float, width: float, height: float, kind: str, *lines: str):
        """Draws a rectangle with centred lines."""
        self.box(x, y, width, height, kind)
        on = "on" if kind in FILLS else ""
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            style = f"mono small {on}" if line.startswith("`") else on
            self.text(x + width / 2, first + 16 * i, line.strip("`"), style, "middle")

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draws a line through `points` with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        path = "L".join(f"{a:g} {b:g}" for a, b in (*points[:-1], (x - 5 * dx, y - 5 * dy)))
        head = [
            (x, y),
            (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx),
            (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx),
        ]
        corners = " ".join(f"{a:g},{b:g}" for a, b in head)
        kind = "line dashed" if dashed else "line"
        self._parts += [
            f'<path class="{kind}" d="M{path}"/>',
            f'<polygon class="head" points="{corners}"/>',
        ]

    def svg(self) -> str:
        """Returns the text of the SVG file."""
        size = f'viewBox="0 0 {WIDTH} {self.height:g}" width="{WIDTH}" height="{self.height:g}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
                f'aria-label="{escape(self.title)}">',
                f"<style>{STYLE}</style>",
                f'<rect class="ground" width="{WIDTH}" height="{self.height:g}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
