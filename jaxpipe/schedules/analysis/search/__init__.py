"""Search for orders within a cap of memory, with a bound that no order beats."""

from ...language._placement import rank_of_each_stage as rank_of_each_stage
from ._arguments import ActivationMemory as ActivationMemory
from ._bounds import lower_bound as lower_bound
from ._dispatch import dispatch as dispatch
from ._problem import Problem as Problem
from ._problem import to_schedule as to_schedule
from ._rules import pace_rules as pace_rules
from ._search import Candidate as Candidate
from ._search import search as search
