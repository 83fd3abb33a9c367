"""StructuredOutputs: what is refused without a model."""

import pytest

from jaxserve import SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json": 3}, "json must be a JSON schema; got int"),
        ({"json": {"a": object()}}, "json is no JSON"),
        ({"json": {"a": float("nan")}}, "json is no JSON"),
        ({"regex": 3}, "regex must be a string; got int"),
        ({"grammar": ["a"]}, "grammar must be a string; got list"),
        ({"choice": "ab"}, "choice must be a list of strings; got str"),
        ({"choice": []}, "choice has 0 texts; it must have 1 to 16384"),
        ({"choice": ["a", ""]}, "choice must hold strings that are not empty; got ''"),
        ({"choice": ["a", 1]}, "choice must hold strings that are not empty; got 1"),
        ({"json_object": 1}, "json_object must be true or false; got 1"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for json and json_object"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace is for json and json_object"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "give one of them"),
    ],
)
def test_what_is_malformed_is_refused_by_field(fields, message):
    with pytest.raises(ValueError) as refused:
        StructuredOutputs(**fields)
    assert message in str(refused.value) and str(refused.value).startswith("structured_outputs")


def test_equal_constraints_are_one_key_and_a_schema_keeps_its_order():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    first, second = StructuredOutputs(json=schema), StructuredOutputs(json=dict(schema))
    assert first == second and hash(first) == hash(second) and first.constraint == "json"
    assert first.json.index('"b"') < first.json.index('"a"')
    assert StructuredOutputs(choice=["é", "b"]).size == 3
    assert hash(StructuredOutputs(choice=["a", "b"])) == hash(StructuredOutputs(choice=("a", "b")))


def test_sampling_params_take_no_other_kind():
    with pytest.raises(ValueError, match="structured_outputs must be a StructuredOutputs; got dict"):
        SamplingParams(structured_outputs={"regex": "a"})
