"""How tests compile, also in processes of their own: they compile much and compute little."""

from importlib.metadata import version

# Without LLVM's optimizations tests take half the time. XLA's own passes, the partitioner's among
# them, run as ever.
# And without fused multiply-add, which AVX does not have: with it a number's last bit depends on
# what XLA fuses, and where it is then rounded to FP8 that bit may become a large one.
# And with LLVM's module in one piece: to split small programs took a twelfth of the time.
# And without an MLIR context for every fusion, which took half of the time that compiling took.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX"
XLA_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # later ones do not know the flag, and stop
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

# And without the place in Python of every operation, which took 15% of the rest.
ENVIRONMENT = {"XLA_FLAGS": XLA_FLAGS, "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}

# And without the user's cache of compiled programs.
ENVIRONMENT |= {"JAX_COMPILATION_CACHE_DIR": ""}
