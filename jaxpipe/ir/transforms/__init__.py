"""Programs made of a program: its two halves, and ones that add, read and write in place."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._accumulate import Finish as Finish
    from ._accumulate import accumulate as accumulate
    from ._accumulate import add_gradients as add_gradients
    from ._accumulate import additions_in_products as additions_in_products
    from ._accumulate import cast_of_gradient as cast_of_gradient
    from ._entries import Entry as Entry
    from ._entries import call_with_entries as call_with_entries
    from ._in_parts import LAST_PART as LAST_PART
    from ._in_parts import first_parts as first_parts
    from ._in_parts import join_parts as join_parts
    from ._in_parts import results_in_parts as results_in_parts
    from ._in_parts import with_first_parts as with_first_parts
    from ._minimal_cut import minimal_cut as minimal_cut
    from ._partition import InputKind as InputKind
    from ._partition import Partition as Partition
    from ._partition import partition as partition
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
