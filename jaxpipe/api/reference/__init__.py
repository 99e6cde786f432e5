"""The user's own program, by which pipelines are judged. It shares no code with engines."""

from ._pieces import UnlikeRows as UnlikeRows
from ._pieces import first_function_that_mixes as first_function_that_mixes
from ._program import Result as Result
from ._program import UserProgram as UserProgram
from ._program import count_layers as count_layers
from ._program import narrowest_dtype as narrowest_dtype
from ._program import on_one_device as on_one_device
from ._program import program_of as program_of
from ._program import program_of_plain as program_of_plain
