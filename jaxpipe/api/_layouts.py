"""The layers of every stage, as even as possible."""


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spreads layers over stages as evenly as possible.

    Returns:
        Layers of every stage. If they do not divide, the stages after the first have one more, and
        the last ones have it last: the first and the last also run embedding and loss.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"The model has {num_layers} layers and the schedule {num_stages} stages. Give fewer "
            "ranks or chunks, so that every stage has a layer."
        )
    least, more = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1][:more]
    return tuple(least + (stage in order) for stage in range(num_stages))
