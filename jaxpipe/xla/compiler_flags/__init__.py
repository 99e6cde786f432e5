"""Selects the compiler flags of a step from a table, and probes what each of them changes."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._flag import CompilerFlag as CompilerFlag
    from ._flag import StepTraits as StepTraits
    from ._flag import compiler_version as compiler_version
    from ._flag import default_options as default_options
    from ._flag import flags_text as flags_text
    from ._flag import is_tried as is_tried
    from ._flag import never as never
    from ._flag import option_groups as option_groups
    from ._probe import ProbedGroup as ProbedGroup
    from ._probe import probe_groups as probe_groups
    from ._probe import probe_json as probe_json
    from ._probe import probe_text as probe_text
    from ._table import ADDS_IN_PRODUCTS as ADDS_IN_PRODUCTS
    from ._table import FLAGS as FLAGS
    from ._table import LARGE_VMEM as LARGE_VMEM
    from ._table import adds_in_products as adds_in_products
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
