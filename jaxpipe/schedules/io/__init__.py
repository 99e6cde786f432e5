"""Schedules as text, CSV, pictures, pages and traces."""

from ._html import to_html as to_html
from ._text import time_unit as time_unit
