"""Text that a run has learnt: prompts are decoded with a cache of what layers carry."""

from ._decoding_plan import DecodingPlan as DecodingPlan
from ._decoding_plan import decoding_plan as decoding_plan
from ._generate import Decoder as Decoder
from ._generate import decode as decode
from ._generate import generate as generate
from ._generate import prefill as prefill
from ._in_training import make_sample_state as make_sample_state
from ._prompts import Sample as Sample
from ._prompts import SamplingOptions as SamplingOptions
from ._prompts import printable as printable
from ._prompts import sampler as sampler
from ._sample import SETTINGS as SETTINGS
from ._sample import OpenedRun as OpenedRun
from ._sample import open_run as open_run
from ._sample import sample as sample
from ._sample import sampled_config as sampled_config
