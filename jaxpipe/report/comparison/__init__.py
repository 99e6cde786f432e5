"""Shows several runs beside each other on one HTML page."""

from ._curves import comparison_data as comparison_data
from ._page import differing_settings as differing_settings
from ._page import render_comparison as render_comparison
from ._page import run_labels as run_labels
