"""The manifests of configs/deploy/kubernetes: every argument is one that the server takes, and all of them agree."""

import re
from pathlib import Path

import pytest
import yaml

from jaxserve.config.flags import engine_config_from_flags, parse_flags
from jaxserve.config.hosts_config import HOST_TOKEN_VARIABLE, control_address

FOLDER = Path(__file__).parents[2] / "configs" / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
SET_BY_LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "jaxserve-0.jaxserve.default"}
DEVICES = ("nvidia.com/gpu", "google.com/tpu")


def workload(path):
    """The workload of a manifest, its pod, how many pods hold the model, and the services beside it."""
    documents = list(yaml.safe_load_all(path.read_text()))
    services = [document for document in documents if document["kind"] == "Service"]
    (found,) = [document for document in documents if document["kind"] != "Service"]
    spec = found["spec"]
    if found["kind"] == "LeaderWorkerSet":
        template = spec["leaderWorkerTemplate"]
        return found, template["workerTemplate"], template["size"], services
    return found, spec["template"], spec["replicas"] if found["kind"] == "StatefulSet" else 1, services


def flags_of(container, **values):
    """The flags of a container, with variables as Kubernetes puts them in."""
    assert container["command"] == ["python", "-m", "jaxserve.server"]
    words = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in container["args"]]
    return parse_flags("server", ["server", *words])


def test_there_are_manifests():
    assert [path.name for path in FILES] == [
        "one_host_gpu.yaml", "one_host_tpu.yaml", "several_hosts_lws.yaml", "several_hosts_stateful_set.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_arguments_ports_probes_and_devices_agree(path):
    kind, template, num_hosts, services = workload(path)
    (container,) = template["spec"]["containers"]
    own = {entry["name"] for entry in container["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= own | (set(SET_BY_LWS) if kind["kind"] == "LeaderWorkerSet" else set())
    # `api_key_file` is read when flags are parsed; what it holds is the operator's.
    without_keys = container | {"args": [word for word in container["args"] if not word.startswith("--api_key_file")]}
    flags = flags_of(without_keys, **SET_BY_LWS, POD_INDEX="1")
    config = engine_config_from_flags(flags)

    (devices,) = [int(count) for name, count in container["resources"]["limits"].items() if name in DEVICES]
    assert config.tensor_parallel_size == devices * num_hosts
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert (flags.host, flags.http_port, flags.grpc_port) == ("0.0.0.0", ports["http"], ports["grpc"])
    assert {name: container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")} == {
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert container["livenessProbe"]["httpGet"]["port"] == container["readinessProbe"]["httpGet"]["port"] == "http"
    assert template["spec"]["terminationGracePeriodSeconds"] > flags.drain_grace_s
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    labels = set(template["metadata"]["labels"].items())
    for service in services:
        indices = {("apps.kubernetes.io/pod-index", "0"), ("leaderworkerset.sigs.k8s.io/worker-index", "0")}
        assert set(service["spec"]["selector"].items()) <= labels | indices
        assert {entry["name"] for entry in service["spec"]["ports"]} <= set(ports)
        assert all(entry["port"] == ports[entry["name"]] for entry in service["spec"]["ports"])

    assert config.several_processes == (num_hosts > 1) == path.stem.startswith("several_hosts")
    if num_hosts > 1:
        assert (config.num_processes, config.process_id) == (num_hosts, 1)
        assert int(config.coordinator_address.split(":")[1]) == ports["coordinator"]
        assert control_address(config)[1] == ports["control"]
        assert HOST_TOKEN_VARIABLE in own
        api = next(service for service in services if service["metadata"]["name"] == "jaxserve-api")
        assert any(value == "0" for value in api["spec"]["selector"].values()), "followers take no requests"
