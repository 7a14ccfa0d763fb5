"""Models, tokenizers and drafters from names and paths.  Every error is found here, before any work."""

from __future__ import annotations

from foretoken.core.io.checkpoints import BUILTIN, PICKLES, ZOO, LoadError, check_folder, resolve
from foretoken.loading.controllers import build_controller
from foretoken.loading.draft_models import build_draft_model
from foretoken.loading.drafters import (
    DEFAULT_GROUP,
    LoadingContext,
    Part,
    build_drafter,
    check_specs,
    default_drafter,
    default_members,
    drafter_folder,
    free_drafters,
    has_drafter,
)
from foretoken.loading.models import load_model
from foretoken.loading.native_heads import read_head
from foretoken.loading.networks import parse_device, parse_dtype
from foretoken.loading.profiles import read_profile
from foretoken.loading.tokenizers import check_same_tokenizer, check_tokenizer, check_vocabularies, load_tokenizer

__all__ = [
    "BUILTIN", "DEFAULT_GROUP", "PICKLES", "ZOO", "LoadError", "LoadingContext", "Part",
    "build_controller", "build_draft_model", "build_drafter", "check_folder", "check_same_tokenizer", "check_specs",
    "check_tokenizer", "check_vocabularies", "default_drafter", "default_members", "drafter_folder", "free_drafters",
    "has_drafter", "load_model", "load_tokenizer", "parse_device", "parse_dtype", "read_head", "read_profile",
    "resolve",
]  # fmt: skip
