# SPDX-License-Identifier: Apache-2.0
"""Two steps of one rank on one GPU, made by hand in the form that torch's profiler exports.

Times are microseconds. The host launches; the GPU follows. Stream 7 computes, stream 20 is NCCL's, 24 copies.
"""

from __future__ import annotations

HOST = {"pid": 4242, "tid": 4242}

# (name, category, launched at, begins, ends, stream); inside the ranges of attention where it says so
WORK = [
    ("void at::native::vectorized_elementwise_kernel<4>", "kernel", 40, 45, 60, 7),  # before the first step
    ("nvjet_tst_128x256", "kernel", 110, 120, 200, 7),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "kernel", 152, 180, 260, 20),  # attention forward
    ("void magi_ffa_sm90::ffa_fwd<Config>(FwdKernelParams)", "kernel", 160, 205, 300, 7),  # attention forward
    ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 210, 310, 320, 24),
    ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 215, 315, 330, 24),
    ("void magi_symm::symm_put(magi_symm_put_params)", "kernel", 305, 330, 350, 20),  # attention backward
    ("void magi_ffa_sm90::ffa_bwd<Config>(BwdKernelParams)", "kernel", 310, 340, 500, 7),  # attention backward
    ("Memset (Device)", "gpu_memset", 320, 500, 504, 7),
    ("void magi_symm::make_symm_put_params()", "kernel", 420, 520, 530, 7),  # a name that only looks like one
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 590, 560, 640, 20),  # ends behind the last step
    ("nvjet_tst_64x64", "kernel", 700, 705, 720, 7),  # behind the steps
]
RANGES = [
    ("ProfilerStep#3", 100, 350), ("ProfilerStep#4", 350, 600),
    ("magi::attention_forward", 150, 170), ("magi::attention_backward", 300, 315),
]  # fmt: skip


def trace() -> dict:
    events: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "ts": 0, "args": {"name": "python"}}
    ]
    for number, (name, start, end) in enumerate(RANGES):
        args = {"External id": number, "Ev Idx": number}
        times = {"ts": start, "dur": end - start}
        events.append({"ph": "X", "cat": "user_annotation", "name": name, **HOST, **times, "args": args})
        # The GPU's view of a range is no work.
        events.append(
            {"ph": "X", "cat": "gpu_user_annotation", "name": name, "pid": 0, "tid": 7, **times, "args": args}
        )
    for number, (name, cat, launched, begin, end, stream) in enumerate(WORK, 900):
        call = "cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync" if "cpy" in cat else "cudaMemsetAsync"
        kind = "cuda_driver" if number % 2 else "cuda_runtime"
        events.append(
            {"ph": "X", "cat": kind, "name": call, **HOST, "ts": launched, "dur": 4,
             "args": {"External id": number, "cbid": 211, "correlation": number}}
        )  # fmt: skip
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": end - begin,
             "args": {"External id": number, "device": 0, "context": 1, "stream": stream, "correlation": number}}
        )  # fmt: skip
        flow = {"cat": "ac2g", "name": "ac2g", "id": number}
        events.append({"ph": "s", **flow, **HOST, "ts": launched})
        events.append({"ph": "f", "bp": "e", **flow, "pid": 0, "tid": stream, "ts": begin})
    plan = {"calls": 1, "share": 0.5, "compute_s": 8e-5, "communication_s": 6e-5, "exposed_s": 1e-5}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2},
        "displayTimeUnit": "ms",
        "magi": {"rank": 1, "world": 2, "device": "NVIDIA H100 80GB HBM3", "predicted": [plan]},
        "traceEvents": events,
    }
