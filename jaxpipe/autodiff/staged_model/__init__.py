"""The contract between a model and the engines, and what every engine does with microbatches."""

from ._microbatches import combine_losses as combine_losses
from ._microbatches import fold_in_microbatch as fold_in_microbatch
from ._microbatches import index_leading as index_leading
from ._microbatches import total as total
from ._staged_model import Aux as Aux
from ._staged_model import StagedModel as StagedModel
from ._staged_model import with_aux as with_aux
