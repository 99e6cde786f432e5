"""What a model computes, keeps and moves per token, without a device or a layout."""

from ._layer_work import FLOAT32_SCORE_BYTES as FLOAT32_SCORE_BYTES
from ._layer_work import ActivationBytes as ActivationBytes
from ._layer_work import Attention as Attention
from ._layer_work import LayerWork as LayerWork
from ._layer_work import ModelWork as ModelWork
from ._layer_work import Product as Product
from ._layer_work import Split as Split
from ._layer_work import backward_products as backward_products
from ._layer_work import flops_per_token as flops_per_token
from ._transformer import Experts as Experts
from ._transformer import LatentAttention as LatentAttention
from ._transformer import transformer as transformer
