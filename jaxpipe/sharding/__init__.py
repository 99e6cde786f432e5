"""Shardings: the mesh, logical axis rules, and the counts that must divide."""

from ._mesh import AXES as AXES
from ._mesh import make_mesh as make_mesh
from ._rows import sum_over_rows as sum_over_rows
from ._rules import DEFAULT_RULES as DEFAULT_RULES
from ._rules import Rules as Rules
from ._rules import constrain_with as constrain_with
from ._rules import named_shardings as named_shardings
from ._rules import no_constraint as no_constraint
from ._rules import override_rules as override_rules
from ._rules import partition_spec as partition_spec
from ._rules import zero1_rules as zero1_rules
from .specs import reshard as reshard
