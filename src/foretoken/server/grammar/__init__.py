"""Structured output by grammars that llguidance compiles (extra ``grammar``)."""

from __future__ import annotations

from foretoken.server.grammar.compiling import KINDS as KINDS
from foretoken.server.grammar.compiling import checked_grammar as checked_grammar
from foretoken.server.grammar.compiling import compile_constraint as compile_constraint
from foretoken.server.grammar.language import compile_language as compile_language
from foretoken.server.grammar.trial import TrialBusy as TrialBusy
