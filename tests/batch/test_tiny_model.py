"""The command on the real engine: HTTP's bodies, kill and resume, a trace that replays."""

import asyncio
import json
import os
import random
import subprocess
import sys

import pytest

from jaxserve.batch.records import parse_request
from jaxserve.batch.runner import BatchRunner
from jaxserve.faults import ALLOW_VARIABLE
from jaxserve.replay import main as replay
from jaxserve.server.service import GenerationService
from tests.batch.lines import chat, completion, read_results, texts_by_id, write_lines
from tests.server.running import until

SAME_AS_HTTP = [
    completion("text", "The sea", logprobs=2, seed=3, temperature=0.8),
    completion("ids", [5, 6, 7], n=2, echo=True, return_token_ids=True, seed=1, temperature=1),
    completion("several", ["a", "bc"], stop=["x"], max_tokens=9),
    completion("scored", "ab", max_tokens=0, echo=True, logprobs=1),
    chat("chat", "hi", logprobs=True, top_logprobs=2, max_completion_tokens=4),
    chat("parts", [{"type": "text", "text": "hi"}], model="tiny"),
    completion("bad field", "a", temperature="0.7"),
    completion("bad range", "a", top_p=7),
    completion("too long", "a" * 500),
    completion("not there", "a", model="gpt-4"),
    completion("not supported", "a", suffix="b"),
    chat("bad role", "a", messages=[{"role": "robot", "content": "a"}]),
]


def comparable(body):
    """A body without what differs from call to call."""
    body = {key: value for key, value in body.items() if key not in ("id", "created")}
    if "usage" in body:
        body["usage"] = body["usage"] | {"prompt_tokens_details": None}  # the second call finds the first one's pages
    return body


def nearly(value):
    """Equal to values that differ by the noise of float32 only."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {key: nearly(item) for key, item in value.items()}
    return [nearly(item) for item in value] if isinstance(value, list) else value


def run_in_process(server, lines):
    """The results of lines, in order, from the engine of a test server."""
    results = []

    async def run():
        runner = BatchRunner(GenerationService(server.engine), results.append, window=8, in_order=True)
        await runner.run(parse_request(number, json.dumps(line).encode()) for number, line in enumerate(lines, 1))

    asyncio.run(run())
    return results


def test_bodies_are_those_of_the_http_server(tiny_server):
    results = run_in_process(tiny_server, SAME_AS_HTTP)
    with tiny_server.client() as client:
        for line, result in zip(SAME_AS_HTTP, results, strict=True):
            response = client.post(line["url"], json=line["body"])
            assert result.custom_id == line["custom_id"]
            assert result.response["status_code"] == response.status_code, line["custom_id"]
            # Through JSON, as both are read: keys of logprobs become strings.
            assert comparable(json.loads(result.encode())["response"]["body"]) == nearly(comparable(response.json()))
            assert (result.error is None) == (response.status_code == 200)


@pytest.fixture
def start(tiny_model_dir, tmp_path, compile_cache):
    """`start(*words)`: the command in a process, on an engine like the test server's."""
    shapes = ("--decode_buckets=4", "--prefill_buckets=64", "--table_width_buckets=8", "--max_num_batched_tokens=64")
    sizes = ("--max_num_seqs=4", "--max_model_len=128", "--num_pages=80", "--dtype=float32")
    started = []

    def begin(*words):
        command = [sys.executable, "-m", "jaxserve.batch", f"--model={tiny_model_dir}", *shapes, *sizes, *words]
        command.append(f"--compile_cache={compile_cache}")
        environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache"), ALLOW_VARIABLE: "1"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def test_a_killed_and_resumed_run_answers_as_one_that_was_not_and_its_traces_replay(start, tiny_server, tmp_path):
    lines = [(completion, chat)[index % 2](f"r{index}", f"line {index}", max_tokens=50) for index in range(60)]
    output = tmp_path / "out"
    files = (f"--input={write_lines(tmp_path / 'in', lines)}", f"--output={output}")
    traces = tmp_path / "killed.trace", tmp_path / "resumed.trace"

    killed, enough = start(*files, f"--trace_file={traces[0]}"), random.Random().randint(1, 50)
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= enough, 200, "lines")
    killed.kill()
    killed.wait(10)

    resumed = start(*files, f"--trace_file={traces[1]}")
    shown, errors = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, errors
    assert "going on behind" in errors and f"{output}: 60 of 60 lines" in shown
    assert "slot utilisation" in shown and f"trace             {traces[1]}" in shown
    assert "line 7" not in shown + errors, "prompts are not shown"

    whole = write_lines(
        tmp_path / "whole", [result.encode().decode().strip() for result in run_in_process(tiny_server, lines)]
    )
    assert texts_by_id(output) == texts_by_id(whole)
    assert [replay(["replay", f"--trace={trace}"]) for trace in traces] == [0, 0]


def test_an_engine_that_dies_or_hangs_ends_the_job_and_the_same_command_goes_on(start, tiny_server, tmp_path):
    lines = [completion(f"r{index}", f"line {index}", max_tokens=12) for index in range(60)]
    output, plan = tmp_path / "out", tmp_path / "plan"
    command = (
        *(f"--input={write_lines(tmp_path / 'in', lines)}", f"--output={output}", f"--fault_plan={plan}"),
        *("--step_timeout_s=1", "--stuck_exit_s=600", "--drain_grace_s=600"),
    )

    def run(fault):
        """Status, what was printed, and how many lines there are; every one is whole."""
        plan.write_text(json.dumps([fault] if fault else []))
        process = start(*command)
        shown, errors = process.communicate(timeout=200)
        return process.returncode, shown, errors, len(read_results(output))

    faults = [
        ({"at": "runner.collect", "do": "raise", "times": None}, "engine died: InjectedFault("),
        ({"at": "engine.step", "do": "hang", "seconds": 600}, "the engine is stuck"),
    ]
    num_before = 0
    for fault, why in faults:
        status, shown, errors, num_lines = run({"skip": 40} | fault)
        assert status == 1, errors
        assert why in errors, errors
        assert "what is written is whole: the same command goes on there" in errors
        assert f"{output}: {num_lines} of 60 lines" in shown and "the same command goes on there" in shown
        assert num_before < num_lines < 60
        num_before = num_lines
    status, shown, errors, num_lines = run(None)
    assert status == 0 and num_lines == 60, errors
    # Whom steps were tried with alone before nobody was to blame has an answer: that it failed.
    results = {result["custom_id"]: result for result in read_results(output)}
    failed = [name for name, result in results.items() if result["error"]]
    assert len(results) == 60 and len(failed) <= 2
    assert {results[name]["error"]["code"] for name in failed} <= {"request_failed", "server_error"}
    whole = {result.custom_id: result.response["body"]["choices"] for result in run_in_process(tiny_server, lines)}
    for name in results.keys() - failed:
        assert results[name]["response"]["body"]["choices"] == whole[name]
