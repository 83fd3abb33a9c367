"""The output file is whole lines after every kill, full disk and rerun."""

import errno
import os

import pytest

from jaxserve.batch import result_file
from jaxserve.batch.records import LineError, Result
from jaxserve.batch.result_file import ResultFile, ResultFileError
from jaxserve.faults import Fault, FaultPlan, use_fault_plan
from tests.batch.lines import read_results

RESULTS = [
    Result(1, "a", {"status_code": 200, "request_id": "r", "body": {"text": "x\ny"}}, None),
    Result(2, None, None, LineError("invalid_json_line", "line 2: not valid JSON")),
    Result(3, "a", None, LineError("duplicate_custom_id", "line 3: twice")),
    Result(4, "é", {"status_code": 400, "request_id": "r", "body": {}}, LineError("invalid", "line 4: no")),
]
LINES = [result.encode() for result in RESULTS]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def recovered(path):
    file = ResultFile(path)
    try:
        return file.recover()
    finally:
        file.close()


def test_what_was_written_is_known_again(path):
    file = ResultFile(path)
    for line in LINES:
        file.append(line)
    file.close()
    done = recovered(path)
    assert (done.custom_ids, done.numbers, done.num_failed) == ({"a", "é"}, {2, 3}, 3)
    assert path.read_bytes() == b"".join(LINES)


def test_a_last_line_cut_anywhere_is_repaired_and_the_file_goes_on(path):
    for length in range(len(LINES[3])):
        path.write_bytes(b"".join(LINES[:3]) + LINES[3][:length])
        file = ResultFile(path)
        done = file.recover()
        whole = length == len(LINES[3]) - 1  # only the newline is missing
        assert ("é" in done.custom_ids) == whole
        assert done.num_bytes_cut == (0 if whole else length)
        if not whole:
            file.append(LINES[3])
        file.close()
        assert path.read_bytes() == b"".join(LINES)


@pytest.mark.parametrize("tail", [b"\0" * 9, LINES[1][:20] + b"\0" * 9, LINES[1].rstrip() + b"\0" * 9])
def test_zeros_after_a_power_cut_are_cut_off(path, tail):
    path.write_bytes(LINES[0] + tail)
    recovered(path)
    assert len(read_results(path)) == (2 if tail.startswith(LINES[1].rstrip()) else 1)


@pytest.mark.parametrize("content", [b"my notes", b'{"a": 1}', b'{"a": 1}\n', b"x\n" + LINES[0], b"\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"--output: line 1 of .*out\.jsonl is no line of batch results"):
        recovered(path)
    assert path.read_bytes() == content


def test_results_of_another_program_count_by_their_ids(path):
    path.write_text('{"id": "batch_req_abc", "custom_id": "z", "response": {}, "error": null}\n')
    assert recovered(path).custom_ids == {"z"}


def test_two_processes_do_not_write_one_file(path):
    first = ResultFile(path)
    with pytest.raises(ValueError, match="another process is writing"):
        ResultFile(path)
    first.close()
    ResultFile(path).close()


def test_what_cannot_be_an_output_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must be a regular file"):
        ResultFile(tmp_path / "pipe")
    with pytest.raises(ValueError, match="cannot be written: Is a directory"):
        ResultFile(tmp_path)
    with pytest.raises(ValueError, match="cannot be written: No such file or directory"):
        ResultFile(tmp_path / "missing" / "out.jsonl")


def test_a_full_disk_leaves_whole_lines(path, monkeypatch):
    file = ResultFile(path)
    file.append(LINES[0])
    write, room = os.write, [10]

    def write_until_full(fd, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "x")
        count = write(fd, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(ResultFileError, match=r"out\.jsonl: No space left on device"):
        file.append(LINES[1])
    assert path.read_bytes() == LINES[0]
    room[0] = 1000  # space again
    file.append(LINES[1])
    file.close()
    assert path.read_bytes() == LINES[0] + LINES[1]


def test_a_write_that_fails_for_another_cause_leaves_whole_lines_too(path):
    file = ResultFile(path)
    file.append(LINES[0])
    use_fault_plan(FaultPlan([Fault("batch.write", "raise")]))
    try:
        with pytest.raises(ResultFileError, match=r"out\.jsonl: InjectedFault: "):
            file.append(LINES[1])
    finally:
        use_fault_plan(None)
    assert path.read_bytes() == LINES[0]
    file.append(LINES[1])
    file.close()
    assert path.read_bytes() == LINES[0] + LINES[1]


def test_the_disk_is_synced_periodically_and_at_the_end(path, monkeypatch):
    now, synced = [0.0], []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(now[0]))
    file = ResultFile(path, clock=lambda: now[0])
    for now[0] in (1.0, result_file.SYNC_PERIOD_S, result_file.SYNC_PERIOD_S + 1):
        file.append(LINES[0])
    assert synced == [result_file.SYNC_PERIOD_S]
    file.close()
    file.close()
    assert len(synced) == 2
