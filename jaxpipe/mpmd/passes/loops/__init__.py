"""The passes over loops: each one takes the loops of a function closer to tasks."""

from ._cut_stages import cut_stages as cut_stages
from ._extract_loops import extract_loops as extract_loops
from ._hoist_invariants import hoist_invariants as hoist_invariants
from ._split_tasks import split_tasks as split_tasks
from ._unroll_scans import unroll_scans as unroll_scans
