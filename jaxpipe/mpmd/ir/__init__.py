"""Defines the graphs and programs that passes rewrite, and the primitives of marks and loops.

The first passes rewrite an `MpmdGraph`, whose nodes are equations and `PipelinedLoop`s. The others
rewrite an `MpmdProgram`, the instructions of all ranks. `str` writes each of them as text.
"""

from ._check_graph import check_graph as check_graph
from ._marks import mark_stage_end as mark_stage_end
from ._marks import pipeline_enter_stage as pipeline_enter_stage
from ._mpmd_graph import LoweringOptions as LoweringOptions
from ._mpmd_graph import MpmdGraph as MpmdGraph
from ._mpmd_graph import PipelinedLoop as PipelinedLoop
from ._mpmd_graph import RankAssignment as RankAssignment
from ._mpmd_graph import Stage as Stage
from ._mpmd_graph import StageTask as StageTask
from ._program import Buffer as Buffer
from ._program import BufferOnRanks as BufferOnRanks
from ._program import Delete as Delete
from ._program import MpmdProgram as MpmdProgram
from ._program import Recv as Recv
from ._program import RunTask as RunTask
from ._program import Send as Send
from ._program import check as check
from ._program import instructions_of_rank as instructions_of_rank
from ._reduce import Add as Add
from ._reduce import Concat as Concat
from ._reduce import Max as Max
from ._reduce import treduce as treduce
from ._reduce import treduce_i as treduce_i
