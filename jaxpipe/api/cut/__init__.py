"""Models of libraries: the call of a module, cut at its layers."""

from .._model import ModelFunction as ModelFunction
from .._pieces import shape_of as shape_of
from ._cut import cut_model as cut_model
from ._cut import cut_stack_or_calls as cut_stack_or_calls
from ._layer_calls import LayerCall as LayerCall
from ._layer_calls import is_setting as is_setting
from ._layer_calls import layer_of as layer_of
from ._layer_calls import named_value as named_value
from ._layer_calls import read_setting as read_setting
from ._parts import CutModule as CutModule
from ._parts import num_stacked as num_stacked
from ._parts import refuse_state as refuse_state
from ._sown import sown_losses as sown_losses
from ._sown import with_sown_losses as with_sown_losses
