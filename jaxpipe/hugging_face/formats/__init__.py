"""Models that Hugging Face has too: their config.json, and which tensors are which weights."""

from ._fields import ConfigValues as ConfigValues
from ._models import canonical_weights as canonical_weights
from ._models import format_of as format_of
from ._models import leaf_slices as leaf_slices
from ._models import read_model as read_model
from ._models import read_sizes as read_sizes
from ._tensors import LeafSlices as LeafSlices
from ._tensors import TensorSlice as TensorSlice
