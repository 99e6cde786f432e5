"""The passes over the instructions of ranks."""

from ._fuse_programs import fuse_programs as fuse_programs
from ._insert_transfers import insert_transfers as insert_transfers
from ._liveness import liveness as liveness
from ._unroll_schedule import unroll_schedule as unroll_schedule
