"""The pair as a pod: the Containerfile's steps, and the manifests' namespaces, taken literally."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.support.pair import wait_until, write_tiny_model
from tests.support.pod import Image, Pod, render

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]

DAEMONS = ("prefilld", "decoded")
CONFIG = """
[model]
path = "/var/cache/kvpair/models/tiny.gguf"
[prefilld]
threads = 1
[decoded]
threads = 1
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with TemporaryDirectory(prefix="kvpair-") as folder, ExitStack() as undo:
        yield Image(Path(folder), undo)


def pod(image: Image, folder: Path, **how: Any) -> Pod:  # noqa: ANN401 - Pod's own
    """Return the CPU overlay's pod, over a model that needs no fetching."""
    made = Pod(image, render("cpu")["Deployment"], config=CONFIG, folder=folder, **how)
    write_tiny_model(made.model_folder)
    return made


def wait_ready(pod: Pod, name: str) -> None:
    wait_until(
        lambda: pod.probe(name, "readinessProbe").returncode == 0,
        timeout_s=60,
        what=f"{name} is ready: {pod.containers[name].log}",
    )


def wait_logged(pod: Pod, name: str, text: str) -> None:
    wait_until(
        lambda: text in pod.containers[name].log,
        timeout_s=60,
        what=f"{name} says {text!r}; it said {pod.containers[name].log}",
    )


def test_the_pair_serves_in_two_containers_and_drains(image: Image, tmp_path: Path) -> None:
    """Two mount namespaces, one PID namespace, a user without rights, a root that is read-only."""
    with pod(image, tmp_path) as running:
        for name in DAEMONS:
            wait_ready(running, name)
            assert running.probe(name, "livenessProbe").returncode == 0
        command = ["kvpair", "generate", "--max-tokens=4", "--ignore-eos", "hello"]
        done = running.execute("decoded", command)
        assert done.returncode == 0, done.stderr
        assert running.terminate() == {"prefilld": 0, "decoded": 0}


def test_two_pid_namespaces_are_refused_by_name(image: Image, tmp_path: Path) -> None:
    """Each daemon is PID 1 of its own: CUDA could not open the memory of `itself`."""
    with pod(image, tmp_path, is_pid_shared=False) as running:
        wait_logged(running, "prefilld", "share the PID namespace")
        wait_logged(running, "decoded", '"code":"same-pid"')
        assert running.probe("prefilld", "readinessProbe").returncode == 75


def test_two_socket_folders_are_told_by_the_path(image: Image, tmp_path: Path) -> None:
    with pod(image, tmp_path, private=frozenset({"sockets"})) as running:
        wait_logged(running, "prefilld", "no socket at /run/kvpair/pair/decoded.sock")
        assert running.probe("prefilld", "readinessProbe").returncode == 75
        wait_ready(running, "decoded")


def test_the_single_container_runs_both_daemons_under_an_init(image: Image, tmp_path: Path) -> None:
    """It is the fallback where one GPU cannot be given to two containers."""
    deployment = render("cuda-single")["Deployment"]
    single = Pod(image, deployment, config=CONFIG, folder=tmp_path)
    write_tiny_model(single.model_folder)
    with single as running:
        wait_ready(running, "pair")
        assert running.probe("pair", "livenessProbe").returncode == 0
        processes = running.execute("pair", ["cat", "/proc/1/comm"])
        assert processes.stdout == "tini\n"
        assert running.terminate() == {"pair": 0}


def test_the_image_is_whole_and_runs_as_the_manifests_say(image: Image) -> None:
    assert (image.root / "opt/kvpair/bin/kvpair").exists()
    for overlay in ("cpu", "cuda", "cuda-single"):
        spec = render(overlay)["Deployment"]["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsUser"] == image.uid
        for container in spec["containers"]:
            assert yaml.safe_load(str(container["image"])).startswith("kvpair:")
