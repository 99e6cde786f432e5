"""A jaxpr that one can rewrite: graph, cost, minimal cut, partition and accumulation."""

from ._accumulate import accumulate as accumulate
from ._accumulate import add_gradients as add_gradients
from ._cost import is_cheap as is_cheap
from ._cost import is_light as is_light
from ._cost import is_move as is_move
from ._effects import effects_of as effects_of
from ._graph import Atom as Atom
from ._graph import Cond as Cond
from ._graph import Eqn as Eqn
from ._graph import Graph as Graph
from ._graph import Literal as Literal
from ._graph import PrimitiveCall as PrimitiveCall
from ._graph import Scan as Scan
from ._graph import ShardMap as ShardMap
from ._graph import Var as Var
from ._graph import free_variables as free_variables
from ._graph import has_print as has_print
from ._graph import print_tokens as print_tokens
from ._graph import pvary_like as pvary_like
from ._graph import select as select
from ._graph import to_graph as to_graph
from ._graph import variables as variables
from ._partition import Partition as Partition
from ._partition import partition as partition
