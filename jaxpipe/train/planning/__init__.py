"""Plans the train step of a run: keys to a planner's request, and its layouts to keys."""

from ._plan import plan as plan
from ._request import make_request as make_request
