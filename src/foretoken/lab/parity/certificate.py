"""Certificates: files of parity runs that another machine can repeat and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretoken.core.io.stamped import Stamp
from foretoken.lab.parity.report import PLAIN, Report, Settings
from foretoken.lab.parity.weights import Checksums, drafter_checksums, model_checksums
from foretoken.loading.measured.machine import hardware, threads, versions
from foretoken.models.base import LanguageModel
from foretoken.models.huggingface import HuggingFaceModel

SETTINGS = ("verifier", "controller", "max_new_tokens", "sampling", "samples", "false_alarm", "seed", "allow_lossy")
"""Settings that are stored unchanged."""
PARTS = {
    "model": ("source", "checksums", "options", "forward", "weights", "exactness", "exactness_why"),
    "settings": (*SETTINGS, "modes"),
    "texts": ("greedy", "seeded"),
    "result": ("passed", "checks"),
}
"""Required keys of a certificate's parts."""
STAMP = Stamp("foretoken parity certificate", 1, "write one with foretoken parity --certificate FILE")


@dataclass(frozen=True)
class Certificate:
    """Settings, environment and result of a parity run.

    Attributes:
        written: date and time, UTC.
        versions: of foretoken, Python, PyTorch and Transformers.
        machine: processor, its matrix instructions, cores, accelerators, kernels and threads.
        model: ``source``, ``checksums`` of its files, ``options`` of loading, and execution details: ``forward``,
            ``weights``, ``layout``, ``exactness``, ``exactness_why``, ``refused``.
        drafters: ``spec`` and ``checksums`` of each.
        settings: of the run, with its ``modes``.
        texts: token ids of plain decoding's ``greedy`` and ``seeded`` outputs.
        result: the JSON of ``foretoken parity --json``.
    """

    written: str
    versions: dict[str, str]
    machine: dict[str, Any]
    model: dict[str, Any]
    drafters: list[dict[str, Any]]
    settings: dict[str, Any]
    prompts: list[list[int]]
    texts: dict[str, list[list[int]]]
    result: dict[str, Any]

    @property
    def specs(self) -> list[str]:
        """Specs of the checked drafters."""
        return [drafter["spec"] for drafter in self.drafters]

    def run_settings(self, source: str) -> Settings:
        """The settings of the run, for the model at ``source``."""
        options = {name: self.settings[name] for name in SETTINGS}
        return Settings(target_source=source, modes=self.settings["modes"], **options)


def machine_here() -> dict[str, Any]:
    """Properties of this machine that determine rounding."""
    return {**hardware(), "torch_threads": threads()["torch_threads"]}


def model_here(source: str, options: Mapping[str, Any], target: LanguageModel, checksums: Checksums) -> dict[str, Any]:
    """The certificate's entry for a model."""
    description = target.describe()
    del description["threads"]  # a property of the machine
    layout = target.forwards.packing.layout if isinstance(target, HuggingFaceModel) else "plain"
    return {"source": source, "checksums": checksums, "options": dict(options), "layout": layout, **description}


def certify(
    report: Report, settings: Settings, target: LanguageModel, options: Mapping[str, Any], checksums: Checksums
) -> Certificate:
    """The certificate of a complete run on a target loaded with ``options``: ``dtype``, ``device``, ``inflate``,
    ``quantize``, ``backend``."""
    if not report.complete:
        raise ValueError("an interrupted run has no certificate: let it finish")
    source = str(settings.target_source)
    specs = dict.fromkeys(check.drafter for check in report.checks if check.drafter != PLAIN)
    return Certificate(
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        machine=machine_here(),
        model=model_here(source, options, target, checksums),
        drafters=[{"spec": spec, "checksums": drafter_checksums(spec, source)} for spec in specs],
        settings={**{name: getattr(settings, name) for name in SETTINGS}, "modes": list(settings.modes)},
        prompts=report.prompts,
        texts={"greedy": report.plain, "seeded": report.seeded},
        result=report.public(),
    )


def read_certificate(file: Path) -> Certificate:
    """Read a certificate.  Raises ``ValueError`` for other files, other versions, and changed or incomplete ones."""
    body = STAMP.read(file)
    try:
        certificate = Certificate(**body)
        whole = all(set(keys) <= set(getattr(certificate, part)) for part, keys in PARTS.items())
        whole = whole and all({"spec", "checksums"} <= set(drafter) for drafter in certificate.drafters)
    except TypeError:
        whole = False
    if not whole:
        raise ValueError(f"{file} is an incomplete certificate of parity: {STAMP.remedy}")
    return certificate


def check_weights(certificate: Certificate, file: Path, source: str, drafters: Sequence[str]) -> Checksums:
    """Checksums of the model at ``source``.  Raises ``ValueError`` if it is not on this machine, or if it or a drafter
    differs from the certificate's."""
    checksums = model_checksums(source)
    _same(certificate.model["checksums"], checksums, f"{file} is for another model than {source}")
    if len(drafters) != len(certificate.drafters):
        raise ValueError(f"{file} is for {len(certificate.drafters)} drafters: give --drafter for each, or for none")
    for drafter, spec in zip(certificate.drafters, drafters, strict=True):
        _same(drafter["checksums"], drafter_checksums(spec, source), f"{file} is for another drafter than {spec}")
    return checksums


def _same(certified: Checksums, current: Checksums, words: str) -> None:
    """Compare files by contents; their names may differ."""
    if sorted(certified.values()) != sorted(current.values()):
        differing = sorted(name for name in {*certified, *current} if certified.get(name) != current.get(name))
        raise ValueError(f"{words}: the checksums of {', '.join(differing) or 'its files'} differ")
