"""Facts of GPUs that step time depends on: a catalogue with sources, and a reader of a user's GPU file.

Rates are dense (datasheets of NVIDIA print sparse ones, which are twice as high). GB is 10^9 bytes. Link
bandwidth is bidirectional per GPU, over NVLink, xGMI or a bridge.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
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
_MOST_NAME_CHARS = 128  # with maker, count and slice

# A thousand times the largest GPU of today: a larger value has a wrong unit.
_Rate = Annotated[FiniteNumber, Field(gt=0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuValues:
    """The values of a GPU file.

    Attributes:
        name: Name in the catalogue or in the user's file.
        compute_tflops_fp16: Dense fp16/bf16 rate, in 10^12 FLOP/s.
        compute_tflops_fp8: Dense fp8 rate; None for a GPU without it.
        compute_tflops_fp4: Dense fp4 rate; None for a GPU without it.
        memory_gb: Memory, in 10^9 bytes.
        memory_bandwidth_gb_s: Memory bandwidth, in 10^9 bytes/s.
        link_gb_s: Bandwidth to the other GPUs, sum of both directions; None with PCIe only.
        sm_count: Streaming multiprocessors (compute units for AMD); None if unknown.
    """

    name: Annotated[Text, Field(max_length=_MAX_NAME_CHARS)]
    compute_tflops_fp16: _Rate
    compute_tflops_fp8: _Rate | None = None
    compute_tflops_fp4: _Rate | None = None
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
            **{key: getattr(self, key) for key in _VALUE_FIELDS if key != "compute_tflops_fp4"},
            # Only where the GPU has it: no feature is computed from it.
            **({} if self.compute_tflops_fp4 is None else {"compute_tflops_fp4": self.compute_tflops_fp4}),
            "compute_to_bandwidth": self.compute_to_bandwidth,
            "relative_performance": self.relative_performance,
            "gpu_confidence": self.confidence,
        }


_VALUE_FIELDS = tuple(field.name for field in fields(GpuValues) if field.name != "name")


# Columns: name, source, TFLOPS at fp16, fp8 and fp4, memory in GB and GB/s, link in GB/s, multiprocessors; "-" means
# that the GPU has none, or that it is not published. Then what its names are made of, see `_Spelling`.
#
# Sources:
# - sheet: the vendor's datasheet, with dense rates (half of a rate "with sparsity"). The particular ones:
#   - RTX 3090, 4090, 5090, A6000, 6000 Ada, PRO 6000 and PRO 6000 Max-Q: NVIDIA's architecture whitepapers (GA102, Ada,
# RTX Blackwell, RTX
#     Blackwell PRO), with sums in fp32, as inference uses them.
#   - RTX PRO 6000 Server Edition: its product page, 1, 2 and 4 PFLOPS with sparsity, and its datasheet for the memory.
#   - T4: the appendix of the Turing whitepaper. GH200: its datasheet, for HBM3 and HBM3e.
#   - B200, GB200, B300 and GB300: the sheets of HGX B200, GB200 NVL72, HGX B300 and GB300 NVL72, divided by their GPUs;
# those of B300 omit the
#     multiprocessors in use. Rates at fp4 without sparsity are 72, 720, 108 and 1080 PFLOPS there.
#   - H800 and A800: the datasheets for China, which are those of H100 and A100 except the links.
#   - MI300A: its datasheet; the link is the sum of two links to each of three others (CDNA 3 white paper).
# - tables: no dense rate of the vendor's. A10G: the tables of serving simulators, which disagree with the datasheet.
# L20: NVIDIA publishes no
#   sheet of it; databases of GPUs agree on 48 GB, 864 GB/s, 92 multiprocessors and 59.4 TFLOPS at fp32. The rates are
# twice and four times
#   that, as in the sheet of the L40 and in the tables of xDiT and FLUX. GB10: NVIDIA's sheet of DGX Spark has the
# memory, 273 GB/s and
#   1 PFLOPS at fp4 with sparsity; the others follow from the ratio 4:2:1 of the RTX Blackwell PRO whitepaper, and
# measured rates lie below.
# - both: the datasheet and tables of serving simulators, which agree.
#
# The first of the rows that a name fits counts: the bare name means the SXM board, and for the A100 the one with 80 GB.
_TABLE = """\
H100-SXM             both    989.5    1979      -   80  3350   900  132  h100 / sxm5? hbm3 mega hgx dgx 80
H100-PCIe            both    756.5    1513      -   80  2000   600  114  h100 / pcie hbm2e 80
H100-NVL             sheet   835.5  1670.5      -   94  3900   600  132  h100 / nvl hbm3 94
H200-SXM             both    989.5    1979      -  141  4800   900  132  h200 / sxm5? hbm3e hgx dgx 141
H200-NVL             sheet   835.5  1670.5      -  141  4800   900  132  h200 / nvl pcie hbm3e 141
GH200-96GB           sheet     990    1979      -   96  4000   900  132  gh200 / gracehopper superchip hbm3 96 120 480
GH200-144GB          sheet     990    1979      -  144  4900   900  132  gh200 / gracehopper superchip hbm3e 144
H800-SXM             sheet   989.5    1979      -   80  3350   400  132  h800 / sxm5? hbm3 hgx 80
H800-PCIe            sheet   756.5    1513      -   80  2000   400  114  h800 / pcie hbm2e 80
H20                  sheet     148     296      -   96  4000   900   78  h20 / sxm5? hbm3 hgx 96
A100-80GB-SXM        both      312       -      -   80  2039   600  108  a100 / sxm4? hbm2e hgx dgx 80
A100-40GB-SXM        sheet     312       -      -   40  1555   600  108  a100 / sxm4? hbm2 hgx dgx 40
A100-80GB-PCIe       both      312       -      -   80  1935   600  108  a100 / pcie hbm2e 80
A100-40GB-PCIe       sheet     312       -      -   40  1555   600  108  a100 / pcie hbm2 40
A800-80GB-SXM        sheet     312       -      -   80  2039   400  108  a800 / sxm4? hbm2e hgx 80
A800-80GB-PCIe       sheet     312       -      -   80  1935   400  108  a800 / pcie hbm2e 80
A800-40GB-PCIe       sheet     312       -      -   40  1555   400  108  a800 / pcie active hbm2 40
A30                  sheet     165       -      -   24   933   200   56  a30 / pcie hbm2 24
A40                  sheet   149.7       -      -   48   696 112.5   84  a40 / pcie 48
A10                  sheet     125       -      -   24   600     -   72  a10 / pcie 24
A10G                 tables     70       -      -   24   600     -   80  a10g / pcie 24
T4                   sheet      65       -      -   16   320     -   40  t4 / pcie 16
L4                   both      121     242      -   24   300     -   58  l4 / pcie 24
L20                  tables  119.5     239      -   48   864     -   92  l20 / pcie 48
L40                  sheet     181     362      -   48   864     -  142  l40 / pcie 48
L40S                 both      362     733      -   48   864     -  142  l40s / pcie 48
RTX-3090             sheet    71.2       -      -   24   936 112.5   82  (?:rtx)?3090 / 24
RTX-4090             sheet   165.2   330.3      -   24  1008     -  128  (?:rtx)?4090 / 24
RTX-5090             sheet   209.5     419   1676   32  1792     -  170  (?:rtx)?5090 / 32
RTX-A6000            sheet   154.8       -      -   48   768 112.5   84  (?:rtx)?a6000 / 48
RTX-6000-Ada         sheet   364.2   728.5      -   48   960     -  142  (?:rtx)?6000ada / generation 48
RTX-PRO-6000         sheet   503.8  1007.6 2015.2   96  1792     -  188  (?:rtx)?pro6000 / blackwell workstation edition 96
RTX-PRO-6000-Server  sheet     500    1000   2000   96  1597     -  188  (?:rtx)?pro6000 / blackwell server edition se 96
RTX-PRO-6000-Max-Q   sheet   438.9   877.9 1755.7   96  1792     -  188  (?:rtx)?pro6000 / blackwell maxq workstation edition 96
V100-16GB-SXM2       sheet     125       -      -   16   900   300   80  v100 / sxm[23]? hbm2 16
V100-32GB-SXM2       sheet     125       -      -   32   900   300   80  v100 / sxm[23]? hbm2 dgxs 32
V100-16GB-PCIe       sheet     112       -      -   16   900     -   80  v100 / pcie hbm2 16
V100-32GB-PCIe       sheet     112       -      -   32   900     -   80  v100 / pcie hbm2 32
B200                 both     2250    4500   9000  180  8000  1800  148  b200 / sxm6? hbm3e hgx dgx blackwell 180 192
GB200                both     2500    5000  10000  186  8000  1800  148  gb200 / graceblackwell superchip nvl4 nvl72 hbm3e 186 192
B300                 sheet    2250    4500  13500  288  8000  1800    -  b300 / sxm6? ac hbm3e hgx dgx blackwell ultra 288 270
GB300                sheet    2500    5000  15000  288  8000  1800    -  gb300 / graceblackwell superchip ultra nvl72 hbm3e 288 279
GB10                 tables    125     250    500  128   273     -   48  (?:gb10|dgxspark) / graceblackwell superchip dgxspark 128
MI300X               sheet    1307    2615      -  192  5300   896  304  mi300x / oam vf hbm3 192
MI300A               sheet   980.6  1961.2      -  128  5300   768  228  mi300a / vf hbm3 128
MI325X               sheet    1307    2615      -  256  6000   896  304  mi325x / oam vf hbm3e 256
MI350X               sheet    2307    4614   9227  288  8000  1075  256  mi350x / oam vf hbm3e 288
MI355X               sheet    2517    5033  10066  288  8000  1075  256  mi355x / oam vf hbm3e 288
"""

# Drivers put the maker before the model, labels may have the shop: `NVIDIA H100 80GB HBM3`, `Tesla V100-SXM2-16GB`,
# `nvidia.com/gpu`.
_MAKERS = re.compile(r"^(?:nvidia(?:com)?|tesla|geforce|quadro|amd(?:com)?|instinct|radeon|corporation)+")

_AROUND = ("gpus?", "shared", "tensorcore", "accelerator", "vws", "nvidia", "amd")
"""Words beside the model that say nothing of it; time-slicing appends `-SHARED`."""

_SIGN_SPELLINGS = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "\N{REGISTERED SIGN}": "", "\N{TRADE MARK SIGN}": ""})


def _key(name: str) -> str:
    """Fold a GPU's name: letters and digits only, without maker (`NVIDIA A100-SXM4-80GB` → `a100sxm480gb`)."""
    return _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


