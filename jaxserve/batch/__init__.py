"""Batch jobs: `python -m jaxserve.batch --model=M --input=requests.jsonl --output=results.jsonl`.

OpenAI's batch file format in and out, on an engine of its own. The modules, from the files inwards:
- `__main__`, `command`, `console`: the process; flags, signals, exit status, what the operator sees.
- `job`: the two files together, and what an earlier run has left to do.
- `request_file`, `result_file`, `records`: reading, appending, and the form of a line.
- `runner`: which lines are in progress, and when their results are written.
- `tally`: counts and figures.

A body is parsed, submitted and rendered by `jaxserve.server`, so it is what the HTTP server answers. Nothing logs a
prompt or an output.
"""
