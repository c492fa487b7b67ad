"""Compose, Kubernetes, KEDA, Dockerfile and systemd units: each checked by its schema, and all against each other."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import typer
import yaml

from broker.gateway.metrics import exported_names
from ops.cli.app import app
from tests.unit.deploy.commands import ROOT
from workers.supervisor import LATE_S

DEPLOY = ROOT / "ops" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KUBERNETES_VERSIONS = ("1.28", "1.31", kubernetes_validate.latest_version())
OUTSIDE_SCHEMAS = ("kustomize.config.k8s.io/v1beta1", "keda.sh/v1alpha1")


def documents(*, outside: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the manifests with its file's name; `outside`: those that Kubernetes itself does not define."""
    for path in sorted(KUBERNETES.glob("*.yaml")):
        for found in yaml.safe_load_all(path.read_text()):
            if (found["apiVersion"] in OUTSIDE_SCHEMAS) == outside:
                yield path.name, found


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for _, d in documents() if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def parses(words: list[str], *, whole: bool = True) -> dict[str, Any]:
    """The options of a `prism` command line, or click's complaint; not `whole`: it may lack arguments."""
    group: Any = typer.main.get_command(app)
    context = click.Context(group, info_name="prism")
    while isinstance(group, click.Group) or hasattr(group, "commands"):
        name, *words = words
        assert name in group.commands, f"there is no command {name!r}"
        group = group.commands[name]
    found = group.make_context(group.name, list(words), parent=context, resilient_parsing=not whole)
    values: dict[str, Any] = found.params
    return values


def filled(text: str) -> str:
    """A compose file's variables, by their defaults; required ones by a word."""
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda m: m[2] if m[0].find(":-") > 0 else "given", text)


# --- compose ---------------------------------------------------------------------------------------------------------


def test_the_compose_file_follows_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_services_of_the_compose_file_run_real_commands_with_time_to_drain() -> None:
    services = compose()["services"]
    options = {
        name: parses([filled(word) for word in services[name]["command"]]) for name in ("gateway", "worker", "model")
    }
    for name, late in (("gateway", 0.0), ("worker", LATE_S)):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > options[name]["grace"] + late
    assert options["gateway"]["port"] == int(services["gateway"]["ports"][0].rpartition(":")[2])
    assert services["gateway"]["ports"][0].startswith("${PRISM_BIND:-127.0.0.1}:"), "open to the world by default"


def test_the_compose_file_mounts_what_exists_and_needs_what_credentials_gives() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    script = (DEPLOY / "broker" / "credentials.sh").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert required == {"PRISM_CLIENT_URL", "PRISM_WORKER_URL", "PRISM_API_KEYS"}
    assert all(f"\n{name}=" in script for name in required)
    mounts = [volume for service in compose()["services"].values() for volume in service.get("volumes", ())]
    named = set(compose()["volumes"])
    for mount in mounts:
        source = mount.split(":")[0]
        assert source in named or source.startswith("${PRISM_SECRETS") or (DEPLOY / source).is_file(), mount
    inside = {mount.rsplit(":", 2)[1] for mount in mounts if mount.endswith(":ro")}
    assert inside == {"/etc/prism/broker.conf", "/etc/prism/users.acl"}


def test_every_container_is_kept_small_in_rights() -> None:
    for name, service in compose()["services"].items():
        assert "no-new-privileges:true" in service["security_opt"], name
        if name != "broker":  # its image begins as root to take over its volume, then changes to its own user
            assert service["cap_drop"] == ["ALL"]
    assert compose()["networks"]["pool"] == {"internal": True}


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_manifests_follow_kubernetes_schemas(version: str) -> None:
    count = 0
    for name, found in documents():
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise AssertionError(f"{name}, {found['kind']} {found['metadata']['name']}: {error}") from error
        count += 1
    assert count >= 15


