"""Reading the input: what is no request has a code, the line's number and the rule; the rest is unharmed."""

import json

import pytest

from jaxserve.batch.request_file import RequestFile
from jaxserve.batch.result_file import Done
from tests.batch.lines import chat, completion, write_lines

LIMIT = 1000


def read(path):
    """The lines of a file, with nothing done."""
    file = RequestFile(path, LIMIT)
    survey = file.survey(Done())
    lines = list(file.pending(survey, Done()))
    assert survey.num_lines == len(lines)
    return lines


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "rule"),
    [
        ("{", None, "invalid_json_line", "not valid JSON"),
        ("[1]", None, "invalid_json_line", "must be a JSON object"),
        ('{"custom_id": "x", "n": NaN}', None, "invalid_json_line", "not valid JSON"),
        ({"method": "POST"}, None, "missing_custom_id", "custom_id must be a string"),
        (completion(7), None, "missing_custom_id", "custom_id must be a string"),
        (completion(""), None, "missing_custom_id", "custom_id must be a string of at least 1 character"),
        (completion("a"), "a", "duplicate_custom_id", "custom_id 'a' is that of an earlier line"),
        (completion("x") | {"method": "GET"}, "x", "invalid_method", "method is 'GET'; it must be \"POST\""),
        (completion("x") | {"url": "/v1/embeddings"}, "x", "invalid_url", "url is '/v1/embeddings'; it must be one of"),
        (completion("x") | {"body": []}, "x", "invalid_body", "body must be a JSON object"),
        (completion("x", stream=True), "x", "invalid_body", "body.stream must be false or absent"),
        (completion("x", "y" * LIMIT), None, "line_too_long", f"has more than {LIMIT} bytes (max_line_bytes)"),
    ],
)
def test_a_bad_line_is_named_and_costs_nobody_else(tmp_path, line, custom_id, code, rule):
    lines = read(write_lines(tmp_path / "in.jsonl", [completion("a"), line, chat("b")]))
    assert [each.number for each in lines] == [1, 2, 3]
    assert [each.error is None for each in lines] == [True, False, True]
    bad = lines[1]
    assert (bad.custom_id, bad.error.code) == (custom_id, code)
    assert bad.error.message.startswith(f"line 2: {rule}")


def test_blank_lines_are_left_out_and_counted_as_lines(tmp_path):
    lines = read(write_lines(tmp_path / "in.jsonl", ["", completion("a"), "  ", completion("b")]))
    assert [(line.number, line.custom_id) for line in lines] == [(2, "a"), (4, "b")]


def test_a_byte_order_mark_crlf_and_a_missing_last_newline_are_accepted(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(completion(name)) for name in "ab").encode())
    assert [(line.custom_id, line.error) for line in read(path)] == [("a", None), ("b", None)]


def test_a_line_at_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    text = json.dumps(completion("a"))
    path = write_lines(tmp_path / "in.jsonl", [text.ljust(LIMIT), json.dumps(completion("b")).ljust(LIMIT + 1), text])
    codes = [line.error and line.error.code for line in read(path)]
    assert codes == [None, "line_too_long", "duplicate_custom_id"]


def test_what_is_done_is_not_pending(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [completion("a"), "{", completion("a"), completion("b"), "["])
    file = RequestFile(path, LIMIT)
    done = Done(custom_ids={"a"}, numbers={2})
    survey = file.survey(done)
    assert (survey.num_lines, survey.num_done, survey.unknown_ids) == (5, 2, frozenset())
    assert [line.number for line in file.pending(survey, done)] == [3, 4, 5]


def test_ids_that_only_the_output_has_are_found(tmp_path):
    file = RequestFile(write_lines(tmp_path / "in.jsonl", [completion("a")]), LIMIT)
    assert file.survey(Done(custom_ids={"a", "z"})).unknown_ids == {"z"}


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--input: there is no file .*in\.jsonl"):
        RequestFile(tmp_path / "in.jsonl", LIMIT)
    with pytest.raises(ValueError, match="must be a regular file: it is read twice"):
        RequestFile(tmp_path, LIMIT)
