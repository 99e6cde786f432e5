"""The relations of the results of one equation, for those who walk through programs themselves."""

from ._relations import Relation
from ._step import Step
from ._walk import _RULES, _of_unknown


def relations_of(step: Step) -> list[Relation]:
    """Returns the relations of the results of an equation without inner programs.

    Args:
        step: The equation in both programs.

    Returns:
        The relations.

    Raises:
        MixesRowsError: If a result has none.
    """
    return _RULES.get(step.name, _of_unknown)(step)
