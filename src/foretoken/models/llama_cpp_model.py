"""Documented import path of :class:`LlamaCppModel`, see :mod:`foretoken.models.other.llama_cpp_model`."""

from foretoken.models.other.llama_cpp_model import LlamaCppModel as LlamaCppModel
