"""Programs made of a program: its two halves, and one that accumulates gradients in place."""

from ._accumulate import accumulate as accumulate
from ._accumulate import add_gradients as add_gradients
from ._accumulate import cast_apart as cast_apart
from ._minimal_cut import minimal_cut as minimal_cut
from ._partition import Partition as Partition
from ._partition import partition as partition
from ._partition_nested import InputKind as InputKind
