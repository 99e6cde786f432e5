"""Checkpoints: storage, canonical layout, digests and timing."""

from ._canonical import canonical_round_trip as canonical_round_trip
from ._canonical import canonical_shapes as canonical_shapes
from ._canonical import state_from_canonical as state_from_canonical
from ._canonical import with_layers_after as with_layers_after
from ._checkpoint_timer import CheckpointTimer as CheckpointTimer
from ._digests import find_corruption as find_corruption
from ._digests import has_digests as has_digests
from ._digests import is_complete as is_complete
from ._digests import steps_in as steps_in
from ._digests import write_digests as write_digests
from ._init_from import WEIGHTS_FOLDER as WEIGHTS_FOLDER
from ._init_from import check_same_sizes as check_same_sizes
from ._init_from import checkpoints_folder as checkpoints_folder
from ._init_from import first_state as first_state
from ._init_from import verified_step as verified_step
from ._store import best_step as best_step
from ._store import check_same_leaves as check_same_leaves
from ._store import latest_step as latest_step
from ._store import leaf_specs as leaf_specs
from ._store import open_checkpoints as open_checkpoints
from ._store import open_checkpoints_read_only as open_checkpoints_read_only
from ._store import read_metadata as read_metadata
from ._store import restore_checkpoint as restore_checkpoint
from ._store import restore_leaf as restore_leaf
from ._store import save_checkpoint as save_checkpoint
from ._store import saved_leaf_specs as saved_leaf_specs
