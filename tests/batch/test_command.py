"""The whole command in a process of its own: kills, signals, full disks, mistakes; over a scripted engine."""

import json
import random
import signal
import subprocess
import sys

import pytest

from jaxserve.batch.__main__ import main
from tests.batch.lines import completion, read_results, texts_by_id, write_lines
from tests.server.running import until

NUM_LINES = 60


@pytest.fixture
def paths(tmp_path):
    """Input, written, and output."""
    lines = [completion(f"r{index}", f"{index}", max_tokens=1 + index % 9) for index in range(NUM_LINES)]
    return write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"


@pytest.fixture
def start(paths):
    """`start(step_s, *words, under=())`: the command on the fake engine, which ends with the test.

    `under` is a command line that runs it.
    """
    started = []

    def begin(step_s, *words, under=()):
        command = [*under, sys.executable, "-m", "tests.batch.fake_main", step_s, *paths, *words]
        pipe = subprocess.PIPE
        process = subprocess.Popen([str(word) for word in command], stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def num_written(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def expected_text(index):
    last = ord(f"{index}"[-1])
    return "".join(chr(ord("a") + (last + step) % 26) for step in range(1 + index % 9))


def test_killed_at_random_moments_and_rerun_every_line_is_answered_once(paths, start):
    rng = random.Random()
    kills = 0
    while (already := num_written(paths[1])) < NUM_LINES:
        process = start(0.01)
        enough = min(already + rng.randint(5, 40), NUM_LINES)
        until(lambda n=enough, p=process: num_written(paths[1]) >= n or p.poll() is not None, 30, "lines")
        kills += process.poll() is None
        process.kill()
        process.wait(10)
        if rng.random() < 0.5:  # as if the kill had come within a write
            with paths[1].open("r+b") as file:
                file.truncate(max(paths[1].stat().st_size - rng.randint(0, 200), 0))
    assert kills > 0
    process = start(0)
    assert process.wait(30) == 0
    assert texts_by_id(paths[1]) == {f"r{index}": expected_text(index) for index in range(NUM_LINES)}


def test_in_input_order_a_kill_leaves_a_beginning_of_the_input(paths, start):
    process = start(0.005, "input")
    until(lambda: num_written(paths[1]) >= 10, 30, "lines")
    process.kill()
    process.wait(10)
    assert start(0, "input").wait(30) == 0
    assert list(texts_by_id(paths[1])) == [f"r{index}" for index in range(NUM_LINES)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_whole_lines_and_a_rerun_goes_on(paths, start, number):
    process = start(0.01)
    until(lambda: num_written(paths[1]) >= 5, 30, "lines")
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "lines in progress have 20 s" in errors and "left" in output
    written = len(texts_by_id(paths[1]))
    assert 5 <= written < NUM_LINES
    process = start(0)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f"{NUM_LINES - written} of {NUM_LINES} lines to do" in errors
    assert len(texts_by_id(paths[1])) == NUM_LINES


def test_a_second_signal_ends_at_once(paths, start):
    process = start(1.0)
    until(lambda: "to do" in process.stderr.readline(), 30, "running")
    process.send_signal(signal.SIGTERM)
    until(lambda: "second signal" in process.stderr.readline(), 10, "stopping")
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    read_results(paths[1])


def test_a_full_disk_ends_the_run_with_whole_lines_and_a_rerun_goes_on(paths, start):
    process = start(0, under=("sh", "-c", 'ulimit -f 10; exec "$@"', "sh"))  # blocks of 512 or 1024 bytes
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "out.jsonl: File too large; what is written is whole" in errors
    assert 0 < len(texts_by_id(paths[1])) < NUM_LINES
    assert start(0).wait(30) == 0
    assert len(texts_by_id(paths[1])) == NUM_LINES


def test_a_write_that_fails_ends_the_run_with_whole_lines_and_a_rerun_goes_on(paths, start):
    process = start(0, "write_fails")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "out.jsonl: InjectedFault: " in errors and "what is written is whole" in errors
    assert "Traceback" not in errors
    assert len(texts_by_id(paths[1])) == 9
    assert start(0).wait(30) == 0
    assert len(texts_by_id(paths[1])) == NUM_LINES


def test_the_summary_counts_lines_and_names_what_failed(paths, start):
    with paths[0].open("a") as file:
        file.write("{\n{\n" + json.dumps(completion("bad", temperature=9e9)) + "\n")
    output, errors = start(0).communicate(timeout=30)
    assert f"answered          {NUM_LINES}" in output
    assert "failed            3 (2 invalid_json_line, 1 invalid_request_error)" in output
    assert f"{NUM_LINES + 3} of {NUM_LINES + 3} lines to do" in errors and "3 failed" in errors
    assert "9000000000" not in output + errors, "what a line holds is not shown"


def command(capsys, *words):
    """Exit status, stdout and stderr of `main`, which must not come as far as an engine."""
    try:
        status = main(["prog", "--model=/no/such/model", *map(str, words)])
    except SystemExit as exit:
        status = exit.code
    return status, *capsys.readouterr()


def answered(name):
    """A result."""
    response = {"status_code": 200, "request_id": "r", "body": {}}
    return {"id": "batch_req_1", "custom_id": name, "response": response, "error": None}


def test_a_finished_job_is_told_without_an_engine(capsys, tmp_path):
    bad = answered("b") | {"id": "batch_req_2", "error": {"code": "x", "message": "y"}}
    files = (
        f"--input={write_lines(tmp_path / 'in', [completion('a'), completion('b')])}",
        f"--output={write_lines(tmp_path / 'out', [answered('a'), bad])}",
    )
    status, output, _ = command(capsys, *files)
    assert status == 0 and "by earlier runs   2, 1 of them failed" in output
    assert command(capsys, *files, "--fail_on_error")[0] == 3


def test_an_input_that_lacks_ids_of_the_output_is_refused_unless_allowed(capsys, tmp_path):
    files = (
        f"--input={write_lines(tmp_path / 'in', [completion('a')])}",
        f"--output={write_lines(tmp_path / 'out', [answered('a'), answered('z')])}",
    )
    status, _, errors = command(capsys, *files)
    assert status == 2 and "it lacks 1 custom_id of the output, as 'z'" in errors and "--allow_changed_input" in errors
    status, _, errors = command(capsys, *files, "--allow_changed_input")
    assert status == 0 and "they stay there" in errors
    assert [result["custom_id"] for result in read_results(tmp_path / "out")] == ["a", "z"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--input is missing"),
        (("--input={in}",), "--output is missing"),
        (("--input={dir}/none", "--output={dir}/out"), "--input: there is no file"),
        (("--input={in}", "--output={dir}/none/out"), "cannot be written: No such file or directory"),
        (("--input={in}", "--output={in}"), "is the input; write to another file"),
        (("--input={in}", "--output={dir}/out", "--trace_file={dir}/out"), "--trace_file: "),
        (("--input={in}", "--output={dir}/out", "--window=0"), "flag --window=0: must be at least 1"),
        (("--input={in}", "--output={dir}/out", "--page_size=3"), "--page_size is 3"),
    ],
)
def test_a_mistake_is_answered_before_a_model_loads(capsys, paths, tmp_path, words, message):
    names = {"in": paths[0], "dir": tmp_path}
    status, _, errors = command(capsys, *(word.format_map(names) for word in words))
    assert status == 2 and message in errors


def test_the_flagfile_of_the_repository_is_valid(capsys, tmp_path):
    empty = write_lines(tmp_path / "in", [])
    words = ("--flagfile=configs/engines/batch.flags", f"--input={empty}", f"--output={tmp_path / 'out'}")
    status, output, _ = command(capsys, *words)
    assert status == 0 and "0 of 0 lines" in output
