"""Pictures of values: the language says that there may be one, `io` says how it is drawn.

Drawing builds on schedules and timelines, so it cannot be imported by them: it registers here.
"""

from functools import singledispatch


@singledispatch
def draw(value: object) -> str | None:
    """Returns a picture of a value as the text of an SVG file; None if none can be drawn."""
    return None
