"""Facts of GPUs that step time depends on: a catalogue with sources, and a reader of a user's own GPU file.

Rates are dense (datasheets of NVIDIA print sparse ones, which are twice as high). GB is 10^9 bytes. Link
bandwidth is bidirectional per GPU, over NVLink, xGMI or a bridge.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter

from tracefit.errors import UsageError
from tracefit.server.documents import (
    FiniteNumber,
    Text,
    WholeNumber,
    excerpt,
    kind_of,
    parse_json_object,
    read_bytes,
    validated,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.server.documents import Document, Scalar

Confidence = Literal["high", "low", "given"]

_SUGGESTIONS = 3

# A thousand times the largest GPU of today: what is above is a wrong unit.
_Rate = Annotated[FiniteNumber, Field(gt=0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuValues:
    """The values of a GPU file.

    Attributes:
        name: Name in the catalogue or in the user's file.
        compute_tflops_fp16: Dense fp16/bf16 rate, in 10^12 FLOP/s.
        compute_tflops_fp8: Dense fp8 rate; None for a GPU without it.
        memory_gb: Memory, in 10^9 bytes.
        memory_bandwidth_gb_s: Memory bandwidth, in 10^9 bytes/s.
        link_gb_s: Bandwidth to the other GPUs, both directions together; None where there is only PCIe.
        sm_count: Streaming multiprocessors (compute units for AMD); None where not given.
    """

    name: Annotated[Text, Field(max_length=64)]
    compute_tflops_fp16: _Rate
    compute_tflops_fp8: _Rate | None = None
    memory_gb: _Rate
    memory_bandwidth_gb_s: _Rate
    link_gb_s: _Rate | None = None
    sm_count: Annotated[WholeNumber, Field(ge=1, le=1_000_000)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(GpuValues):
    """One GPU: its values and how far to trust them.

    Attributes:
        sources: Where each value comes from, by field name.
        confidence: `high` for datasheet values, `low` where sources disagree, `given` for a user's own.
    """

    sources: Mapping[str, str]
    confidence: Confidence = "high"

    @property
    def compute_to_bandwidth(self) -> float:
        """FLOP per byte at which compute and memory take equally long (fp16 rate over memory bandwidth)."""
        return self.compute_tflops_fp16 * 1e12 / (self.memory_bandwidth_gb_s * 1e9)

    @property
    def relative_performance(self) -> float:
        """Speed relative to an H100 SXM: the geometric mean of the fp16-rate and the bandwidth ratio.

        A step is bound by one or the other, so that neither alone says how much faster a GPU is.
        """
        reference = CATALOGUE["H100-SXM"]
        compute = self.compute_tflops_fp16 / reference.compute_tflops_fp16
        bandwidth = self.memory_bandwidth_gb_s / reference.memory_bandwidth_gb_s
        return float((compute * bandwidth) ** 0.5)

    @property
    def slug(self) -> str:
        """The name as a part of a scope id: lower case, `[a-z0-9-]` only."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "gpu"

    def facts(self) -> dict[str, Scalar]:
        """Return the GPU facts of a coefficient file, as a flat mapping in a fixed order."""
        return {
            "gpu": self.name,
            "compute_tflops_fp16": self.compute_tflops_fp16,
            "compute_tflops_fp8": self.compute_tflops_fp8,
            "memory_gb": self.memory_gb,
            "memory_bandwidth_gb_s": self.memory_bandwidth_gb_s,
            "link_gb_s": self.link_gb_s,
            "sm_count": self.sm_count,
            "compute_to_bandwidth": self.compute_to_bandwidth,
            "relative_performance": self.relative_performance,
            "gpu_confidence": self.confidence,
        }


_VALUE_FIELDS = tuple(field.name for field in fields(GpuValues) if field.name != "name")
_SHAPE = TypeAdapter(GpuValues)


def _gpu(
    name: str,
    sources: str,
    *,
    tflops: tuple[float, float | None],
    memory: tuple[float, float],
    link_gb_s: float | None,
    sm_count: int,
    confidence: Confidence = "high",
) -> Gpu:
    """Make a catalogue entry; `tflops` is (fp16, fp8), `memory` is (GB, GB/s)."""
    gpu = Gpu(
        name=name,
        compute_tflops_fp16=tflops[0],
        compute_tflops_fp8=tflops[1],
        memory_gb=memory[0],
        memory_bandwidth_gb_s=memory[1],
        link_gb_s=link_gb_s,
        sm_count=sm_count,
        sources={},
        confidence=confidence,
    )
    return replace(gpu, sources={key: sources for key in _VALUE_FIELDS if getattr(gpu, key) is not None})


