"""Settings of several hosts: what is missing or contradicts is named."""

import pytest

from jaxserve.config import EngineConfig
from jaxserve.config.hosts_config import control_address, host_token

TWO = dict(num_processes=2, process_id=1, coordinator_address="10.0.0.1:4000")


def test_the_control_address_is_the_coordinators_next_port_unless_set():
    assert control_address(EngineConfig(**TWO)) == ("10.0.0.1", 4001)
    assert control_address(EngineConfig(**TWO, control_address="[::1]:5")) == ("::1", 5)
    assert EngineConfig(**TWO).several_processes and not EngineConfig(num_processes=1).several_processes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_processes=2, process_id=0), "coordinator_address is missing and num_processes is 2"),
        (dict(num_processes=2, coordinator_address="a:1"), "process_id is missing"),
        (TWO | dict(process_id=2), "process_id is 2 and num_processes is 2; ids go from 0"),
        (TWO | dict(coordinator_address="a"), "coordinator_address is 'a'; it must be host:port"),
        (TWO | dict(control_address="a:70000"), "control_address is 'a:70000'; it must be host:port"),
        (dict(process_id=1), "process_id is set and num_processes is 1"),
        (dict(num_processes=1, coordinator_address="a:1"), "coordinator_address is set and num_processes is 1"),
        (dict(distributed=True), "control_address is missing and coordinator_address comes from the environment"),
        (TWO | dict(preemption="swap", reservation="optimistic"), "preemption is swap with several processes"),
        (TWO | dict(disaggregation="decode"), "disaggregation is decode with several processes"),
        (TWO | dict(preemption="auto", reservation="optimistic"), "preemption is auto with several processes"),
        (TWO | dict(host_timeout_s=0), "host_timeout_s is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        EngineConfig(**settings)


def test_the_token_comes_from_a_file_or_the_environment_and_has_a_length(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXSERVE_HOST_TOKEN", raising=False)
    with pytest.raises(ValueError, match="JAXSERVE_HOST_TOKEN has 0 characters; several processes need a shared token"):
        host_token(EngineConfig(**TWO))
    monkeypatch.setenv("JAXSERVE_HOST_TOKEN", "0123456789abcdef\n")
    assert host_token(EngineConfig(**TWO)) == b"0123456789abcdef"
    file = tmp_path / "token"
    with pytest.raises(ValueError, match="cannot be read"):
        host_token(EngineConfig(**TWO, host_token_file=str(file)))
    file.write_text("short\n")
    with pytest.raises(ValueError, match="has 5 characters"):
        host_token(EngineConfig(**TWO, host_token_file=str(file)))
