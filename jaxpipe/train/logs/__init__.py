"""What a run records and shows: metrics, progress, profiles."""

from ._describe import describe as describe
from ._loss_curve import loss_curve as loss_curve
from ._metrics import WriteMetrics as WriteMetrics
from ._metrics import metrics_writer as metrics_writer
from ._metrics import read_metrics as read_metrics
from ._progress import compiling as compiling
from ._progress import progress as progress
from ._trackers import load_trackers as load_trackers
from ._trackers import tracking as tracking