class _Spelling(msgspec.Struct, frozen=True):
    """How the names of a GPU are made: the model, then any of some words and memory sizes in any order, as patterns
    over `_key`.

    A name with any other word is of another GPU: no name counts for a part of it.
    """

    gpu: Gpu
    model: str
    pattern: str
    """Compiled when a name is looked up, which few commands do."""


def _spelling(row: str) -> _Spelling:
    """Return the GPU of a row of the table, and its names."""
    facts, _, words = row.partition(" / ")
    name, source, *cells, model = facts.split()
    # As JSON: a whole number stays whole, as it is published.
    values = {k: json.loads(cell) for k, cell in zip(_VALUE_FIELDS, cells, strict=True) if cell != "-"}
    gpu = Gpu(name=name, **values, confidence="low" if source == "tables" else "high")
    beside = (rf"{word}(?:gi?b?)?" if word.isdigit() else word for word in (*words.split(), *_AROUND))
    return _Spelling(gpu, model, rf"(?:hgx|dgx|tensorcore)*{model}(?:{'|'.join(beside)})*")


_GPU_SPELLINGS = tuple(map(_spelling, _TABLE.splitlines()))

CATALOGUE: Mapping[str, Gpu] = {spelling.gpu.name: spelling.gpu for spelling in _GPU_SPELLINGS}
"""GPUs by name."""

