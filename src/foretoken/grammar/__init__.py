"""Structured output: grammars, compiled by llguidance (extra ``grammar``)."""

from __future__ import annotations

from foretoken.grammar.compiling import KINDS as KINDS
from foretoken.grammar.compiling import compile_constraint as compile_constraint
from foretoken.grammar.language import compile_language as compile_language
from foretoken.grammar.trial import TrialBusy as TrialBusy
