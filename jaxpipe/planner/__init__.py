"""Plans a training step: the fastest layouts of a model over devices that fit their memory.

Plans are made in seconds, by arithmetic on shapes; nothing is compiled. `jaxpipe.plan` takes the
keys of a run too, and `jaxpipe plan` is the command.
"""

from ._answer import Plans as Plans
from ._answer import VerifiedPlan as VerifiedPlan
from ._candidates import POLICIES as POLICIES
from ._candidates import Space as Space
from ._candidates import StepLayout as StepLayout
from ._devices import Devices as Devices
from ._devices import absent_devices as absent_devices
from ._devices import device_hardware as device_hardware
from ._devices import parse_devices as parse_devices
from ._model import OFFLOAD_INPUTS as OFFLOAD_INPUTS
from ._model import Axes as Axes
from ._model import PlannedModel as PlannedModel
from ._model import RoutedExperts as RoutedExperts
from ._model import StateBytes as StateBytes
from ._model import Tensor as Tensor
from ._model import WeightBytes as WeightBytes
from ._model import WeightGroup as WeightGroup
from ._own_model import MakeModel as MakeModel
from ._own_request import own_request as own_request
from ._plan import plan_request as plan_request
from ._request import PreparedPipeline as PreparedPipeline
from ._request import Request as Request
from ._request import Values as Values
from ._request import check_positive as check_positive
from ._search import CLOSE as CLOSE
from ._search import simplest_first as simplest_first
