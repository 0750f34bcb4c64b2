"""A pod without Kubernetes: containers by `unshare`, from a rendered manifest and an image's steps.

Each container has a mount namespace of its own, in which the image is read-only and its volumes are
where the manifest says; the PID namespace is the pod's or its own, as the manifest says.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from tests.support.pair import wait_until
from tests.support.roots import REPOSITORY, check_able, make_root, run_inside

if TYPE_CHECKING:
    from types import TracebackType

CONTAINERFILE = REPOSITORY / "kubernetes/Containerfile"
KUBERNETES = REPOSITORY / "kubernetes"

COMMAND_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
"""As the manifest's terminationGracePeriodSeconds, and something for a busy machine."""

Manifest = dict[str, Any]


def render(overlay: str) -> dict[str, Manifest]:
    """Return an overlay's objects by kind, as `kubectl kustomize` makes them.

    Raises:
        AssertionError: kubectl is missing, or does not like it.
    """
    try:
        done = subprocess.run(
            ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise AssertionError("rendering the manifests needs kubectl: install it") from None
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}


class Image:
    """What a Containerfile makes, made without a container engine.

    Attributes:
        root: The image's root directory.
        environ: Its environment.
        uid: The user that its containers run as.
    """

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        check_able()
        self.root = make_root(folder, undo)
        self.environ: dict[str, str] = {}
        self.uid = 0
        self.entrypoint: list[str] = []
        self._arguments: dict[str, str] = {}
        for instruction, text in _instructions(CONTAINERFILE.read_text()):
            self._follow(instruction, text)

    def _follow(self, instruction: str, text: str) -> None:
        match instruction:
            case "RUN":
                environ = [f"{name}={value}" for name, value in self._arguments.items()]
                folder = f"cd {shlex.quote(self._workdir)} && " if hasattr(self, "_workdir") else ""
                run_inside(self.root, "env", *environ, "sh", "-ec", folder + text)
            case "WORKDIR":
                self._workdir = text
            case "ARG":
                name, _, value = text.partition("=")
                self._arguments[name] = value.strip('"')
            case "ENV":
                name, _, value = text.partition("=")
                self.environ[name] = value
            case "USER":
                self.uid = int(text.partition(":")[0])
            case "ENTRYPOINT":
                self.entrypoint = yaml.safe_load(text)
            case "FROM" | "COPY" | "CMD":
                pass  # the root has it all: the checkout, and what an earlier stage made
            case _:
                raise AssertionError(f"nothing here follows the Containerfile's {instruction}")


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


class Container:
    """One running container of a pod."""

    def __init__(self, process: subprocess.Popen[bytes], spec: Manifest, log: Path) -> None:
        self.process, self.spec, self._log = process, spec, log

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")


class Pod:
    """The containers of one Deployment; a context manager that stops them.

    Args:
        image: What they run.
        deployment: The rendered manifest.
        config: The text of its kvpair.toml.
        folder: An empty folder for volumes and logs.
        is_pid_shared: Overrides shareProcessNamespace.
        private: Volumes of which each container gets its own.
    """

    def __init__(
        self,
        image: Image,
        deployment: Manifest,
        *,
        config: str,
        folder: Path,
        is_pid_shared: bool | None = None,
        private: frozenset[str] = frozenset(),
    ) -> None:
        self._image, self._folder, self._private = image, folder, private
        self._spec = deployment["spec"]["template"]["spec"]
        self._undo = ExitStack()
        shared = self._spec.get("shareProcessNamespace", False)
        self._is_pid_shared = shared if is_pid_shared is None else is_pid_shared
        self.model_folder = self._volume("models", "")
        (self._volume("config", "") / "kvpair.toml").write_text(config)
        self.containers: dict[str, Container] = {}
        self._pause: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            if self._is_pid_shared:
                self._pause = subprocess.Popen(
                    ["unshare", "--pid", "--fork", "--kill-child", "sleep", "infinity"]
                )
            for spec in self._spec["containers"]:
                self._start(spec)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def execute(self, name: str, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `kubectl exec` and probes do."""
        container = self.containers[name]
        return subprocess.run(
            [
                *("nsenter", "-t", str(self._main_pid(container)), "--mount", "--pid", "--root"),
                *self._as_container(container.spec, command),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )

    def probe(self, name: str, kind: str) -> subprocess.CompletedProcess[str]:
        """Run a container's probe: startupProbe, livenessProbe or readinessProbe."""
        return self.execute(name, self.containers[name].spec[kind]["exec"]["command"])

    def terminate(self) -> dict[str, int]:
        """Stop all containers as the kubelet does, and return their exit codes."""
        for container in self.containers.values():
            os.kill(self._main_pid(container), signal.SIGTERM)
        return {
            name: container.process.wait(timeout=END_TIMEOUT_S)
            for name, container in self.containers.items()
        }

    # --- how -------------------------------------------------------------------------------------

    def _volume(self, name: str, container: str) -> Path:
        own = f"{name}-{container}" if name in self._private else name
        path = self._folder / "volumes" / own
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)  # as an emptyDir
        return path

    def _start(self, spec: Manifest) -> None:
        """Start one container."""
        root = self._folder / f"root-{spec['name']}"
        root.mkdir()
        lines = [
            f"mount --rbind {self._image.root} {root}",
            f"mount -o remount,bind,ro {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
        ]
        for volume in spec["volumeMounts"]:
            source = self._volume(volume["name"], spec["name"])
            target = f"{root}{volume['mountPath']}"
            (self._image.root / volume["mountPath"].lstrip("/")).mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {source} {target}")
            if volume.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {target}")
        argv = [*spec.get("command", self._image.entrypoint), *spec.get("args", ())]
        lines.append(f"exec chroot {root} {shlex.join(self._as_container(spec, argv))}")
        log = self._folder / f"{spec['name']}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*self._namespaces(), "sh", "-ec", "\n".join(lines)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self.containers[spec["name"]] = Container(process, spec, log)

    def _namespaces(self) -> list[str]:
        private = ["unshare", "--mount", "--propagation=private"]
        if self._pause is None:
            return [*private, "--pid", "--fork", "--kill-child"]
        return ["nsenter", "-t", str(_child_of(self._pause)), "--pid", *private]

    def _as_container(self, spec: Manifest, command: list[str]) -> list[str]:
        """Return a command under the container's environment and user, without any privilege."""
        ours = {variable["name"]: variable["value"] for variable in spec["env"]}
        variables = [f"{name}={value}" for name, value in (self._image.environ | ours).items()]
        context = self._spec["securityContext"]
        user = (f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}")
        powers = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        return ["env", "-i", *variables, "setpriv", *user, *powers, "--", *command]

    def _main_pid(self, container: Container) -> int:
        """Return the pid, as this machine sees it, of what a container runs."""
        return _child_of(container.process)

    def _end(self) -> None:
        for container in self.containers.values():
            container.process.kill()
            container.process.wait()
        if self._pause is not None:
            self._pause.kill()
            self._pause.wait()


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """Return the only child of a process, once it has forked.

    Raises:
        AssertionError: It ended instead.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(
        lambda: process.poll() is not None or children.read_text(),
        what=f"{process.args!r} has started its process",
    )
    assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
    return int(children.read_text())