_SHEET = "vendor datasheet, dense rate"
_BOTH = "vendor datasheet, dense rate, agreeing with serving simulators' tables"
_UNSURE = "serving simulators' tables, which disagree with the datasheet"

CATALOGUE: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100-SXM", _BOTH, tflops=(989.5, 1979), memory=(80, 3350), link_gb_s=900, sm_count=132),
        _gpu("H100-PCIe", _BOTH, tflops=(756.5, 1513), memory=(80, 2000), link_gb_s=600, sm_count=114),
        _gpu("H100-NVL", _SHEET, tflops=(835.5, 1670.5), memory=(94, 3900), link_gb_s=600, sm_count=132),
        _gpu("H200-SXM", _BOTH, tflops=(989.5, 1979), memory=(141, 4800), link_gb_s=900, sm_count=132),
        _gpu("A100-40GB-SXM", _SHEET, tflops=(312, None), memory=(40, 1555), link_gb_s=600, sm_count=108),
        _gpu("A100-80GB-SXM", _BOTH, tflops=(312, None), memory=(80, 2039), link_gb_s=600, sm_count=108),
        _gpu("A100-80GB-PCIe", _BOTH, tflops=(312, None), memory=(80, 1935), link_gb_s=600, sm_count=108),
        _gpu("L4", _BOTH, tflops=(121, 242), memory=(24, 300), link_gb_s=None, sm_count=58),
        _gpu("L40S", _BOTH, tflops=(362, 733), memory=(48, 864), link_gb_s=None, sm_count=142),
        _gpu(
            "A10G",
            _UNSURE,
            tflops=(70, None),
            memory=(24, 600),
            link_gb_s=None,
            sm_count=80,
            confidence="low",
        ),
        _gpu("V100-16GB-SXM2", _SHEET, tflops=(125, None), memory=(16, 900), link_gb_s=300, sm_count=80),
        _gpu("V100-32GB-SXM2", _SHEET, tflops=(125, None), memory=(32, 900), link_gb_s=300, sm_count=80),
        _gpu("B200", _BOTH, tflops=(2250, 4500), memory=(180, 8000), link_gb_s=1800, sm_count=148),
        _gpu("GB200", _BOTH, tflops=(2500, 5000), memory=(186, 8000), link_gb_s=1800, sm_count=148),
        _gpu("MI300X", _SHEET, tflops=(1307, 2615), memory=(192, 5300), link_gb_s=896, sm_count=304),
        _gpu("MI325X", _SHEET, tflops=(1307, 2615), memory=(256, 6000), link_gb_s=896, sm_count=304),
    )
}
"""Known GPUs by name."""

_ALIASES: Mapping[str, tuple[str, ...]] = {
    # The bare name is what the field means by it: the SXM board, and of the A100 the 80 GB one.
    "H100-SXM": ("H100", "H100-80GB", "H100-SXM5", "H100-80GB-HBM3", "H100-SXM-80GB", "H100-SXM5-80GB"),
    "H100-PCIe": ("H100-80GB-PCIe", "H100-PCIe-80GB"),
    "H100-NVL": ("H100-94GB", "H100-NVL-94GB"),
    "H200-SXM": ("H200", "H200-141GB", "H200-SXM-141GB"),
    "A100-40GB-SXM": ("A100-40", "A100-40GB", "A100-SXM4-40GB", "A100-SXM-40GB", "A100-40-SXM"),
    "A100-80GB-SXM": (
        "A100",
        "A100-80",
        "A100-80GB",
        "A100-SXM",
        "A100-SXM4",
        "A100-SXM4-80GB",
        "A100-SXM-80GB",
        "A100-80-SXM",
    ),
    "A100-80GB-PCIe": ("A100-PCIe", "A100-PCIe-80GB", "A100-80-PCIe"),
    "L4": ("L4-24GB",),
    "L40S": ("L40S-48GB",),
    "A10G": ("A10G-24GB",),
    "V100-16GB-SXM2": ("V100", "V100-SXM2", "V100-16GB", "V100-SXM2-16GB"),
    "V100-32GB-SXM2": ("V100-32GB", "V100-SXM2-32GB"),
    "B200": ("B200-180GB", "B200-SXM"),
    "GB200": ("GB200-186GB",),
    "MI300X": ("MI300X-OAM", "MI300X-192GB"),
    "MI325X": ("MI325X-OAM", "MI325X-256GB"),
}
_MAKERS = re.compile(r"^(nvidia|tesla|amd|instinct|radeon)+")


