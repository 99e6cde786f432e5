"""Plans a training step: the fastest layouts of a model over devices that fit their memory.

`plan` answers in seconds, by arithmetic on shapes; nothing is compiled. `jaxpipe plan` is the
command.
"""

from ._answer import Plans as Plans
from ._plan import plan as plan
from ._verify import VerifiedPlan as VerifiedPlan
