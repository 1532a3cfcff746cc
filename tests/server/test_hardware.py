"""The GPU catalogue and a user's own GPU."""

from __future__ import annotations

import json
import math

import pytest

from tracefit.errors import UsageError
from tracefit.server.hardware import CATALOGUE, find_gpu, parse_gpu, read_gpu

OWN = {"memory_bandwidth_gb_s": 1000, "compute_tflops_fp16": 100, "memory_gb": 32, "sm_count": 60}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("H100-SXM", "H100-SXM"),
        ("H100_SXM5_80GB", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200-SXM"),
        ("A100", "A100-80GB-SXM"),
        ("A100-80GB", "A100-80GB-SXM"),
        ("A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA L4", "L4"),
        ("l40s", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM2"),
        ("Tesla V100-SXM2-32GB", "V100-32GB-SXM2"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx 5090", "RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI350X", "MI350X"),
        ("mi355x", "MI355X"),
        ("mi325x", "MI325X"),
    ],
)
def test_a_gpu_has_several_names(written, name):
    assert find_gpu(written).name == name


@pytest.mark.parametrize("written", ["H100", "A100-80GB", "L4"])
def test_case_spaces_and_dashes_do_not_matter(written):
    spellings = (written.lower(), written.replace("-", " "), written.replace("-", "_"), f"NVIDIA {written}")

    assert {find_gpu(spelling).name for spelling in spellings} == {find_gpu(written).name}


# From vendors' datasheets: TFLOPS at fp16 and fp8, memory in GB and GB/s, link in GB/s, multiprocessors.
VALUES = {
    "H100-SXM": (989.5, 1979, 80, 3350, 900, 132),
    "H100-PCIe": (756.5, 1513, 80, 2000, 600, 114),
    "H100-NVL": (835.5, 1670.5, 94, 3900, 600, 132),
    "H200-SXM": (989.5, 1979, 141, 4800, 900, 132),
    "A100-40GB-SXM": (312, None, 40, 1555, 600, 108),
    "A100-80GB-SXM": (312, None, 80, 2039, 600, 108),
    "A100-80GB-PCIe": (312, None, 80, 1935, 600, 108),
    "L4": (121, 242, 24, 300, None, 58),
    "L40S": (362, 733, 48, 864, None, 142),
    "A10G": (70, None, 24, 600, None, 80),
    "V100-16GB-SXM2": (125, None, 16, 900, 300, 80),
    "V100-32GB-SXM2": (125, None, 32, 900, 300, 80),
    "B200": (2250, 4500, 180, 8000, 1800, 148),
    "GB200": (2500, 5000, 186, 8000, 1800, 148),
    "B300": (2250, 4500, 288, 8000, 1800, None),  # HGX B300, 8 GPUs: 36 and 72 PFLOPS with sparsity
    "GB300": (2500, 5000, 288, 8000, 1800, None),  # GB300 NVL72, 72 GPUs: 360 and 720 PFLOPS with sparsity
    "H20": (148, 296, 96, 4000, 900, 78),
    "RTX-4090": (165.2, 330.3, 24, 1008, None, 128),
    "RTX-5090": (209.5, 419, 32, 1792, None, 170),
    "RTX-PRO-6000": (503.8, 1007.6, 96, 1792, None, 188),
    "MI300X": (1307, 2615, 192, 5300, 896, 304),
    "MI325X": (1307, 2615, 256, 6000, 896, 304),
    "MI350X": (2307, 4614, 288, 8000, 1075, 256),  # 7 links of 153.6 GB/s
    "MI355X": (2517, 5033, 288, 8000, 1075, 256),
}


def test_catalogue_values():
    keys = (
        "compute_tflops_fp16",
        "compute_tflops_fp8",
        "memory_gb",
        "memory_bandwidth_gb_s",
        "link_gb_s",
        "sm_count",
    )
    for gpu in CATALOGUE.values():
        stated = {key: getattr(gpu, key) for key in keys}
        assert tuple(stated.values()) == VALUES[gpu.name]
        assert gpu.confidence == ("low" if gpu.name == "A10G" else "high")
    assert set(CATALOGUE) == set(VALUES)


def test_derived_values():
    h100, a100 = find_gpu("H100"), find_gpu("A100")

    assert h100.compute_to_bandwidth == pytest.approx(989.5e12 / 3350e9)
    assert h100.relative_performance == 1.0
    assert a100.relative_performance == pytest.approx(math.sqrt(312 / 989.5 * 2039 / 3350))
    assert h100.slug == "h100-sxm"


def test_facts_are_scalars():
    facts = find_gpu("L4").facts()

    assert facts["gpu"] == "L4"
    assert facts["link_gb_s"] is None
    assert all(value is None or isinstance(value, str | int | float) for value in facts.values())


def test_an_unknown_gpu_suggests_the_closest_and_lists_all():
    with pytest.raises(
        UsageError, match=r"GPU 'H10O' is not known; did you mean H100.*known: .*MI325X"
    ) as caught:
        find_gpu("H10O")

    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "   ", "TPU v5e", "NVIDIA", "x" * 10_000, "\x00\n"])
