"""Models as pure functions, with abstract weights: llamas, Gemma, DeepSeek, an MLP for tests."""

from ._boundary import next_token_logits as next_token_logits
from ._deepseek import DeepseekConfig as DeepseekConfig
from ._deepseek import deepseek as deepseek
from ._deepseek import deepseek_weights as deepseek_weights
from ._families import MODEL_FAMILIES as MODEL_FAMILIES
from ._families import ModelConfig as ModelConfig
from ._families import ModelFamily as ModelFamily
from ._flops import matmul_flops_per_token as matmul_flops_per_token
from ._gemma import GemmaConfig as GemmaConfig
from ._gpt_oss import GptOssConfig as GptOssConfig
from ._llama import LlamaConfig as LlamaConfig
from ._llama import MixtureConfig as MixtureConfig
from ._llama import llama as llama
from ._llama import llama_weights as llama_weights
from ._llama4 import Llama4Config as Llama4Config
from ._mlp import mlp as mlp
from ._mlp import mlp_weights as mlp_weights
from ._presets import PRESETS as PRESETS
from ._vocab_parallel_loss import vocab_parallel_next_token_loss as vocab_parallel_next_token_loss
from .weights._abstract import Weight as Weight
from .weights._abstract import initialize as initialize
from .weights._abstract import initialize_layers as initialize_layers
from .weights._abstract import logical_axes as logical_axes
from .weights._abstract import num_parameters as num_parameters
