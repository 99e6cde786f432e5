"""How the layers of a model divide over stages: evenly, padded, or as a layout string says."""

from ._divide import LayerLayout as LayerLayout
from ._divide import divide_exactly as divide_exactly
from ._divide import even_layout as even_layout
from ._layout_string import count_mtp_layers as count_mtp_layers
from ._layout_string import layers_of_stages as layers_of_stages
from ._layout_string import parse_layout as parse_layout
