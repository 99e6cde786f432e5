"""Checks of what users give, before anything compiles."""

from ._functions import check_effects as check_effects
from ._functions import check_windows as check_windows
from ._functions import is_differentiated as is_differentiated
from ._keys import check_key as check_key
