"""Trains models: config, train step, checkpoints and metrics of a run."""

import typing

from .. import _lazy

if typing.TYPE_CHECKING:
    from .config._config import Config as Config
    from .config._load import load_config as load_config
    from .logs._metrics import read_metrics as read_metrics
    from .loop._loop import train as train
    from .plan._from_config import set_up as set_up
    from .runtime._stop import RunError as RunError
    from .sampling._prompts import Sample as Sample
    from .sampling._sample import sample as sample
    from .step._aot import compile_train_step as compile_train_step
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
