"""What every builder asks of its counts, said in one way."""


def require_positive(**counts: int) -> None:
    """Refuses counts below 1, naming the argument."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"`{name}` is {count}. Give at least 1.")


def require(holds: bool, problem: str, remedy: str) -> None:
    """Refuses counts a family cannot schedule: what is wrong with them, then what to give."""
    if not holds:
        raise ValueError(f"{problem} {remedy}")
