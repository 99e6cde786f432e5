"""Runs a function of L equal layers once for all of them, where every layer is treated alike."""

from ._blocks import Blocks as Blocks
from ._blocks import run_blocks as run_blocks
from ._layer_ids import LayerIds as LayerIds
from ._layer_ids import fill_padding as fill_padding
from ._layer_ids import read_layer as read_layer
from ._lift import LayerSlot as LayerSlot
from ._lift import Lifted as Lifted
from ._lift import lift as lift
