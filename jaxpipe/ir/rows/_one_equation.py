"""The relations of the results of one equation, for those who walk through programs themselves."""

from ._equation_pair import EquationPair
from ._relations import Relation
from ._walk import _RULES, _of_unknown


def relations_of(pair: EquationPair) -> list[Relation]:
    """Returns the relations of the results of an equation without inner programs.

    Args:
        pair: The equation in both programs.

    Returns:
        The relations.

    Raises:
        MixesRowsError: If a result has none.
    """
    return _RULES.get(pair.name, _of_unknown)(pair)
