"""What a run reads: files, documents, token files and tokenizers."""

from ..._durable import DiskError as DiskError
from ._documents import read_documents as read_documents
from ._source_config import FIELD_READERS as FIELD_READERS
from ._source_config import Paths as Paths
from ._source_config import Separator as Separator
from ._source_config import Source as Source
from ._source_config import SourceType as SourceType
from ._source_config import TokenType as TokenType
from ._token_files import LostFileError as LostFileError
from ._tokenizers import ByteTokenizer as ByteTokenizer
from ._tokenizers import HuggingFaceTokenizer as HuggingFaceTokenizer
from ._tokenizers import SentencePieceTokenizer as SentencePieceTokenizer
from ._tokenizers import Tokenizer as Tokenizer
from ._tokenizers import load_tokenizer as load_tokenizer
from ._write import TokenFileSummary as TokenFileSummary
from ._write import write_tokens as write_tokens
