"""Command lines: every engine setting has a flag, spelling is free, mistakes name flag and rule."""

import subprocess
import sys
from dataclasses import fields

import pytest

from jaxserve.config import EngineConfig
from jaxserve.config.flag_table import FLAGS
from jaxserve.config.flags import SUMMARIES, engine_config_from_flags, flags_of, help_text, parse_flags


def server(*words):
    return parse_flags("server", ["prog", *words])


def engine_config(*words):
    return engine_config_from_flags(server(*words))


def refusal(capsys, *words):
    """What is said of a command line that must not be accepted."""
    with pytest.raises(SystemExit) as raised:
        engine_config(*words)
    assert raised.value.code not in (0, None)
    return capsys.readouterr().err


def test_without_flags_the_settings_are_the_defaults():
    assert engine_config() == EngineConfig()


@pytest.mark.parametrize("command", ["server", "batch"])
def test_every_engine_setting_is_a_flag_of_what_runs_an_engine(command):
    # What an engine computes for others, or they for it, is a server's business.
    elsewhere = set() if command == "server" else {"disaggregation"}
    assert {field.name for field in fields(EngineConfig)} - elsewhere <= {flag.name for flag in flags_of(command)}


def test_a_flag_is_defined_once_per_command():
    for command in SUMMARIES:
        names = [flag.name for flag in flags_of(command)]
        assert len(names) == len(set(names))
    assert {command for flag in FLAGS for command in flag.commands} == set(SUMMARIES)


@pytest.mark.parametrize(
    "words",
    [
        ("--max_model_len=100", "--noenable_chunked_prefill", "--decode_buckets=1,2"),
        ("--max-model-len=100", "--no-enable-chunked-prefill", "--decode-buckets=1, 2"),
        ("--max-model-len", "100", "--enable-chunked-prefill=false", "--decode_buckets", "1,2"),
    ],
)
def test_dashes_and_underscores_mean_the_same(words):
    assert engine_config(*words) == EngineConfig(max_model_len=100, enable_chunked_prefill=False, decode_buckets=(1, 2))


def test_a_value_that_looks_like_a_flag_is_kept_as_it_is():
    assert server("--api-key", "--a-b").api_key == "--a-b"
    assert server("--served_model_name=--a-b").served_model_name == "--a-b"


def test_flags_come_from_a_file_too(tmp_path):
    file = tmp_path / "engine.flags"
    file.write_text("# slots\n--max-num-seqs=3\n--page_size=8\n")
    assert engine_config(f"--flagfile={file}", "--page-size=4") == EngineConfig(max_num_seqs=3, page_size=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--page_size=0",), "--page_size is 0; it must be a power of two from 1 to 256"),
        (("--page_size=-1",), "--page_size is -1; it must be a power of two from 1 to 256"),
        (("--page_size=3",), "--page_size is 3; it must be a power of two from 1 to 256"),
        (("--page-size=48",), "--page_size is 48; it must be a power of two from 1 to 256"),
        (("--page_size=x",), "flag --page_size=x: must be an integer"),
        (("--max_num_seqs=8", "--max_num_batched_tokens=4"), "--max_num_seqs is 8 and max_num_batched_tokens is 4;"),
        (("--num_pages=0",), "--num_pages is 0; it must be an integer of at least 2"),
        (("--num_pages=1",), "--num_pages is 1; it must be an integer of at least 2"),
        (("--memory_fraction=0",), "--memory_fraction is 0.0; it must be in (0, 1]"),
        (("--memory_fraction=nan",), "flag --memory_fraction=nan: must be finite"),
        (("--dtype=int8",), "flag --dtype=int8: must be one of float32, bfloat16"),
        (("--decode_buckets=1,0",), "each of which must be at least 1"),
        (("--http_port=65536",), "flag --http_port=65536: must be at most 65535"),
        (("--reservation=optimistic",), "--reservation is 'optimistic' and preemption is 'pause'; a paused request"),
        (("--max_preemptions=0",), "--max_preemptions is 0; it must be an integer of at least 1"),
        (("--service_classes=/no/such/file",), "service_classes file /no/such/file"),
        (("--api_key=",), "--api_key is empty"),
        (("--api_key_file=/no/such/file",), "flag --api_key_file=/no/such/file: names a file that cannot be read"),
        (("--allowed_origins=example.org",), "each of which must be * or an origin, as https://example.org:8443"),
        (("--allowed_origins=https://a/b",), "each of which must be * or an origin"),
        (("--pagesize=4",), "Did you mean: page_size"),
        (("serve",), "unexpected argument 'serve'"),
        (("--model",), "Missing value for flag --model"),
        (("--flagfile=/no/such/file",), "Unable to open flagfile"),
    ],
)
def test_a_mistake_names_flag_and_rule(capsys, words, message):
    assert message in refusal(capsys, *words)


def test_chunking_off_needs_a_budget_for_a_whole_prompt(capsys):
    """Both values are named; with the budget above the context it is legal."""
    words = ("--noenable_chunked_prefill", "--max_model_len=1024")
    error = refusal(capsys, *words, "--max_num_batched_tokens=512")
    assert "max_num_batched_tokens is 512 and max_model_len is 1024" in error
    assert engine_config(*words, "--max_num_batched_tokens=2048").max_num_batched_tokens == 2048


def test_the_api_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "from-environment")
    assert server().api_key == "from-environment"
    assert server("--api_key=given").api_key == "given"
    monkeypatch.setenv("JAXSERVE_API_KEY", "")
    assert server().api_key is None


@pytest.mark.parametrize("command", sorted(SUMMARIES))
def test_help_lists_every_flag_and_no_key(capsys, monkeypatch, command):
    monkeypatch.setenv("JAXSERVE_API_KEY", "secret-key")
    with pytest.raises(SystemExit) as raised:
        parse_flags(command, ["prog", "--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text == help_text(command)
    for flag in flags_of(command):
        assert f"--{flag.name}" in text or f"--[no]{flag.name}" in text
    assert "secret-key" not in text


def test_a_bad_flag_is_answered_before_jax_loads():
    """A process of its own: the exit status is the program's, and jax's start is not waited for."""
    script = (
        "import sys; from jaxserve.server.__main__ import main\n"
        "try: main(['prog', '--page-size=3'])\n"
        "except SystemExit as error: print(error.code, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"
    assert "--page_size is 3" in done.stderr


def test_help_cut_short_by_its_reader_is_no_mistake():
    command = f"set -o pipefail; {sys.executable} -m jaxserve.server --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "flagfile" not in done.stderr and done.stdout.startswith("Serves a model")


def test_empty_defaults_are_not_shown():
    assert "(default: )" not in help_text("server")
