"""Which functions of a model move values between tokens."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._token_wise import check_slices as check_slices
    from ._token_wise import check_token_wise as check_token_wise
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
