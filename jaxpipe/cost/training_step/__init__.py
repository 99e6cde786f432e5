"""The time of a training step of a model, laid out over devices of a kind."""

from ._efficiency import Efficiency as Efficiency
from ._efficiency import efficiency as efficiency
from ._evidence import EVIDENCE as EVIDENCE
from ._evidence import OWN_MEMORY as OWN_MEMORY
from ._evidence import OWN_PROGRAMS as OWN_PROGRAMS
from ._evidence import Evidence as Evidence
from ._evidence import evidence as evidence
from ._layout import Layout as Layout
from ._layout import Remat as Remat
from ._predict import Prediction as Prediction
from ._predict import ScheduleTime as ScheduleTime
from ._predict import StageSeconds as StageSeconds
from ._predict import build_schedule as build_schedule
from ._predict import num_transfers as num_transfers
from ._predict import predict as predict
