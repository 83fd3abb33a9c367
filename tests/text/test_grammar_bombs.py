"""Constraints made to be dear: taken or refused, soon and in little memory, and their first steps too."""

import resource
import time

import pytest

from jaxserve.core import StructuredOutputs
from jaxserve.text import GrammarCompiler
from tests.text.vocabularies import byte_tokenizer

MAX_S, MAX_MIB = 15.0, 300
NESTED = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(30)}
BRANCHING = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(30)}
END = {"d30": {"type": "object"}}
BOMBS = {
    "nested counts": {"regex": "((a{1,1000}){1,1000})"},
    "deeper counts": {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000})"},
    "alternatives": {"regex": "(a|aa|aaa)*" * 100},
    "states of a subset": {"regex": "(a|b)*a" + "(a|b)" * 60},
    "classes": {"regex": r"\p{L}{1,1000}\w{1,1000}\W{1,1000}"},
    "a large enum": {"json": {"enum": [f"{'x' * 20}{index}" for index in range(4000)]}},
    "itself": {"json": {"$ref": "#"}},
    "a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "all of itself": {"json": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "all of all": {"json": {"$defs": NESTED | END, "$ref": "#/$defs/d0"}},
    "any of any": {"json": {"$defs": BRANCHING | END, "$ref": "#/$defs/d0"}},
    "a long string": {"json": {"type": "string", "minLength": 10**9}},
    "many items": {"json": {"type": "array", "minItems": 10**9}},
    "a multiple": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "rules with counts": {"grammar": 'start: a{1,100000}\na: b{1,100000}\nb: "x"{1,100000}'},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_taken_or_refused_soon(tmp_path, name):
    compiler = GrammarCompiler(byte_tokenizer(tmp_path), vocab_size=264, eos_token_ids=[257])
    compiler.prepare()
    before_s, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        grammar = compiler.compile(StructuredOutputs(**BOMBS[name]))
    except ValueError as error:
        assert "cannot be followed" in str(error) and len(str(error)) < 1000
    else:
        assert compiler.first_mask(grammar).any()
    assert time.process_time() - before_s < MAX_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MAX_MIB << 10
