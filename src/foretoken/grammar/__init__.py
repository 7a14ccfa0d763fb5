"""Structured output: grammars, compiled by llguidance (extra ``grammar``)."""

from __future__ import annotations

from foretoken.grammar.compiling import KINDS as KINDS
from foretoken.grammar.compiling import compile_constraint as compile_constraint
from foretoken.grammar.trial import TrialBusy as TrialBusy
