"""Extract JSON: a grammar forbids what does not fit the schema, and ``known`` drafts what the grammar forces.

Field names, quotes and braces are certain, so they cost no guess; the values are left to the model.  Needs
``pip install 'foretoken[grammar]'``.
"""

import json

import foretoken as ft
from foretoken.server.grammar import compile_constraint

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"enum": ["python", "library", "test"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "year", "tags"],
    "additionalProperties": False,
}
prompt = "Module os, written in 1999, a Python library. As JSON: "

for drafter in (None, "ngram", "known,inner=ngram"):
    llm = ft.load("builtin", drafter=drafter, dtype="float32")
    rule = compile_constraint(
        "json_schema", schema, llm.tokenizer, llm.target.vocab_size, ends=llm.target.eos_token_ids
    )  # one for each request
    out = llm.generate(prompt, constraint=rule, max_new_tokens=80)
    answer = json.loads(out.text)
    print(f"{drafter or 'plain':18} {out.stats.mean_acceptance_length:.2f} tokens a round: {json.dumps(answer)}")
