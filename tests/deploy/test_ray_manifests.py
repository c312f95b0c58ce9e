"""The examples for KubeRay and LeaderWorkerSet: their pods judged by Kubernetes' schemas, their application by
what builds it, and their commands by the command line that will read them.

The operators' own resources have no schema here, and nothing has met a cluster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import COMMANDS
from quire.cli.parser import Parser
from quire.ray.settings import RaySettings

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
KUBERNETES = "1.30"
NAMES = ("kuberay", "leaderworkerset")


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name / "quire.yaml").read_text()))


def _templates(name: str) -> Iterator[dict[str, Any]]:
    spec = _documents(name)[0]["spec"]
    if name == "kuberay":
        cluster = spec["rayClusterConfig"]
        yield cluster["headGroupSpec"]["template"]
        yield from (group["template"] for group in cluster["workerGroupSpecs"])
    else:
        group = spec["leaderWorkerTemplate"]
        yield from (group["leaderTemplate"], group["workerTemplate"])


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_what_kubernetes_takes(name: str) -> None:
    judge = pytest.importorskip("kubernetes_validate")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **each, "metadata": {"name": "x", **each["metadata"]}}
        for each in _templates(name)
    ]
    assert len(pods) == 2
    for each in [*pods, *_documents(name)[1:]]:
        judge.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_pods_have_no_rights_and_mount_what_they_have(name: str) -> None:
    (policy,) = (each for each in _documents(name) if each["kind"] == "NetworkPolicy")
    guarded = policy["spec"]["podSelector"]["matchLabels"]
    _, open_to_all = policy["spec"]["ingress"]
    assert [each["port"] for each in open_to_all["ports"]] == [8000]
    for template in _templates(name):
        assert guarded.items() <= template["metadata"]["labels"].items()
        spec, (container,) = template["spec"], template["spec"]["containers"]
        security = container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] and security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_application_is_one_that_can_be_built_and_its_workers_have_room_for_it() -> None:
    service = _documents("kuberay")[0]["spec"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    module, function = application["import_path"].split(":")
    assert callable(getattr(import_module(module), function))
    settings = RaySettings.of(application["args"])
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    cpus = int(group["rayStartParams"]["num-cpus"])
    assert cpus >= (settings.engine_config().num_threads or 1)
    assert group["maxReplicas"] >= settings.replicas["max_replicas"]
    (container,) = group["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == cpus


def test_a_group_has_a_pod_for_each_process_and_a_command_that_exists() -> None:
    group = _documents("leaderworkerset")[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = (each["spec"]["containers"][0] for each in _templates("leaderworkerset"))
    (script,) = leader["args"]
    _, _, served = script.partition("exec quire serve ")
    parser = Parser("quire serve", "a command")
    import_module(COMMANDS["serve"].module).add_arguments(parser)
    args = parser.parse(shlex.split(served))
    assert args.tensor_parallel_size == group["size"]
    assert args.distributed_executor_backend == "ray"
    assert f"--num-cpus={args.num_threads}" in worker["args"][0]
    assert args.port == leader["ports"][0]["containerPort"]
    assert group["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"] > args.drain_timeout
