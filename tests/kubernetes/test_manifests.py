"""The manifests: valid by the API's schemas, and right about what a schema does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from shared.config import resolve
from tests.support.pod import Manifest, render

OVERLAYS = ("cpu", "cuda", "cuda-single")
API_VERSION = "1.34"
"""The first in which resource claims are stable."""

STOP_GRACE_S = 15


def pod(overlay: str) -> Manifest:
    spec: Manifest = render(overlay)["Deployment"]["spec"]["template"]["spec"]
    return spec


def mounts(container: Manifest) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def config(overlay: str, folder: Path) -> Any:  # noqa: ANN401 - a ResolvedConfig
    file = folder / "kvpair.toml"
    file.write_text(render(overlay)["ConfigMap"]["data"]["kvpair.toml"])
    return resolve(environ={"KVPAIR_CONFIG": str(file)}, num_cores=8).config


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_one_that_the_api_takes(overlay: str) -> None:
    for manifest in render(overlay).values():
        kubernetes_validate.validate(manifest, API_VERSION, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_configuration_is_one_that_the_daemons_take(overlay: str, tmp_path: Path) -> None:
    settings = config(overlay, tmp_path)
    assert settings.log.format == "json"
    grace_s = pod(overlay)["terminationGracePeriodSeconds"]
    assert grace_s == settings.limits.drain_timeout_s + STOP_GRACE_S


@pytest.mark.parametrize("overlay", ["cpu", "cuda"])
def test_both_containers_share_what_the_pair_has_to_share(overlay: str) -> None:
    """CUDA's events go through /dev/shm, and pids must differ and be visible to each other."""
    spec = pod(overlay)
    prefilld, decoded = spec["containers"]
    assert mounts(prefilld) == mounts(decoded)
    assert {"/dev/shm", "/run/kvpair"} <= set(mounts(prefilld))
    assert prefilld["env"] == decoded["env"]
    assert spec["shareProcessNamespace"]
    assert "hostIPC" not in spec
    assert "hostPID" not in spec


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_has_rights_that_it_does_not_need(overlay: str) -> None:
    spec = pod(overlay)
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_probe_asks_for_progress_and_gives_it_time_to_answer(overlay: str) -> None:
    """A daemon answers STATUS within five seconds, or not at all."""
    for container in pod(overlay)["containers"]:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[kind]
            assert "kvpair probe" in " ".join(probe["exec"]["command"])
            assert probe["timeoutSeconds"] > 5
        assert "--ready" in container["readinessProbe"]["exec"]["command"]


def test_both_containers_see_both_gpus_by_one_claim() -> None:
    """A device plugin would give each its own, and neither could open the other's memory."""
    spec = pod("cuda")
    (claim,) = spec["resourceClaims"]
    template = render("cuda")["ResourceClaimTemplate"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 2
    for container in spec["containers"]:
        assert container["resources"]["claims"] == [{"name": claim["name"]}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_the_fallback_gives_both_gpus_to_one_container_under_an_init() -> None:
    spec = pod("cuda-single")
    (pair,) = spec["containers"]
    assert pair["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert pair["args"] == ["kvpair", "up"]
    assert "command" not in pair, "it would go before the image's init"
    assert not spec["shareProcessNamespace"]


def test_the_cuda_overlays_name_a_device_for_each_daemon(tmp_path: Path) -> None:
    for overlay in ("cuda", "cuda-single"):
        settings = config(overlay, tmp_path)
        assert (settings.prefilld.device, settings.decoded.device) == ("cuda:0", "cuda:1")
