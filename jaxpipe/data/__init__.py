"""Documents, tokenizers and batches: from files to the rows of a step."""

from ._batches import AllRows as AllRows
from ._batches import Batch as Batch
from ._batches import BatchAt as BatchAt
from ._batches import Batches as Batches
from ._batches import corpus_batches as corpus_batches
from ._batches import global_batch_size as global_batch_size
from ._batches import synthetic_batches as synthetic_batches
from ._corpus import Corpus as Corpus
from ._corpus import read_corpus as read_corpus
from ._corpus import split_off as split_off
from ._corpus import tokenize as tokenize
from ._corpus import whole_corpus as whole_corpus
from ._documents import read_documents as read_documents
from ._rows import Rows as Rows
from ._source import READ_BY as READ_BY
from ._source import Kind as Kind
from ._source import Paths as Paths
from ._source import Source as Source
from ._source import TokenType as TokenType
from ._token_files import LostFileError as LostFileError
from ._tokenizers import ByteTokenizer as ByteTokenizer
from ._tokenizers import HuggingFaceTokenizer as HuggingFaceTokenizer
from ._tokenizers import Tokenizer as Tokenizer
from ._tokenizers import load_tokenizer as load_tokenizer
from ._write import Written as Written
from ._write import write_tokens as write_tokens
