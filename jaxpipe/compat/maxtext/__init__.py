"""MaxText's pipeline of Flax layers: its config fields, and the methods of its modules.

`linen` and `nnx` have the modules, which `jaxpipe.linen` and `jaxpipe.nnx` export. What is here is
the part that both share and that needs no Flax.
"""

from ._frontend import first_microbatch as first_microbatch
from ._frontend import run_batch as run_batch
from ._layers import Layer as Layer
from ._layers import layer_keys as layer_keys
from ._layers import outputs_of as outputs_of
from ._methods import LoopMethods as LoopMethods
from ._methods import PipelineMethods as PipelineMethods
from ._methods import WindowMethods as WindowMethods
from ._methods import to_batch_inputs as to_batch_inputs
from ._settings import AxisRules as AxisRules
from ._settings import PipelineSettings as PipelineSettings
from ._settings import pipeline_settings as pipeline_settings
from ._weight_sharding import STACKED as STACKED
from ._weight_sharding import reshard_weight as reshard_weight
from ._weight_sharding import rules_in_stage as rules_in_stage
