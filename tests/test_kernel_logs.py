"""Logs of collectives and profilers as kernels, and as the time of a step: small samples in their formats."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from breakeven.models import operators
from breakeven.models.inputs import InputError
from breakeven.studies.kernel_fit import fit_kernels, kernels_file
from breakeven.studies.kernel_logs import device_id, is_log, log_tables, step_s
from breakeven.studies.kernels import is_kernel_table, read_kernels
from breakeven.studies.observations import read_observations_csv

CURVE = {"share": 0.7, "latency_s": 1e-5, "half_bytes": 1e6, "per_rank": 0.1}


def nccl_tests(size_bytes: np.ndarray, us: np.ndarray, program: str = "all_gather_perf", ranks: int = 8) -> str:
    """What nccl-tests prints on `ranks` H100."""
    head = [
        f"# Collective test starting: {program}",
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor)",
    ]
    head += [
        f"#  Rank {i:2d} Group  0 Pid  {77 + i} on   host device {i:2d} [0x{i:02x}] NVIDIA H100 80GB HBM3"
        for i in range(ranks)
    ]
    head += [
        "#                                              out-of-place                       in-place",
        "#     size    count     type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
        "#        (B)    (elements)                          (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    lines = [
        f"{s:12.0f} {s / 2:12.0f}   half    none      -1 {t:8.3f}    1.00    1.00      0 {t:8.3f}    1.00    1.00  N/A"
        for s, t in zip(size_bytes, us, strict=True)
    ]
    return "\n".join([*head, *lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", ""])


def trace() -> dict:
    """A trace of two steps on one device: a product of [64, 4096] x [4096, 8192], an all-reduce, another kernel."""
    product = {"cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 5.0}
    product["args"] = {
        "External id": 7,
        "Input Dims": [[64, 4096], [4096, 8192]],
        "Input type": ["c10::BFloat16", "c10::BFloat16"],
    }
    kernel = {"cat": "kernel", "name": "nvjet_tst", "dur": 30.0, "args": {"External id": 7, "device": 0}}
    reduce = {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "dur": 50.0}
    reduce["args"] = {
        "External id": 8,
        "device": 0,
        "Collective name": "allreduce",
        "In msg nelems": 524288,
        "Out msg nelems": 524288,
        "Group size": 4,
        "dtype": "BFloat16",
    }
    other = {"cat": "kernel", "name": "rms_norm", "dur": 20.0, "args": {"External id": 9, "device": 0}}
    steps = [{"cat": "user_annotation", "name": f"ProfilerStep#{i}", "dur": 60.0} for i in (3, 4)]
    devices = [{"id": 0, "name": "NVIDIA B200", "totalGlobalMem": 1}]
    return {"schemaVersion": 1, "deviceProperties": devices, "traceEvents": [product, kernel, reduce, other, *steps]}


def test_nccl_tests_are_a_curve_of_the_collective(tmp_path: Path) -> None:
    """Times that follow a curve give it back; the file of curves keeps all others."""
    size = 2.0 ** np.arange(12, 28)
    seconds = operators.collective_latency_s(CURVE, 8.0)
    seconds = seconds + sum(operators.exchange_s(CURVE, size * 7.0 / 8.0, 450e9))
    path = tmp_path / "gather.txt"
    path.write_text(nccl_tests(size, 1e6 * np.asarray(seconds)))
    assert is_log(path) and is_kernel_table(path)
    samples, left = read_kernels([path])
    (found,) = fit_kernels(samples)
    assert (found.samples.name, found.samples.generation, left) == ("gather", "hopper", {})
    assert found.summary()["worst_decile"] < 0.02
    text = kernels_file([found])
    assert text.count("[hopper.gather]") == 1 and "[blackwell.gemm_fp4]" in text and "[inherits]" in text
    assert 'kernel = "nccl on h100-sxm"' in text


def test_the_program_names_the_collective_or_the_file_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.log"
    path.write_text(nccl_tests(np.array([1e6]), np.array([20.0]), "some_perf"))
    with pytest.raises(InputError, match="name of its program"):
        log_tables(path)
    named = tmp_path / "reduce_scatter.log"
    named.write_text(path.read_text())
    (table,) = log_tables(named)
    assert table["op_name"].tolist() == ["reduce_scatter"] and table["message_size"].tolist() == [5e5]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_has_products_and_collectives_with_their_sizes(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / ("t.json.gz" if zipped else "t.json")
    text = json.dumps(trace())
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    product, collective = (table.iloc[0].to_dict() for table in log_tables(path))
    assert (product["m"], product["n"], product["k"], product["dtype"]) == (64, 8192, 4096, "bfloat16")
    assert product["latency_ms"] == pytest.approx(0.030) and product["system"] == "b200-sxm"
    assert (collective["op_name"], collective["num_gpus"], collective["message_size"]) == ("all_reduce", 4, 524288)
    samples, _ = read_kernels([path])
    assert sorted(s.name for s in samples) == ["allreduce", "gemm_bf16"]
    assert step_s(path, None, None) == pytest.approx(100e-6 / 2)


def test_a_trace_without_shapes_is_one_line(tmp_path: Path) -> None:
    data = trace()
    data["traceEvents"] = data["traceEvents"][3:]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="products with their input shapes"):
        read_kernels([path])


def test_a_kernel_summary_gives_the_time_of_a_step(tmp_path: Path) -> None:
    """1.2 s of kernels on four accelerators in 30 steps are 10 ms a step; what was measured must be left blank."""
    (tmp_path / "kernels.csv").write_text(
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
        "75.0,900000000,9600,93750.0,93000,90000,99000,1000.0,nvjet_tst_64x8\n"
        '25.0,300000000,9600,31250.0,31000,30000,39000,1000.0,"void rms_norm<float, int>(float*)"\n'
    )
    table = tmp_path / "mine.csv"
    head = "concurrency,input_tokens,output_tokens,tpot_ms,profile,profile_steps,profile_ranks\n"
    table.write_text(head + "16,1000,500,,kernels.csv,30,4\n")
    (seen,) = read_observations_csv(table)
    assert seen.tpot_ms == pytest.approx(10.0) and np.isnan(seen.ttft_ms)
    table.write_text(head + "16,1000,500,9.0,kernels.csv,30,4\n")
    with pytest.raises(InputError, match=r"row 2.tpot_ms = 9.0: nothing where a profile is given"):
        read_observations_csv(table)
    table.write_text(head + "16,1000,500,,kernels.csv,,4\n")
    with pytest.raises(InputError, match="how many decode steps"):
        read_observations_csv(table)


def test_devices_have_names_of_their_own() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GB200", "NVIDIA A100-SXM4-80GB", "Acme X")
    assert [device_id(name) for name in names] == ["h100-sxm", "h100-pcie", "gb200-nvl72", "a100-sxm-80gb", "Acme X"]
