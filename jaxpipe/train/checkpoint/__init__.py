"""Checkpoints: storage, canonical layout, digests and timing."""

from ._digests import is_complete as is_complete
from ._store import best_step as best_step
from ._store import latest_step as latest_step
from ._store import open_checkpoints as open_checkpoints
from ._store import read_metadata as read_metadata
from ._store import restore_checkpoint as restore_checkpoint
from ._store import save_checkpoint as save_checkpoint
