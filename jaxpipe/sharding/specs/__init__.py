"""Partition specs: the mesh axes they name, and arrays that are resharded by them."""

from ._axes import axes_of as axes_of
from ._axes import axes_of_dim as axes_of_dim
from ._axes import check_divisible as check_divisible
from ._axes import only_axes as only_axes
from ._axes import with_axis_type as with_axis_type
from ._axes import without_axes as without_axes
from ._reshard import padded_spec as padded_spec
from ._reshard import reshard as reshard
from ._reshard import reshard_to_spec as reshard_to_spec
from ._reshard import typed_by_specs as typed_by_specs
from ._reshard import with_auto_axes as with_auto_axes
