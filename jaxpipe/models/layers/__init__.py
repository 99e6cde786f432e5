"""Layers that models share: attention, experts, projections, norms."""

from ._attention import causal_mask as causal_mask
from ._common import dropout as dropout
from ._experts import sort_and_multiply as sort_and_multiply
from ._projection import quantize as quantize
