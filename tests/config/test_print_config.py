"""`--print_config`: what is printed is a flagfile that means the same, and holds no key."""

import json

import pytest

from jaxserve.config.flags import engine_config_from_flags, parse_flags
from jaxserve.config.print_config import settings_as_flagfile, settings_as_json
from jaxserve.server.__main__ import main


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice:sk-of-alice\n")
    return file


@pytest.fixture
def words(key_file, tmp_path):
    classes = tmp_path / "classes.json"
    classes.write_text(json.dumps({"gold": {"priority": -1}}))
    return [
        "--max_num_seqs=3",
        "--noenable_prefix_caching",
        "--decode_buckets=1,2",
        "--seed=7",
        "--allowed_origins=https://a.example,https://b.example",
        f"--api_key_file={key_file}",
        "--api_key=sk-secret",
        "--otlp_endpoint=https://user:sk-password@collector:4318",
        f"--service_classes={classes}",
        "--enable_lora",
        "--lora_modules=a=/adapters/a",
        "--lora_modules=b=/adapters/b",
    ]


def test_a_printed_flagfile_read_back_gives_the_same_settings(words, tmp_path):
    flags = parse_flags("server", ["prog", *words])
    file = tmp_path / "printed.flags"
    file.write_text(settings_as_flagfile("server", flags))
    again = parse_flags("server", ["prog", f"--flagfile={file}"])
    assert engine_config_from_flags(again) == engine_config_from_flags(flags)
    assert again.api_key_file == flags.api_key_file and again.allowed_origins == flags.allowed_origins
    assert again.api_key is None, "a key is not printed"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_command_prints_settings_without_keys_and_exits_with_0(words, key_file, capsys, log_format):
    assert main(["prog", *words, "--print_config", f"--log_format={log_format}"]) == 0
    printed = capsys.readouterr().out
    assert "sk-" not in printed and str(key_file) in printed and "https://collector:4318" in printed
    if log_format == "json":
        settings = json.loads(printed)
        assert settings["max_num_seqs"] == 3 and settings["enable_prefix_caching"] is False
        assert settings["api_key"] is True and settings["max_model_len"] is None
    else:
        assert "--noenable_prefix_caching" in printed and "# --api_key: set, and not shown" in printed


def test_json_has_every_setting_of_the_server_but_the_questions():
    flags = parse_flags("server", ["prog"])
    settings = json.loads(settings_as_json("server", flags))
    assert {"model", "http_port", "stats_interval_s"} <= set(settings) and "print_config" not in settings
