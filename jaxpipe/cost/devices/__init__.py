"""What devices and the networks between them do in a second, by kind."""

from ._efficiency import Efficiency as Efficiency
from ._efficiency import efficiency as efficiency
from ._hardware import HARDWARE as HARDWARE
from ._hardware import Hardware as Hardware
from ._hardware import hardware as hardware
