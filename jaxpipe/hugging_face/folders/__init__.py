"""Folders of safetensors: the tensors in their files, and folders that are written whole."""

from ._atomic_folder import atomic_folder as atomic_folder
from ._safetensors import DTYPES as DTYPES
from ._safetensors import NewTensor as NewTensor
from ._safetensors import StoredTensor as StoredTensor
from ._safetensors import create_files as create_files
from ._safetensors import map_new_tensor as map_new_tensor
from ._safetensors import read_tensor as read_tensor
from ._safetensors import tensors_in_folder as tensors_in_folder
