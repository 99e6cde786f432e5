"""Lays text out in columns."""

from collections.abc import Collection


def shorten(text: str, width: int) -> str:
    """Returns at most `width` characters: the first, or if `width` is negative the last."""
    if len(text) <= abs(width):
        return text
    return text[: width - 3] + "..." if width > 0 else "..." + text[width + 3 :]


def align(rows: list[tuple[str, ...]], left: Collection[int] = (0,)) -> list[str]:
    """Returns rows of text in columns.

    Args:
        rows: The cells of each row.
        left: The columns whose cells are on the left; those of the others are on the right.

    Returns:
        The lines, with two spaces between columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
