"""What a model computes, keeps and moves per token, without a device or a layout."""

from ._work import FLOAT32_SCORE_BYTES as FLOAT32_SCORE_BYTES
from ._work import ActivationBytes as ActivationBytes
from ._work import Attention as Attention
from ._work import Experts as Experts
from ._work import LatentAttention as LatentAttention
from ._work import LayerWork as LayerWork
from ._work import ModelWork as ModelWork
from ._work import Product as Product
from ._work import Split as Split
from ._work import backward_products as backward_products
from ._work import flops_per_token as flops_per_token
from ._work import transformer as transformer
