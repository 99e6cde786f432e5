"""Tests of a user's own model: every engine and schedule against the unpipelined program."""

from ._check_exact import check_exact as check_exact