def _key(name: str) -> str:
    """Fold a GPU's name: letters and digits only, without maker (`NVIDIA A100-SXM4-80GB` → `a100sxm480gb`)."""
    return _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


@cache
def _names() -> Mapping[str, str]:
    """Folded names and aliases to catalogue names."""
    names = {_key(name): name for name in CATALOGUE}
    for name, aliases in _ALIASES.items():
        names.update({_key(alias): name for alias in aliases})
    return names


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue by its name, a common alias, or the driver's name.

    Letter case, spaces and dashes do not matter, and the maker's name may lead: `H100`, `h100 sxm`,
    `NVIDIA H100 80GB HBM3`, `A100-SXM4-80GB`.

    Raises:
        UsageError: No such GPU; the line names the closest and the known ones.
    """
    names = _names()
    found = names.get(_key(name))
    if found is not None:
        return CATALOGUE[found]
    close = difflib.get_close_matches(_key(name)[:64], names, n=_SUGGESTIONS, cutoff=0.6)
    meant = dict.fromkeys(names[key] for key in close)
    suggestion = f"did you mean {' or '.join(meant)}? " if meant else ""
    raise UsageError(
        f"GPU {excerpt(name)!r} is not known",
        hint=f"{suggestion}known: {', '.join(CATALOGUE)}; or give a JSON file that describes it",
    )


def read_gpu(path: Path, *, name: str | None = None) -> Gpu:
    """Read a user's own GPU from a JSON file.

    The file holds one object with `memory_bandwidth_gb_s`, `compute_tflops_fp16`, `memory_gb` and `sm_count`
    and optionally `compute_tflops_fp8`, `link_gb_s` and `name`; or a mapping of names to such objects.

    Args:
        path: The file.
        name: Which one of a mapping with several.

    Raises:
        UsageError: The file cannot be read, lacks a value, or holds one that is not a finite positive number.
    """
    return parse_gpu(read_bytes(path), where=str(path), name=name, fallback_name=path.stem)


def parse_gpu(
    text: bytes | str, *, where: str, name: str | None = None, fallback_name: str = "custom"
) -> Gpu:
    """Parse the content of a GPU file, see `read_gpu`.

    Args:
        text: JSON.
        where: Name of the source, for errors.
        name: Which one of a mapping with several.
        fallback_name: Name of a GPU whose object has none.

    Raises:
        UsageError: As `read_gpu`.
    """
    document = parse_json_object(text, where=where)
    if not document.keys() & set(_VALUE_FIELDS):
        chosen = _choose(document, name, where=where)
        part = document[chosen]
        if not isinstance(part, Mapping):
            raise UsageError(f"{excerpt(chosen)} is {kind_of(part)}, not an object", where=where)
        document, fallback_name = part, chosen
    values = validated(_SHAPE, {"name": fallback_name, **document}, where=where)
    stated = {key: "given by the user" for key in _VALUE_FIELDS if document.get(key) is not None}
    return Gpu(**asdict(values), sources=stated, confidence="given")


def _choose(document: Document, name: str | None, *, where: str) -> str:
    """Pick one of a mapping of GPUs: the named one, or the only one."""
    by_key = {_key(key): key for key in document}
    if name is not None and _key(name) in by_key:
        return by_key[_key(name)]
    if name is None and len(document) == 1:
        return next(iter(document))
    if not document:
        raise UsageError("describes no GPU", where=where, hint=f"state {', '.join(_VALUE_FIELDS)}")
    listed = ", ".join(excerpt(key) for key in list(document)[:16])
    what = "describes several GPUs" if name is None else f"does not describe GPU {excerpt(name)!r}"
    raise UsageError(what, where=where, hint=f"name one of {listed}")
