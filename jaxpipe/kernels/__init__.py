"""Attention by the kernels of TPUs and GPUs, of whole sequences and of those split over devices."""

import typing

from .. import _lazy

if typing.TYPE_CHECKING:
    from ._counted import ATTENTION as ATTENTION
    from ._dot_product import attend_to_past as attend_to_past
    from ._dot_product import dot_product_attention as dot_product_attention
    from ._function import attention as attention
    from ._on_mesh import Attention as Attention
    from ._on_mesh import cudnn_attention as cudnn_attention
    from ._on_mesh import pallas_gpu_attention as pallas_gpu_attention
    from ._on_mesh import sliced_dot_product_attention as sliced_dot_product_attention
    from ._on_mesh import splash_attention as splash_attention
    from ._scores import Scores as Scores
    from ._selection import LARGEST_STORED as LARGEST_STORED
    from ._selection import AttentionPlan as AttentionPlan
    from ._selection import check_stored_scores as check_stored_scores
    from ._traces import for_heads_up_to as for_heads_up_to
    from ._traces import trace_for as trace_for
    from ._traces import trace_to_read as trace_to_read
    from ._traces import traced_widest_head as traced_widest_head
    from ._traces import vmap_over_devices as vmap_over_devices
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
