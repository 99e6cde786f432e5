"""Documents, tokenizers and batches: from files to the rows of a step."""

from ._batches import AllRows as AllRows
from ._batches import Batch as Batch
from ._batches import BatchAt as BatchAt
from ._batches import Batches as Batches
from ._batches import global_batch_size as global_batch_size
from ._batches import synthetic_batches as synthetic_batches
from ._batches import text_batches as text_batches
from ._corpus import Corpus as Corpus
from ._corpus import split_off as split_off
from ._corpus import tokenize as tokenize
from ._corpus import whole_corpus as whole_corpus
from ._documents import read_documents as read_documents
from ._rows import Rows as Rows
from ._tokenizers import ByteTokenizer as ByteTokenizer
from ._tokenizers import HuggingFaceTokenizer as HuggingFaceTokenizer
from ._tokenizers import Tokenizer as Tokenizer
from ._tokenizers import load_tokenizer as load_tokenizer