_CLOUD_LABELS = {"nvidia-tesla-a100": "A100-40GB-SXM", "nvidia-rtx-pro-6000": "RTX-PRO-6000-Server"}
"""Labels of Google's Kubernetes, whose words alone mean another GPU."""

_VARIANT = re.compile(r"-(?=SXM|PCIe|NVL|\d+GB|Server|Max)")
_GPU_FAMILIES: dict[str, str] = {}
"""Model to the name of its first GPU."""
for _name in CATALOGUE:
    _GPU_FAMILIES.setdefault(_VARIANT.split(_name)[0], _name)


def _whole(name: str) -> Gpu | None:
    """Return the GPU of a name without a count or slice."""
    if label := _CLOUD_LABELS.get(name.strip().lower().removesuffix("-shared")):
        return CATALOGUE[label]
    key = _key(name)
    listed = (spelling.gpu for spelling in _GPU_SPELLINGS if _key(spelling.gpu.name) == key)
    fitting = (spelling.gpu for spelling in _GPU_SPELLINGS if re.fullmatch(spelling.pattern, key))
    return next(listed, None) or next(fitting, None)


# -- slices and counts -----------------------------------------------------------------------------------

_SLICE = re.compile(
    r"(?<![a-z0-9])(?:([12347])c\.)?([12347])g[._-](\d{1,3})gb(?:[+._-](?:me(?:\.all)?|gfx|all))*(?![a-z0-9])"
)
"""A MIG profile, such as `3g.40gb`, `1g.10gb+me` or `1c.3g.20gb`: its parts of the compute, and its memory."""

