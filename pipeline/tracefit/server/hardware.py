"""Facts of GPUs that step time depends on: a catalogue with sources, and a reader of a user's GPU file.

Rates are dense (datasheets of NVIDIA print sparse ones, which are twice as high). GB is 10^9 bytes. Link
bandwidth is bidirectional per GPU, over NVLink, xGMI or a bridge.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

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
_MAX_NAME_CHARS = 64

# A thousand times the largest GPU of today: a larger value has a wrong unit.
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
        link_gb_s: Bandwidth to the other GPUs, sum of both directions; None with PCIe only.
        sm_count: Streaming multiprocessors (compute units for AMD); None if unknown.
    """

    name: Annotated[Text, Field(max_length=_MAX_NAME_CHARS)]
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
        confidence: `high` for datasheet values, `low` if sources disagree, `given` for a GPU of the user.
    """

    confidence: Confidence = "high"

    @property
    def compute_to_bandwidth(self) -> float:
        """FLOP per byte at which compute and memory take equally long (fp16 rate over memory bandwidth)."""
        return self.compute_tflops_fp16 * 1e12 / (self.memory_bandwidth_gb_s * 1e9)

    @property
    def relative_performance(self) -> float:
        """Speed relative to an H100 SXM: the geometric mean of the fp16-rate and the bandwidth ratio.

        A step is bound by one or the other, so one of them does not show how much faster a GPU is.
        """
        reference = CATALOGUE["H100-SXM"]
        compute = self.compute_tflops_fp16 / reference.compute_tflops_fp16
        bandwidth = self.memory_bandwidth_gb_s / reference.memory_bandwidth_gb_s
        return float((compute * bandwidth) ** 0.5)

    @property
    def slug(self) -> str:
        """The name as a part of a deployment id: lower case, `[a-z0-9-]` only."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "gpu"

    def facts(self) -> dict[str, Scalar]:
        """Return the GPU facts of a coefficient file, as a flat mapping in a fixed order."""
        return {
            "gpu": self.name,
            **{key: getattr(self, key) for key in _VALUE_FIELDS},
            "compute_to_bandwidth": self.compute_to_bandwidth,
            "relative_performance": self.relative_performance,
            "gpu_confidence": self.confidence,
        }


_VALUE_FIELDS = tuple(field.name for field in fields(GpuValues) if field.name != "name")


# Columns: name, source, TFLOPS at fp16 and fp8, memory in GB and GB/s, link in GB/s, multiprocessors,
# aliases; "-" means not published.
#
# Source:
# - sheet: the vendor's datasheet, with dense rates. For RTX cards NVIDIA's architecture whitepapers, with
#   sums in fp32, as inference uses them; for B300 and GB300 the sheets of HGX B300 and GB300 NVL72, which
#   omit the multiprocessors in use.
# - tables: the tables of serving simulators, which disagree with the datasheet.
# - both: the datasheet and these tables, which agree.
#
# The first alias is the common meaning of the bare name: the SXM board, and for the A100 the one with 80 GB.
# Other aliases are spellings of drivers and clouds.
_TABLE = """\
H100-SXM        both    989.5    1979   80  3350   900  132  H100 H100-80GB H100-SXM5 H100-80GB-HBM3 H100-SXM-80GB H100-SXM5-80GB
H100-PCIe       both    756.5    1513   80  2000   600  114  H100-80GB-PCIe H100-PCIe-80GB
H100-NVL        sheet   835.5  1670.5   94  3900   600  132  H100-94GB H100-NVL-94GB
H200-SXM        both    989.5    1979  141  4800   900  132  H200 H200-141GB H200-SXM-141GB
A100-40GB-SXM   sheet     312       -   40  1555   600  108  A100-40 A100-40GB A100-SXM4-40GB A100-SXM-40GB A100-40-SXM
A100-80GB-SXM   both      312       -   80  2039   600  108  A100 A100-80 A100-80GB A100-SXM A100-SXM4 A100-SXM4-80GB A100-SXM-80GB A100-80-SXM
A100-80GB-PCIe  both      312       -   80  1935   600  108  A100-PCIe A100-PCIe-80GB A100-80-PCIe
L4              both      121     242   24   300     -   58  L4-24GB
L40S            both      362     733   48   864     -  142  L40S-48GB
H20             sheet     148     296   96  4000   900   78  H20-96GB H20-SXM H20-SXM5
RTX-4090        sheet   165.2   330.3   24  1008     -  128  RTX-4090-24GB 4090
RTX-5090        sheet   209.5     419   32  1792     -  170  RTX-5090-32GB 5090
RTX-PRO-6000    sheet   503.8  1007.6   96  1792     -  188  RTX-PRO-6000-Blackwell RTX-PRO-6000-Blackwell-Workstation-Edition
A10G            tables     70       -   24   600     -   80  A10G-24GB
V100-16GB-SXM2  sheet     125       -   16   900   300   80  V100 V100-SXM2 V100-16GB V100-SXM2-16GB
V100-32GB-SXM2  sheet     125       -   32   900   300   80  V100-32GB V100-SXM2-32GB
B200            both     2250    4500  180  8000  1800  148  B200-180GB B200-SXM
GB200           both     2500    5000  186  8000  1800  148  GB200-186GB
B300            sheet    2250    4500  288  8000  1800    -  B300-288GB B300-SXM B300-SXM6 B300-SXM6-AC
GB300           sheet    2500    5000  288  8000  1800    -  GB300-288GB
MI300X          sheet    1307    2615  192  5300   896  304  MI300X-OAM MI300X-192GB
MI325X          sheet    1307    2615  256  6000   896  304  MI325X-OAM MI325X-256GB
MI350X          sheet    2307    4614  288  8000  1075  256  MI350X-OAM MI350X-288GB
MI355X          sheet    2517    5033  288  8000  1075  256  MI355X-OAM MI355X-288GB
"""


