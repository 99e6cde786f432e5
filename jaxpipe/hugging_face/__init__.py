"""Checkpoints from and to folders of Hugging Face's safetensors."""

from ._carried import carried_tokenizer as carried_tokenizer
from ._convert import ConversionSummary as ConversionSummary
from ._convert import from_hugging_face as from_hugging_face
from ._convert import model_keys as model_keys
from ._convert import to_hugging_face as to_hugging_face
