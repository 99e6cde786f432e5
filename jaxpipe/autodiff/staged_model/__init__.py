"""The contract between a model and the engines, and what every engine does with microbatches."""

from ._layers import layers_per_iteration as layers_per_iteration
from ._layers import run_layers as run_layers
from ._layers import run_sliced_layers as run_sliced_layers
from ._microbatches import SameForAllMicrobatches as SameForAllMicrobatches
from ._microbatches import accum_dtype as accum_dtype
from ._microbatches import combine_losses as combine_losses
from ._microbatches import fold_in_microbatch as fold_in_microbatch
from ._microbatches import from_leaves_by_path as from_leaves_by_path
from ._microbatches import index_leading as index_leading
from ._microbatches import leaves_by_path as leaves_by_path
from ._microbatches import merge_leading as merge_leading
from ._microbatches import slice_sequences as slice_sequences
from ._microbatches import split_metrics as split_metrics
from ._microbatches import sum_scalars as sum_scalars
from ._past import WHOLE_STATE as WHOLE_STATE
from ._past import Past as Past
from ._staged_model import Aux as Aux
from ._staged_model import BoundaryOfSlices as BoundaryOfSlices
from ._staged_model import HandOver as HandOver
from ._staged_model import StagedModel as StagedModel
from ._staged_model import has_custom_vjp as has_custom_vjp
from ._staged_model import like_input as like_input
from ._staged_model import with_aux as with_aux
