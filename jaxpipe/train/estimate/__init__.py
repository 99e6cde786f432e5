"""Memory and time of a run, by arithmetic."""

from ._memory_estimate import Footprint as Footprint
from ._memory_estimate import footprints as footprints
from ._memory_estimate import held_at_most as held_at_most
from ._timeline import predicted_timeline as predicted_timeline