_MIG = re.compile(r"(?<![a-z0-9])mig(?![a-z0-9])")
_MIG_PARTS = {"A30": (4, 4), **{name: (4, 4) for name in CATALOGUE if name.startswith("RTX-PRO-6000")}}
_MOST_MIG_PARTS = (7, 8)
"""Parts of compute and of memory that MIG divides a GPU into (NVIDIA's MIG user guide)."""

_WITH_MIG = (
    "A100",
    "A800",
    "A30",
    "H100",
    "H800",
    "H200",
    "H20",
    "GH200",
    "B200",
    "GB200",
    "B300",
    "GB300",
    "RTX-PRO-6000",
)
_TOLERANCES = (0.4, 1.2)
"""Parts of memory by which the size in the name of a slice, or of the whole GPU as a slice, is off at most: it is
rounded, and leaves out reserved memory."""


def _sliced(gpu: Gpu, profile: re.Match[str]) -> Gpu | None:
    """Return a MIG slice as a GPU with its share of compute, memory and bandwidth; null if the GPU has no such
    slice.
    """
    instance, compute, memory_gb = (int(part) if part else None for part in profile.groups())
    most_compute, most_memory = _MIG_PARTS.get(gpu.name, _MOST_MIG_PARTS)
    if compute is None or memory_gb is None or compute > most_compute or not gpu.name.startswith(_WITH_MIG):
        return None
    parts = most_memory * memory_gb / gpu.memory_gb
    memory = most_memory if compute == most_compute else round(parts)
    if not 1 <= memory <= most_memory or abs(parts - memory) > _TOLERANCES[compute == most_compute]:
        return None
    # A compute instance has a part of its slice's compute, and all of its memory.
    share = (instance or compute) / most_compute
    rates = {key: getattr(gpu, key) for key in ("compute_tflops_fp16", "compute_tflops_fp8", "compute_tflops_fp4")}
    label = f"{instance}c." if instance else ""
    return replace(
        gpu,
        name=f"{gpu.name} MIG {label}{compute}g.{memory_gb}gb",
        **{key: rate * share for key, rate in rates.items() if rate is not None},
        memory_gb=memory_gb,
        memory_bandwidth_gb_s=gpu.memory_bandwidth_gb_s * memory / most_memory,
        # Slices have no link to one another, and the multiprocessors of a part differ from GPU to GPU.
        link_gb_s=None,
        sm_count=None,
    )