def test_any_unknown_name_is_one_short_line(name):
    with pytest.raises(UsageError, match="is not known") as caught:
        find_gpu(name)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


# -- a user's own ----------------------------------------------------------------------------------------


def test_gpu_file_with_a_single_object(tmp_path):
    path = tmp_path / "my-gpu.json"
    path.write_text(json.dumps({**OWN, "link_gb_s": 64, "compute_tflops_fp8": 200}))
    gpu = read_gpu(path)

    assert (gpu.name, gpu.compute_tflops_fp16, gpu.memory_gb, gpu.sm_count) == ("my-gpu", 100.0, 32.0, 60)
    assert (gpu.link_gb_s, gpu.compute_tflops_fp8, gpu.confidence) == (64.0, 200.0, "given")


def test_a_gpu_file_may_describe_a_small_gpu():
    assert parse_gpu(json.dumps({**OWN, "memory_gb": 0.5, "sm_count": 1}), where="x").memory_gb == 0.5


def test_gpu_file_may_have_a_name():
    assert parse_gpu(json.dumps({**OWN, "name": "Mine"}), where="x").name == "Mine"


def test_gpu_file_that_maps_a_name():
    assert parse_gpu(json.dumps({"H100": OWN}), where="x").name == "H100"
    with pytest.raises(UsageError, match="describes several GPUs; keep one of H100, A100"):
        parse_gpu(json.dumps({"H100": OWN, "A100": OWN}), where="x")


def test_gpu_is_restored_from_its_facts():
    gpu = find_gpu("H100")
    again = parse_gpu(json.dumps({"name": gpu.name, **gpu.facts()}), where="x")

    assert {**again.facts(), "gpu_confidence": "high"} == gpu.facts()


@pytest.mark.parametrize("key", ["memory_bandwidth_gb_s", "compute_tflops_fp16", "memory_gb"])
def test_missing_value_is_named(key):
    with pytest.raises(UsageError, match=rf"gpu\.json: {key} is missing; keys: "):
        parse_gpu(json.dumps({name: value for name, value in OWN.items() if name != key}), where="gpu.json")


def test_a_misspelled_value_is_named_with_the_missing_one():
    own = {**OWN, "memory_bandwith_gb_s": OWN["memory_bandwidth_gb_s"]}
    del own["memory_bandwidth_gb_s"]
    with pytest.raises(
        UsageError, match="memory_bandwidth_gb_s is missing; the file has memory_bandwith_gb_s; keys: compute"
    ):
        parse_gpu(json.dumps(own), where="gpu.json")


@pytest.mark.parametrize("key", [*OWN, "link_gb_s", "compute_tflops_fp8"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300, 10**400, "fast", True, [1]])
def test_value_that_cannot_be_is_refused(key, value):
    with pytest.raises(UsageError, match=rf"gpu\.json: {key} must be (a |greater |less )") as caught:
        parse_gpu(json.dumps({**OWN, key: value}), where="gpu.json")

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list"),
        ("{}", "describes no GPU"),
        ('{"H100": 3}', "H100 is a number, not an object"),
        ('{"H100": {}}', "compute_tflops_fp16 is missing"),
        ("nonsense", "is not JSON"),
    ],
)
def test_file_that_is_no_gpu_is_one_line(text, message):
    with pytest.raises(UsageError, match=message):
        parse_gpu(text, where="gpu.json")
