"""Single-device model code over abstract trees: the llama family, and an MLP for tests."""

from ._abstract import Weight as Weight
from ._abstract import initialize as initialize
from ._abstract import initialize_layers as initialize_layers
from ._abstract import is_weight as is_weight
from ._abstract import logical_axes as logical_axes
from ._abstract import num_parameters as num_parameters
from ._abstract import shapes as shapes
from ._abstract import stacked as stacked
from ._attention import Attention as Attention
from ._attention import dot_product_attention as dot_product_attention
from ._attention import splash_attention as splash_attention
from ._layers import rms_norm as rms_norm
from ._layers import rope as rope
from ._layers import rope_frequencies as rope_frequencies
from ._layers import token_losses as token_losses
from ._llama import LlamaConfig as LlamaConfig
from ._llama import llama as llama
from ._llama import llama_weights as llama_weights
from ._llama import matmul_flops_per_token as matmul_flops_per_token
from ._mlp import mlp as mlp
from ._mlp import mlp_weights as mlp_weights
from ._presets import PRESETS as PRESETS
