"""Documents, tokenizers and batches: from files to the rows of a step."""

import typing

from .. import _lazy

if typing.TYPE_CHECKING:
    from .batches._batches import corpus_batches as corpus_batches
    from .batches._batches import synthetic_batches as synthetic_batches
    from .sources._documents import read_documents as read_documents
    from .sources._source_config import Source as Source
    from .sources._tokenizers import load_tokenizer as load_tokenizer
    from .sources._write import write_tokens as write_tokens
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
