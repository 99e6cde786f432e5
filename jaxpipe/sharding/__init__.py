"""Shardings: the mesh, logical axis rules, and the counts that must divide."""

from ._local_keys import draw_own as draw_own
from ._local_keys import local_draws as local_draws
from ._mesh import AXES as AXES
from ._mesh import ROW_AXES as ROW_AXES
from ._mesh import make_mesh as make_mesh
from ._mesh import num_ranks_of as num_ranks_of
from ._on_shards import automatic_axes as automatic_axes
from ._on_shards import match_varying_axes as match_varying_axes
from ._on_shards import on_shards as on_shards
from ._rows import local_rows as local_rows
from ._rows import manual_batch_axes as manual_batch_axes
from ._rows import max_over_rows as max_over_rows
from ._rows import sum_over_rows as sum_over_rows
from ._rules import DEFAULT_RULES as DEFAULT_RULES
from ._rules import GATHERED_AXES as GATHERED_AXES
from ._rules import Constrain as Constrain
from ._rules import LogicalAxes as LogicalAxes
from ._rules import Rules as Rules
from ._rules import expert_axes as expert_axes
from ._rules import gathered_rules as gathered_rules
from ._rules import named_shardings as named_shardings
from ._rules import no_constraint as no_constraint
from ._rules import override_rules as override_rules
from ._rules import partition_spec as partition_spec
from ._rules import rules_without_manual_axes as rules_without_manual_axes
from .specs import reshard as reshard
