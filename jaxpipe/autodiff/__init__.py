"""What all engines share: the contract of a model, and the unpipelined reference."""

from . import _unpipelined as unpipelined
from ._accumulate import accumulate as accumulate
from ._accumulate import add_gradients as add_gradients
from ._cost import is_cheap as is_cheap
from ._cost import is_light as is_light
from ._cost import is_move as is_move
from ._effects import effects_of as effects_of
from ._fission import Fission as Fission
from ._fission import fission as fission
from ._model import Model as Model
from ._model import Sums as Sums
from ._model import at as at
from ._model import fold as fold
from ._model import joined as joined
from ._model import total as total
from ._model import with_aux as with_aux
from ._policies import OFFLOADED as OFFLOADED
from ._policies import POLICIES as POLICIES
from ._policies import TENSORS as TENSORS
from ._policies import Place as Place
from ._policies import Remat as Remat
from ._policies import check_offload as check_offload
from ._policies import keep as keep
from ._policies import kept_names as kept_names
from ._policies import recompute as recompute
from ._policies import remat_by_name as remat_by_name
from ._program import Atom as Atom
from ._program import Choice as Choice
from ._program import Constant as Constant
from ._program import Loop as Loop
from ._program import Plain as Plain
from ._program import Program as Program
from ._program import Shards as Shards
from ._program import Step as Step
from ._program import Value as Value
from ._program import pick as pick
from ._program import prints as prints
from ._program import program as program
from ._program import read as read
from ._program import tokens as tokens
from ._program import values as values
from ._program import vary_as as vary_as
from ._pullback import Pullback as Pullback
from ._pullback import floating as floating
from ._pullback import merge as merge
from ._pullback import pullback as pullback
from ._split import Split as Split
from ._split import split as split

__all__ = [
    "OFFLOADED",
    "POLICIES",
    "TENSORS",
    "Atom",
    "Choice",
    "Constant",
    "Fission",
    "Loop",
    "Model",
    "Place",
    "Plain",
    "Program",
    "Pullback",
    "Remat",
    "Shards",
    "Split",
    "Step",
    "Sums",
    "Value",
    "accumulate",
    "add_gradients",
    "at",
    "check_offload",
    "fission",
    "floating",
    "fold",
    "is_cheap",
    "is_light",
    "is_move",
    "joined",
    "keep",
    "merge",
    "pick",
    "prints",
    "program",
    "pullback",
    "read",
    "recompute",
    "remat_by_name",
    "split",
    "tokens",
    "total",
    "unpipelined",
    "values",
    "vary_as",
    "with_aux",
]
