"""The one table of accelerators: names, memory, peaks, links, and what compilers are told of them.

It imports only the standard library. `hardware` reads a generation, such as "v5p", and
`find_hardware` a `device_kind` of JAX, such as "TPU v5".
"""

from ._hardware import GROUPED_PRODUCTS as GROUPED_PRODUCTS
from ._hardware import HARDWARE as HARDWARE
from ._hardware import PALLAS_ATTENTION as PALLAS_ATTENTION
from ._hardware import GpuTarget as GpuTarget
from ._hardware import Hardware as Hardware
from ._hardware import cudnn_attention as cudnn_attention
from ._hardware import find_hardware as find_hardware
from ._hardware import find_peak_tflops as find_peak_tflops
from ._hardware import generation_of as generation_of
from ._hardware import hardware as hardware
from ._host import host_bytes as host_bytes
from ._host import num_cores as num_cores
