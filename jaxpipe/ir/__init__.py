"""A jaxpr that one can rewrite: graph, cost, minimal cut, partition and accumulation."""

from ._accumulate import accumulate as accumulate
from ._accumulate import add_gradients as add_gradients
from ._cost import is_cheap as is_cheap
from ._cost import is_light as is_light
from ._cost import is_move as is_move
from ._effects import effects_of as effects_of
from ._graph import Atom as Atom
from ._graph import Choice as Choice
from ._graph import Constant as Constant
from ._graph import Loop as Loop
from ._graph import Plain as Plain
from ._graph import Program as Program
from ._graph import Shards as Shards
from ._graph import Step as Step
from ._graph import Value as Value
from ._graph import pick as pick
from ._graph import prints as prints
from ._graph import program as program
from ._graph import read as read
from ._graph import tokens as tokens
from ._graph import values as values
from ._graph import vary_as as vary_as
from ._partition import Fission as Fission
from ._partition import fission as fission
