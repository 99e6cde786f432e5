"""Reads the settings of a training run: keys, files, and checks across keys."""

from ._config import Config as Config
from ._config import parse_profile_steps as parse_profile_steps
from ._config import parse_xla_flags as parse_xla_flags
from ._load import check_values as check_values
from ._load import defaults_yaml as defaults_yaml
from ._load import key_defaults as key_defaults
from ._load import key_meanings as key_meanings
from ._load import load_config as load_config
from ._load import parse_override as parse_override
from ._load import parse_yaml as parse_yaml
from ._maxtext_keys import ADVICE as ADVICE
from ._maxtext_keys import ADVICE_BY_PATTERN as ADVICE_BY_PATTERN
from ._maxtext_keys import SAME_KEYS as SAME_KEYS
from ._maxtext_keys import maxtext_advice as maxtext_advice
from ._yaml import MAX_YAML_BYTES as MAX_YAML_BYTES
from ._yaml import load_yaml as load_yaml
