"""An agent's loop: every turn repeats much of the ones before, and ``suffix`` remembers what the model has written.

Each turn appends a tool's result to the transcript and asks again.  The prefix cache reads only what is new, and from
the second turn on the drafts come from earlier answers.
"""

import foretoken as ft

files = ["io.py", "os.py", "re.py", "csv.py"]
step = (
    '# Task: open {name}\ndef load_{stem}(path):\n    """Return the text of {name}."""\n    with open(path) as file:\n'
)

llm = ft.load("builtin", drafter="suffix", dtype="float32")
transcript, lengths = "", []
for name in files:
    transcript += step.format(name=name, stem=name.removesuffix(".py"))
    out = llm.generate(transcript, max_new_tokens=40)
    plain = llm.plain.generate(transcript, max_new_tokens=40)
    assert out.token_ids == plain.token_ids
    lengths.append(out.stats.mean_acceptance_length)
    read = out.stats.num_prompt_tokens_computed
    print(f"{name:7} {lengths[-1]:.2f} tokens a round, {read} of {out.stats.num_prompt_tokens} prompt tokens read")
    transcript += out.text + "\n# Result: ok\n\n"
print("identical: True")
