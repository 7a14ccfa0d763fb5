"""Names and paths -> models, tokenizers, drafters: everything that can be wrong is found here, before any work."""

from __future__ import annotations

from foretoken.loading.checkpoints import BUILTIN, PICKLES, ZOO, LoadError, check_folder, resolve
from foretoken.loading.draft_models import build_draft_model, build_foreign_draft_model
from foretoken.loading.drafters import (
    DEFAULT_GROUP,
    build_drafter,
    build_members,
    build_nested_drafter,
    build_tree,
    default_drafter,
    default_members,
    drafter_folder,
    free_drafters,
    has_drafter,
    static_trees,
)
from foretoken.loading.models import DTYPES, load_model, parse_device, parse_dtype
from foretoken.loading.native_heads import has_head, read_head
from foretoken.loading.profiles import read_profile
from foretoken.loading.tokenizers import check_same_tokenizer, check_vocabularies, load_tokenizer
from foretoken.verifiers.pairing import inner_rule

__all__ = [
    "BUILTIN",
    "DEFAULT_GROUP",
    "DTYPES",
    "PICKLES",
    "ZOO",
    "LoadError",
    "build_draft_model",
    "build_drafter",
    "build_foreign_draft_model",
    "build_members",
    "build_nested_drafter",
    "build_tree",
    "check_folder",
    "check_same_tokenizer",
    "check_vocabularies",
    "default_drafter",
    "default_members",
    "drafter_folder",
    "free_drafters",
    "has_drafter",
    "has_head",
    "inner_rule",
    "load_model",
    "load_tokenizer",
    "parse_device",
    "parse_dtype",
    "read_head",
    "read_profile",
    "resolve",
    "static_trees",
]