def _one(name: str) -> Gpu | None:
    """Return the GPU, or the slice of one, of a name without a count."""
    lower = name.lower()
    if not (profile := _SLICE.search(lower)):
        return _whole(name)
    whole = _whole(_MIG.sub(" ", f"{lower[: profile.start()]} {lower[profile.end() :]}"))
    return whole and _sliced(whole, profile)


_GPU_COUNTS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\s*(?P<n>\d{1,4})(?:\s*[x*]\s*|\s+)(?P<name>\S.*)",  # 8xH100, 8 x NVIDIA H100, 8 H100
        r"\s*x(?P<n>\d{1,4})\s+(?P<name>\S.*)",
        r"(?P<name>.*?\S)\s*[:*=]\s*(?P<n>\d{1,4})\s*",  # H100:8
        r"(?P<name>.*?[^\s(])[\s_(-]*x\s*(?P<n>\d{1,4})[\s)]*",  # H100 x8
        r"(?P<name>.*?[^\s(])[\s_(-]+(?P<n>\d{1,4})\s*(?:x|[\s_-]?gpus?)[\s)]*",  # H100 (8x), HGX H100 8-GPU
    )
)


class UnknownGpuError(UsageError):
    """A GPU that is not in the catalogue."""


def find_gpus(name: str) -> tuple[Gpu, int]:
    """Return a GPU of the catalogue by any of its names, and how many of them the name counts (`8xH100`: 8).

    Raises:
        UnknownGpuError: As `find_gpu`.
    """
    # Patterns take time, and no GPU has so long a name.
    written = name[:_MOST_NAME_CHARS].translate(_SIGN_SPELLINGS) if len(name) <= _MOST_NAME_CHARS else ""
    if gpu := _one(written):
        return gpu, 1
    for pattern in _GPU_COUNTS:
        if (found := pattern.fullmatch(written)) and int(found["n"]) > 0 and (gpu := _one(found["name"])):
            return gpu, int(found["n"])
    raise _unknown(name)


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue by its name, a common alias, the driver's name, or a cloud's label.

    Letter case, spaces and dashes do not matter; maker, form, memory and a count may surround the model: `H100`, `h100
    sxm`, `NVIDIA H100 80GB HBM3`, `nvidia-h100-mega-80gb`, `8xH100`. A MIG slice has its own memory and share of the
    rates.

    Raises:
        UnknownGpuError: No such GPU; the line names the closest and all models of the catalogue.
    """
    return find_gpus(name)[0]


def _unknown(name: str) -> UnknownGpuError:
    if _SLICE.search(name[:_MOST_NAME_CHARS].lower()):
        return UnknownGpuError(
            f"GPU {excerpt(name)!r} is not known",
            hint=(
                "a MIG slice is known by its GPU and its profile, such as H100-SXM MIG 1g.10gb; or give a JSON "
                "file that describes it"
            ),
        )
    # Cut: matching takes time with the square of the length.
    names = {_key(name): gpu for name, gpu in (*_GPU_FAMILIES.items(), *zip(CATALOGUE, CATALOGUE, strict=True))}
    close = difflib.get_close_matches(_key(name)[:_MAX_NAME_CHARS], names, n=_SUGGESTIONS, cutoff=0.6)
    meant = dict.fromkeys(names[key] for key in close)
    suggestion = f"did you mean {' or '.join(meant)}? " if meant else ""
    return UnknownGpuError(
        f"GPU {excerpt(name)!r} is not known",
        hint=f"{suggestion}known: {', '.join(_GPU_FAMILIES)}; or give a JSON file that describes it",
    )


def read_gpu(path: Path) -> Gpu:
    """Read a GPU of the user from a JSON file.

    The file holds one object with `memory_bandwidth_gb_s`, `compute_tflops_fp16`, `memory_gb` and `sm_count`
    and optionally `compute_tflops_fp8`, `compute_tflops_fp4`, `link_gb_s` and `name`; or a mapping of one name to such
    an object.

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
