"""Models are named after what runs their forwards."""

from __future__ import annotations

from foretoken.models import wrap
from foretoken.models.other.llama_cpp_model import LlamaCppModel
from foretoken.models.other.table import TableModel
from models.checkpoints import new_model


def test_each_kind_of_model_has_its_own_name() -> None:
    assert wrap(new_model("llama"), lean=True).describe()["forward"] == "lean"
    assert wrap(new_model("llama"), lean=False).describe()["forward"] == "public"
    assert TableModel.random(4).describe()["forward"] == "table"
    file = object.__new__(LlamaCppModel)  # opening one takes a compiled llama.cpp, which is not everywhere
    file.threads, file.dtype = 3, "Q4_0"
    report = file.describe()
    assert (report["forward"], report["threads"], report["weights"], report["exactness"]) == (
        "llama.cpp",
        3,
        "Q4_0",
        "rounding",
    )
