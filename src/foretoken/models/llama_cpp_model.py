"""The documented path of :class:`LlamaCppModel`, which lives in :mod:`foretoken.models.other.llama_cpp_model`."""

from foretoken.models.other.llama_cpp_model import LlamaCppModel as LlamaCppModel
