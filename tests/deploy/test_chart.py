"""The Helm chart: rendered by Helm's own library, judged by Kubernetes' schemas, and its commands
read by the command line that will read them.

Runs where `helm-python-sdk` and `kubernetes-validate` are installed (the extra `charts`). Nothing
here has met a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import COMMANDS
from quire.cli.parser import Parser
from quire.config.route import ROUTING_POLICIES

helm = pytest.importorskip("helm_python")
judge = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
CHART = DEPLOY / "helm" / "quire"
KUBERNETES = "1.30"
# Resources of operators, whose schemas are not Kubernetes' own.
FOREIGN = {"ScaledObject", "PodMonitor"}
KEYS = {"apiKeys": {"existingSecret": "quire-keys"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "keys": KEYS,
    "one server": {"router": {"enabled": False}, **KEYS},
    "hpa": {"autoscaling": {"hpa": {"enabled": True}}},
    "everything": {
        **KEYS,
        "imagePullSecrets": [{"name": "registry"}],
        "server": {
            "model": "/models/large one",
            "extraArgs": ["--max-num-seqs", "64"],
            "env": [{"name": "OMP_NUM_THREADS", "value": "8"}],
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"operator": "Exists"}],
        },
        "weights": {"existingClaim": "weights"},
        "cache": {"size": "100Gi", "storageClassName": "fast"},
        "autoscaling": {"keda": {"enabled": True}},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "chat"}}}]},
        "podMonitor": {"enabled": True, "apiKeySecret": {"name": "k", "key": "metrics"}},
        "dashboard": {"enabled": True},
    },
}


def _resources(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="demo", namespace="serving")
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def _containers(resources: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for resource in resources:
        if resource["kind"] == "Deployment":
            spec = resource["spec"]["template"]["spec"]
            yield spec, spec["containers"][0]


def test_helm_finds_nothing_wrong() -> None:
    found = helm.lint(str(CHART), strict=True)
    assert found["errors"] == []
    assert {message["error"] for message in found["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_rendered_is_what_kubernetes_takes(name: str) -> None:
    resources = _resources(VARIANTS[name])
    for resource in resources:
        if resource["kind"] not in FOREIGN:
            judge.validate(resource, KUBERNETES, strict=True)
    names = [(resource["kind"], resource["metadata"]["name"]) for resource in resources]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", VARIANTS)
def test_containers_have_no_rights_and_run_commands_that_exist(name: str) -> None:
    for spec, container in _containers(_resources(VARIANTS[name])):
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        command, *rest = container["args"]
        parser = Parser(f"quire {command}", "a command")
        import_module(COMMANDS[command].module).add_arguments(parser)
        args = parser.parse(rest)
        assert args.host == "0.0.0.0" and args.port == container["ports"][0]["containerPort"]
        drain_s = float(args.drain_timeout)
        assert spec["terminationGracePeriodSeconds"] > drain_s
        assert container["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_a_pod_that_loads_is_left_alone_and_ready_means_that_it_can_serve() -> None:
    (server,) = (each for _, each in _containers(_resources({})) if each["name"] == "server")
    probe = server["startupProbe"]
    assert probe["httpGet"]["path"] == server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_the_router_finds_the_servers_and_the_service_the_router() -> None:
    resources = {
        (each["kind"], each["metadata"]["name"]): each for each in _resources(VARIANTS["keys"])
    }
    args = resources["Deployment", "demo-quire-router"]["spec"]["template"]["spec"]["containers"][
        0
    ]["args"]
    assert "--backend=dns+http://demo-quire-replicas.serving.svc:8000" in args
    headless = resources["Service", "demo-quire-replicas"]["spec"]
    pods = resources["Deployment", "demo-quire-server"]["spec"]["template"]["metadata"]["labels"]
    assert headless["clusterIP"] == "None" and headless["selector"].items() <= pods.items()
    front = resources["Service", "demo-quire"]["spec"]["selector"]
    assert front["app.kubernetes.io/component"] == "router"
    allowed = resources["NetworkPolicy", "demo-quire-server"]["spec"]["ingress"][0]["from"]
    assert allowed[0]["podSelector"]["matchLabels"] == front


def test_scaling_is_on_tokens_that_wait() -> None:
    resources = {each["kind"]: each for each in _resources(VARIANTS["everything"])}
    trigger = resources["ScaledObject"]["spec"]["triggers"][0]["metadata"]
    assert "quire:num_tokens_waiting{" in trigger["query"]
    assert "replicas" not in next(
        each["spec"]
        for each in _resources(VARIANTS["hpa"])
        if each["metadata"]["name"] == "demo-quire-server" and each["kind"] == "Deployment"
    )
    dashboard = json.loads(resources["ConfigMap"]["data"]["quire.json"])
    assert dashboard == json.loads((DEPLOY / "grafana" / "quire.json").read_text())


@pytest.mark.parametrize(
    "values",
    [
        {"router": {"policy": "best"}},
        {"server": {"replicas": 0}},
        {"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}},
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    with helm.Chart.load(str(CHART)) as chart:
        merged = chart.merge_values(values)
        with pytest.raises(helm.HelmError):
            chart.validate_schema(merged)


def test_the_chart_knows_the_routers_policies() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    policies = schema["properties"]["router"]["properties"]["policy"]["enum"]
    assert set(policies) == set(ROUTING_POLICIES)


def test_the_kserve_example_runs_a_command_that_exists() -> None:
    runtime, service = yaml.safe_load_all((DEPLOY / "kserve" / "quire.yaml").read_text())
    container = runtime["spec"]["containers"][0]
    parser = Parser("quire serve", "a command")
    import_module(COMMANDS["serve"].module).add_arguments(parser)
    assert parser.parse(container["args"][1:]).model == "/mnt/models"
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    spec = {key: runtime["spec"][key] for key in ("containers", "volumes")}
    judge.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec},
        KUBERNETES,
        strict=True,
    )


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_run_without_rights_and_copy_what_exists(name: str) -> None:
    lines = (DEPLOY / "docker" / name).read_text().splitlines()
    last = "\n".join(
        lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    )
    assert "USER 10001:10001" in last and 'ENTRYPOINT ["quire"]' in last
    copied = [
        source
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    assert copied and all((DEPLOY.parent / source).exists() for source in copied)
    assert not {source.split("/")[0] for source in copied} & set(ignored)
