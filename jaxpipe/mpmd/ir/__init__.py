"""Defines the instructions of an MPMD program, and the primitives of stage marks and loops."""

from ._program import Buffer as Buffer
from ._program import Delete as Delete
from ._program import MpmdProgram as MpmdProgram
from ._program import Recv as Recv
from ._program import RunTask as RunTask
from ._program import Send as Send
from ._program import check as check
from ._program import instructions_of_rank as instructions_of_rank
