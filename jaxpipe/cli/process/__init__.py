"""The process of a command: memory, emulated devices, Ctrl-C, and the error that ends it.

It also says where compiled programs are kept, and what libraries may log.
"""

from ._compile_cache import use_compile_cache as use_compile_cache
from ._compile_cache import user_cache_folder as user_cache_folder
from ._emulate import emulate_devices as emulate_devices
from ._emulate import emulation_flags as emulation_flags
from ._errors import USER_ERROR as USER_ERROR
from ._errors import hide_logged_tracebacks as hide_logged_tracebacks
from ._errors import report_error as report_error
from ._interrupts import CLEANUP_SECONDS as CLEANUP_SECONDS
from ._interrupts import INTERRUPTED as INTERRUPTED
from ._interrupts import say_interrupted as say_interrupted
from ._interrupts import unwinding as unwinding
from ._interrupts import watch_interrupts as watch_interrupts
from ._memory import check_address_space as check_address_space
from ._memory import keep_freed_memory as keep_freed_memory
from ._quiet import quiet_stderr as quiet_stderr
from ._quiet import set_log_levels as set_log_levels