def _entry(row: str) -> tuple[Gpu, list[str]]:
    """Return the GPU of a row of the table, and its aliases."""
    name, source, *cells = row.split()
    # As JSON: a whole number stays whole, as it is published.
    values, aliases = cells[: len(_VALUE_FIELDS)], cells[len(_VALUE_FIELDS) :]
    facts = {k: json.loads(cell) for k, cell in zip(_VALUE_FIELDS, values, strict=True) if cell != "-"}
    return Gpu(name=name, **facts, confidence="low" if source == "tables" else "high"), aliases


_ENTRIES = tuple(map(_entry, _TABLE.splitlines()))

CATALOGUE: Mapping[str, Gpu] = {gpu.name: gpu for gpu, _ in _ENTRIES}
"""GPUs by name."""

# Drivers put the maker before the model: `NVIDIA H100 80GB HBM3`, `Tesla V100-SXM2-16GB`, `AMD Instinct MI300X`.
_MAKERS = re.compile(r"^(nvidia|tesla|geforce|amd|instinct|radeon)+")


def _key(name: str) -> str:
    """Fold a GPU's name: letters and digits only, without maker (`NVIDIA A100-SXM4-80GB` → `a100sxm480gb`)."""
    return _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


_NAMES: Mapping[str, Gpu] = {_key(name): gpu for gpu, aliases in _ENTRIES for name in (gpu.name, *aliases)}
"""GPUs by their folded names and aliases."""


class UnknownGpuError(UsageError):
    """A GPU that is not in the catalogue."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue by its name, a common alias, or the driver's name.

    Letter case, spaces and dashes do not matter, and the maker's name may lead: `H100`, `h100 sxm`,
    `NVIDIA H100 80GB HBM3`, `A100-SXM4-80GB`.

    Raises:
        UnknownGpuError: No such GPU; the line names the closest and all others of the catalogue.
    """
    if gpu := _NAMES.get(_key(name)):
        return gpu
    # Cut first: matching takes time with the square of the length.
    close = difflib.get_close_matches(_key(name)[:_MAX_NAME_CHARS], _NAMES, n=_SUGGESTIONS, cutoff=0.6)
    meant = dict.fromkeys(_NAMES[key].name for key in close)
    suggestion = f"did you mean {' or '.join(meant)}? " if meant else ""
    raise UnknownGpuError(
        f"GPU {excerpt(name)!r} is not known",
        hint=f"{suggestion}known: {', '.join(CATALOGUE)}; or give a JSON file that describes it",
    )


def read_gpu(path: Path) -> Gpu:
    """Read a GPU of the user from a JSON file.

    The file holds one object with `memory_bandwidth_gb_s`, `compute_tflops_fp16`, `memory_gb` and `sm_count`
    and optionally `compute_tflops_fp8`, `link_gb_s` and `name`; or a mapping of one name to such an object.

    Raises:
        UsageError: The file cannot be read, lacks a value, or holds one that is not a finite positive number.
    """
    return parse_gpu(read_bytes(path), where=str(path), fallback_name=path.stem)


def parse_gpu(text: bytes | str, *, where: str, fallback_name: str = "custom") -> Gpu:
    """Parse the content of a GPU file, see `read_gpu`.

    A GPU without a name gets `fallback_name`.

    Raises:
        UsageError: As `read_gpu`.
    """
    document = parse_json_object(text, where=where)
    # Without a value at the top, the file maps a name to a GPU, as tables of serving simulators do.
    if not document.keys() & set(_VALUE_FIELDS):
        fallback_name, document = _only_entry(document, where=where)
    values = validated(GpuValues, {"name": fallback_name, **document}, where=where)
    return Gpu(**asdict(values), confidence="given")


def _only_entry(document: Document, *, where: str) -> tuple[str, Document]:
    """Return the name and the object of the one GPU that a file maps."""
    if not document:
        raise UsageError("describes no GPU", where=where, hint=f"state {', '.join(_VALUE_FIELDS)}")
    if len(document) > 1:
        listed = ", ".join(excerpt(key) for key in list(document)[:16])
        raise UsageError("describes several GPUs", where=where, hint=f"keep one of {listed}")
    ((name, entry),) = document.items()
    if not isinstance(entry, Mapping):
        raise UsageError(f"{excerpt(name)} is {kind_of(entry)}, not an object", where=where)
    return name, entry
