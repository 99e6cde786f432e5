"""From documents to the rows of each step."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._batches import Batch as Batch
    from ._batches import Batches as Batches
    from ._batches import FiniteBatches as FiniteBatches
    from ._batches import FirstBatches as FirstBatches
    from ._batches import RowsByStep as RowsByStep
    from ._batches import SinglePassBatches as SinglePassBatches
    from ._batches import corpus_batches as corpus_batches
    from ._batches import row_order as row_order
    from ._batches import source_turns as source_turns
    from ._batches import synthetic_batches as synthetic_batches
    from ._corpus import Corpus as Corpus
    from ._corpus import CorpusRows as CorpusRows
    from ._corpus import check_files as check_files
    from ._corpus import corpus_fingerprint as corpus_fingerprint
    from ._corpus import corpus_from_tokens as corpus_from_tokens
    from ._corpus import global_batch_size as global_batch_size
    from ._corpus import read_corpus as read_corpus
    from ._corpus import split_held_out as split_held_out
    from ._corpus import tokenize as tokenize
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
