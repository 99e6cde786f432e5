"""Checks of what users give, before anything compiles."""

from ._effects import check_effects as check_effects
from ._keys import check_key as check_key