def test_the_kustomization_names_every_manifest_but_the_example_of_secrets() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    others = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml", "secrets.example.yaml"}
    assert set(kustomization["resources"]) == others
    kubectl = shutil.which("kubectl")
    if kubectl:
        built = subprocess.run([kubectl, "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60)
        assert built.returncode == 0, built.stderr
        assert {found["metadata"].get("namespace", "prism") for found in yaml.safe_load_all(built.stdout)} == {"prism"}


def test_pods_run_real_commands_as_nobody_special_with_time_to_drain() -> None:
    for name, late in (("gateway", 5.0), ("worker", LATE_S)):
        pod = one("Deployment", name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        options = parses([argument.replace("$(MODEL)", "m") for argument in container["args"]])
        assert pod["terminationGracePeriodSeconds"] > options["grace"] + late
    pods = [
        (d["metadata"]["name"], d["spec"]["template"]["spec"])
        for _, d in documents()
        if "template" in d.get("spec", {})
    ]
    assert len(pods) == 3
    for name, pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def documents_with_spec() -> list[dict[str, Any]]:
    return [found for _, found in documents() if "spec" in found]


def test_selectors_secrets_and_ports_of_the_manifests_meet() -> None:
    labels = [
        d["spec"]["template"]["metadata"]["labels"] for d in documents_with_spec() if "template" in d.get("spec", {})
    ]
    for found in documents_with_spec():
        spec = found["spec"]
        selector = spec.get("podSelector", spec.get("selector")) or {}
        wanted = selector.get("matchLabels", selector if found["kind"] == "Service" else {})
        if found["kind"] != "NetworkPolicy" or wanted:
            assert any(wanted.items() <= label.items() for label in labels), (found["kind"], wanted)
    secrets = {d["metadata"]["name"]: set(d["stringData"]) for _, d in documents() if d["kind"] == "Secret"}
    for name in ("gateway", "worker"):
        (container,) = one("Deployment", name)["spec"]["template"]["spec"]["containers"]
        for variable in container["env"]:
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["key"] in secrets[reference["name"]]
    reached = [policy["spec"] for policy in documents_with_spec() if policy["kind"] == "NetworkPolicy"]
    assert any(policy["podSelector"] == {} and policy["policyTypes"] == ["Ingress", "Egress"] for policy in reached)


def test_the_brokers_configuration_is_the_same_everywhere() -> None:
    def settings(text: str) -> list[str]:
        return [line for line in text.splitlines() if line and not line.startswith("#")]

    shipped = (DEPLOY / "broker" / "broker.conf").read_text()
    assert settings(one("ConfigMap", "broker")["data"]["broker.conf"]) == settings(shipped)
    from broker.guardian import CONFIG_LINES

    of_embedded = set(CONFIG_LINES) - {"port 0", "unixsocketperm 700", "daemonize no", "databases 1"}
    assert of_embedded <= set(settings(shipped))


# --- KEDA ------------------------------------------------------------------------------------------------------------

SCALED_OBJECT = {
    "scaleTargetRef": {"name", "kind", "apiVersion", "envSourceContainerName"},
    "fallback": {"failureThreshold", "replicas", "behavior"},
    "advanced": {"restoreToOriginalReplicaCount", "horizontalPodAutoscalerConfig", "scalingModifiers"},
    **dict.fromkeys(("pollingInterval", "cooldownPeriod", "initialCooldownPeriod")),
    **dict.fromkeys(("idleReplicaCount", "minReplicaCount", "maxReplicaCount")),
}
"""Fields of a ScaledObject (keda.sh/v1alpha1) and of its parts; None: a whole number."""
METRICS_API = {"url", "format", "valueLocation", "targetValue", "activationTargetValue", "unsafeSsl", "authMode"}


def test_keda_scales_the_workers_by_the_gateways_gauge() -> None:
    ((_, scaled),) = [(n, d) for n, d in documents(outside=True) if d["kind"] == "ScaledObject"]
    spec = dict(scaled["spec"])
    (trigger,) = spec.pop("triggers")
    for name, value in spec.items():
        fields = SCALED_OBJECT[name]
        assert isinstance(value, int) if fields is None else set(value) <= fields, name
    assert spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
    target = one("Deployment", spec["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"], "a new rollout would undo what the autoscaler did"

    assert (trigger["type"], trigger["metadata"]["format"]) == ("metrics-api", "prometheus")
    metadata = trigger["metadata"]
    assert set(metadata) <= METRICS_API
    assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes strings only"
    assert metadata["valueLocation"] == "prism_wanted_workers"
    assert metadata["valueLocation"] in exported_names()
    host, port, path = re.fullmatch(r"http://([^:/]+):(\d+)(/\S*)", metadata["url"]).groups()  # type: ignore[union-attr]
    service = one("Service", host.split(".")[0])
    assert host == f"{service['metadata']['name']}.prism.svc"
    assert [int(port)] == [item["port"] for item in service["spec"]["ports"]]
    assert path == "/metrics"
    options = parses(
        [word.replace("$(MODEL)", "m") for word in target["spec"]["template"]["spec"]["containers"][0]["args"]]
    )
    assert int(metadata["targetValue"]) == options["workers"], "workers in a pod"


# --- Dockerfile ------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text()
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines()) if word]


def test_the_image_ends_as_an_ordinary_user_with_a_healthcheck() -> None:
    found = instructions()
    stages = [rest for word, rest in found if word == "FROM"]
    assert len(stages) == 2
    assert stages[0].endswith(" AS build")
    assert not any(rest.split()[0].endswith(":latest") or ":" not in rest.split()[0] for rest in stages)
    last = found[[word for word, _ in found].index("FROM", 5) :]
    named = dict(last)
    assert named["USER"] == "10001:10001"
    assert named["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(named["ENTRYPOINT"]) == ["prism"]
    order = [word for word, _ in last]
    assert order.index("USER") < order.index("ENTRYPOINT")
    health = json.loads(named["HEALTHCHECK"].partition("CMD ")[2])
    parses(health[1:])
    assert not any(word == "ADD" for word, _ in found), "ADD fetches and unpacks what COPY would show"
    assert all("pip install" not in rest or "--no-cache-dir" in rest for _, rest in found)
    assert any("--constraint requirements.lock" in rest for _, rest in found)
    runs = [rest for word, rest in last if word == "RUN"]
    assert any("prism doctor --compile" in rest for rest in runs)


def test_the_image_is_made_of_the_whole_project_and_nothing_else() -> None:
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert "*" in ignored
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.search(r"^include = \[(.*)\]$", project, re.M)
    assert packages
    assert {name.strip(' "*') for name in packages[1].split(",")} <= copied
    readme = re.search(r'^readme = "(.*)"$', project, re.M)
    assert readme
    assert readme[1] in copied


# --- systemd ---------------------------------------------------------------------------------------------------------

HARDENING = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "RestrictNamespaces": "yes",
    "LockPersonality": "yes",
    "SystemCallArchitectures": "native",
    "UMask": "0077",
}


class Multi(OrderedDict[str, Any]):
    """Keeps every value of a repeated directive, as systemd does."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    parser = configparser.RawConfigParser(strict=False, dict_type=Multi, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return {name: {key: value.split("\n") for key, value in parser.items(name)} for name in parser.sections()}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_each_unit_is_hardened_and_leaves_time_to_stop(path: Path) -> None:
    found = unit(path)
    assert list(found) == ["Unit", "Service", "Install"]
    service = found["Service"]
    assert {name: service.get(name, ["missing"])[0] for name in HARDENING} == HARDENING
    assert service["User"] != ["root"]
    assert service["Restart"][0] in ("always", "on-failure")
    program, *words = shlex.split(service["ExecStart"][0])
    assert program.startswith("/")
    if program.endswith("/prism"):
        variables = dict(item.split("=", 1) for item in service["Environment"][0].split())
        options = parses([re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], word).replace("%i", "m") for word in words])
        late = LATE_S if "worker" in path.name else 0.0
        assert float(service["TimeoutStopSec"][0]) > options["grace"] + late
        assert service["KillMode"] == ["mixed"], "a stop must reach the supervisor alone"
        assert variables["PRISM_HOME"] == f"/var/lib/{service['StateDirectory'][0]}"


def test_only_workers_may_make_memory_executable() -> None:
    allowed = {path.stem: unit(path)["Service"]["MemoryDenyWriteExecute"] for path in UNITS}
    assert allowed == {"prism-broker": ["yes"], "prism-gateway": ["yes"], "prism-worker@": ["no"]}


def test_systemd_itself_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:  # the rules above stand alone on machines without systemd
        return
    for path in UNITS:
        program = shlex.split(unit(path)["Service"]["ExecStart"][0])[0]
        copy = tmp_path / path.name
        copy.write_text(path.read_text().replace(f"ExecStart={program}", "ExecStart=/bin/true"))
        done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60)
        assert [line for line in done.stderr.splitlines() if path.stem.rstrip("@") in line] == []
