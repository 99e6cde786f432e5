"""The training loop, and where a run resumes."""

from ._batches import RunData as RunData
from ._batches import make_data as make_data
from ._batches import tokenizer_checksum as tokenizer_checksum
from ._batches import write_corpus as write_corpus
from ._loop import train as train
from ._resume import check_learning_rate as check_learning_rate
from ._resume import data_changes as data_changes
from ._run_history import archive_history as archive_history
from ._run_history import read_saved as read_saved
from ._run_history import read_starts as read_starts
from ._run_history import record_start as record_start
