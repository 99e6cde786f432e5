"""Parameters that are sharded over the axis `fsdp`, and rows that are divided over devices."""

from ._gathers import boundary_gather as boundary_gather
from ._gathers import gather_of_layer as gather_of_layer
from ._gathers import weight_gathers as weight_gathers
from ._params import cast_group as cast_group
from ._params import cast_params as cast_params
from ._params import gathered_size as gathered_size
from ._params import gathered_spec as gathered_spec
from ._params import is_rule as is_rule
from ._params import manual_row_axes as manual_row_axes
from ._params import num_row_shards as num_row_shards
from ._params import over_data as over_data
from ._params import param_spec_tree as param_spec_tree
from ._params import read_spec_tree as read_spec_tree
from ._params import row_axes as row_axes
from ._params import spec_over_data as spec_over_data
from ._params import with_layer_specs as with_layer_specs
