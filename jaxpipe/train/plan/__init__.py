"""Derives a run's setup from its config and devices, before anything is compiled."""

from ._devices import BatchPlan as BatchPlan
from ._devices import DeviceLayout as DeviceLayout
from ._from_config import compiler_options as compiler_options
from ._from_config import set_up as set_up
from ._from_config import step_traits as step_traits
from ._model import CHUNK_ROWS as CHUNK_ROWS
from ._model import model_config as model_config
from ._optimizer import learning_rate as learning_rate
from ._optimizer import make_optimizer as make_optimizer
from ._optimizer import user_tree as user_tree
from ._schedule_selection import select_schedule as select_schedule
from ._setup import Setup as Setup
from ._setup import StepPlan as StepPlan
from ._weight_plan import StatePlan as StatePlan
from ._weight_plan import WeightPlan as WeightPlan
