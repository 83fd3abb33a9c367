"""tools/audit: a bill of materials that repeats, and an audit that fails for vulnerabilities alone."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "tools" / "audit"
FOUND = {"jinja2": ("Jinja2", "3.1.6", ["markupsafe"]), "markupsafe": ("MarkupSafe", "3.0.3", [])}


@pytest.fixture(scope="module")
def audit():
    loader = importlib.machinery.SourceFileLoader("jaxserve_audit", str(FILE))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("jaxserve_audit", loader))
    write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write
    return module


def fake(tmp_path, text):
    """A command that runs `text` instead of pip-audit."""
    script = tmp_path / "pip_audit.py"
    script.write_text(text)
    return [sys.executable, str(script)]


def answer(vulns):
    listed = [
        {"name": "jinja2", "version": "3.1.6", "vulns": vulns},
        {"name": "markupsafe", "version": "1", "vulns": []},
    ]
    return f"import sys\nprint({json.dumps(json.dumps({'dependencies': listed}))})\nsys.exit({int(bool(vulns))})\n"


def test_the_bill_has_the_runtime_dependencies_and_repeats(audit, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "audit", lambda *_: 0)
    texts = []
    for name in ("a.json", "b.json"):
        assert audit.main(["--sbom", str(tmp_path / name)]) == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    bill = json.loads(texts[0])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    names = {each["name"].lower() for each in bill["components"]}
    assert {"jax", "jaxlib", "numpy", "jinja2", "markupsafe", "grpcio", "starlette"} <= names
    assert not names & {"pytest", "ruff", "mypy", "httpx-sse", "openai"}
    refs = [each["bom-ref"] for each in bill["components"]]
    assert [each.partition("@")[0] for each in refs] == sorted({each.partition("@")[0] for each in refs})
    assert all(each["purl"] == each["bom-ref"] for each in bill["components"])
    graph = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert set(graph) == {*refs, bill["metadata"]["component"]["bom-ref"]}
    assert {ref for needs in graph.values() for ref in needs} == set(refs)  # everything is there for a reason


def test_something_found_fails_and_is_named(audit, tmp_path, capsys):
    command = fake(tmp_path, answer([{"id": "CVE-2000-1", "fix_versions": ["3.1.7"]}]))
    assert audit.audit(FOUND, command) == 1
    assert "Jinja2".lower() in (said := capsys.readouterr().out) and "CVE-2000-1; fixed in 3.1.7" in said


def test_nothing_found_passes_and_asks_for_the_exact_versions(audit, tmp_path, capsys):
    text = "import sys\nasked = open(sys.argv[sys.argv.index('--requirement') + 1]).read()\n"
    text += "assert asked == 'jinja2==3.1.6\\nmarkupsafe==3.0.3\\n', asked\n" + answer([])
    assert audit.audit(FOUND, fake(tmp_path, text)) == 0
    assert "nothing known against 2 packages" in capsys.readouterr().out


def test_a_service_that_cannot_be_reached_is_no_failure(audit, tmp_path, capsys, monkeypatch):
    assert audit.audit(FOUND, fake(tmp_path, "raise SystemExit('no route to the service')")) == 0
    assert "skipped: no route to the service" in capsys.readouterr().out
    monkeypatch.setattr(audit, "AUDIT_S", 0.5)
    assert audit.audit(FOUND, fake(tmp_path, "import time\ntime.sleep(60)")) == 0
    assert "skipped: the vulnerability service did not answer within 0.5 s" in capsys.readouterr().out
    assert audit.audit(FOUND, [sys.executable, "-m", "no_such_module_pip_audit"]) == 0
    assert "skipped: " in capsys.readouterr().out
