"""Where arrays live: the mesh, logical axis rules, and the counts that must divide."""

from ._divide import Layout as Layout
from ._divide import divide as divide
from ._divide import layout as layout
from ._layout_string import parse_layout as parse_layout
from ._mesh import AXES as AXES
from ._mesh import make_mesh as make_mesh
from ._rows import max_over_rows as max_over_rows
from ._rows import own_rows as own_rows
from ._rows import row_axes as row_axes
from ._rows import sum_over_rows as sum_over_rows
from ._rules import DEFAULT_RULES as DEFAULT_RULES
from ._rules import GATHERED_AXES as GATHERED_AXES
from ._rules import Constrain as Constrain
from ._rules import LogicalAxes as LogicalAxes
from ._rules import Rules as Rules
from ._rules import automatic_rules as automatic_rules
from ._rules import check_divisible as check_divisible
from ._rules import constrain_with as constrain_with
from ._rules import gathered_rules as gathered_rules
from ._rules import named_shardings as named_shardings
from ._rules import no_constraint as no_constraint
from ._rules import partition_spec as partition_spec
from ._rules import place as place
from ._rules import with_rules as with_rules
from ._rules import zero_rules as zero_rules
