"""Edit a file: the old file is the prediction, so everything that stays is drafted from it.

Ask your own model for an edit ("rename name to path: ...") and give it the old file.  The built-in model cannot follow
instructions, so its answer stands for the edited file here, and the old file is that text with another name in it.
"""

import foretoken as ft

llm = ft.load("builtin", drafter="prediction,k=16", dtype="float32")
prompt = "class Reader:\n    def __init__(self, path):\n"

edited = llm.plain.generate(prompt, max_new_tokens=96)
old = edited.text.replace("path", "name", 3)
out = llm.generate(prompt, max_new_tokens=96, prediction=old)
stats = out.stats
print(f"identical: {out.token_ids == edited.token_ids}")
print(f"{stats.num_accepted_prediction_tokens} of {stats.num_prediction_tokens} predicted tokens were right, "
      f"{stats.num_drafts} target calls for {stats.num_new_tokens} tokens")  # fmt: skip

wrong = llm.generate(prompt, max_new_tokens=96, prediction="Nothing of this will be in the answer.")
print(f"a wrong prediction changes nothing: {wrong.token_ids == edited.token_ids}")
