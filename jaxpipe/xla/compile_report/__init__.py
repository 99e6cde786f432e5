"""Describes a compiled step: its memory on each device, and a report about it as text and JSON."""

from ._memory import Memory as Memory
from ._memory import memory as memory
from ._report import CompileReport as CompileReport
from ._report import align as align
from ._report import report_compiled as report_compiled
from ._report import report_json as report_json
from ._report import report_text as report_text
