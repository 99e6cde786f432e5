"""Partition specs: the mesh axes they name, and arrays that are resharded by them."""

from ._specs import axes_of as axes_of
from ._specs import axes_of_dim as axes_of_dim
from ._specs import check_divisible as check_divisible
from ._specs import only_axes as only_axes
from ._specs import padded_spec as padded_spec
from ._specs import reshard as reshard
from ._specs import reshard_to_spec as reshard_to_spec
from ._specs import typed_by_specs as typed_by_specs
from ._specs import with_auto_axes as with_auto_axes
from ._specs import with_axis_type as with_axis_type
from ._specs import without_axes as without_axes
