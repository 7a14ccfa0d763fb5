"""A batch job from Python: answers are appended as they finish, and a second run goes on where the first one ended.

``foretoken batch IN OUT`` is this with options, a progress bar and a lock.
"""

import json
import tempfile
from pathlib import Path

import foretoken as ft
from foretoken.cli.batch import append, finished_ids, open_locked, read_jobs, run_jobs


class Killed(Exception):
    """Stands for a power cut."""


def run(source: Path, out: Path, most: int) -> None:
    """Answer what is missing, and break off after ``most`` answers."""
    jobs = [job for job in read_jobs(source, {"max_new_tokens": 24, "seed": 7}) if job.id not in finished_ids(out)]
    with open_locked(out) as file:
        count = 0

        def write(answer: dict[str, object]) -> None:
            nonlocal count
            append(file, answer)
            count += 1
            if count == most:
                raise Killed

        run_jobs(llm, jobs, write, max_running=4)


llm = ft.load("builtin")
with tempfile.TemporaryDirectory() as folder:
    source, out = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
    prompts = ["def fib(n):\n", "The sea was ", "class Reader:\n", "import os\n", "It was late, and "]
    source.write_text("".join(json.dumps({"id": f"p{i}", "prompt": p}) + "\n" for i, p in enumerate(prompts)))
    try:
        run(source, out, most=2)
    except Killed:
        print(f"killed after {len(finished_ids(out))} answers")
    run(source, out, most=99)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    print(f"{len(answers)} answers, no id twice: {len({answer['id'] for answer in answers}) == len(prompts)}")
