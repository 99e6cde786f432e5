"""Trains models: config, train step, checkpoints and metrics of a run."""

from .checkpoint._store import best_step as best_step
from .checkpoint._store import latest_step as latest_step
from .checkpoint._store import open_checkpoints as open_checkpoints
from .checkpoint._store import restore_checkpoint as restore_checkpoint
from .checkpoint._store import save_checkpoint as save_checkpoint
from .config._config import Config as Config
from .config._load import load_config as load_config
from .logs._metrics import read_metrics as read_metrics
from .loop._loop import train as train
from .plan._from_config import set_up as set_up
from .runtime._stop import RunError as RunError
from .step._aot import compile_train_step as compile_train_step
