# SPDX-License-Identifier: Apache-2.0
"""Implementations that the kernel benchmark runs: ours, and what is installed beside it.

Each takes (q (T, Hq, D), k (T, Hk, D), v (T, Hk, Dv), case) and gives a function of no arguments whose result is
out (T, Hq, Dv). Preparation (block masks, layouts, compilation) happens before and is not timed, as a training
run does it once per mask. ``Unfit`` says why an implementation cannot run a case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import numpy as np
import torch
from masks import SHARED_KEYS, Case

from magi_attention.kernels import AttnOptions, Problem
from magi_attention.kernels.cudnn_flex.endpoints import key_endpoints
from magi_attention.kernels.registry import default_registry
from magi_attention.kernels.types import Operands

Run = Callable[[], torch.Tensor]
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Case], Run]


class Unfit(Exception):
    """This implementation cannot run this case; the text says why."""


# Backends of ours that call a published wheel, as ``attend`` calls them. Without magi_ it is the function of the wheel.
OUR_WHEELS = ("magi_fa4", "magi_cudnn_flex")


def our_backend(name: str = "ffa"):
    """A backend of ours, by default that of our CUDA kernels."""
    return next(b for b in default_registry().backends if b.name == name)


def forward_of(backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
    """``forward_final`` of a backend."""
    options, slices = AttnOptions(q.shape[2] ** -0.5), case.mask.slices
    return lambda: backend.forward_final(Operands(q, k, v, slices, options))[0]


def _ours_host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
    """The kernel with the mask known on the host, as ``attend`` and ``calc_attn`` call it."""
    return forward_of(our_backend(), q, k, v, case)


def our_wheel(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """The backend of ours that calls a wheel, one of ``OUR_WHEELS``; ``Unfit`` where it cannot run."""
    backend = our_backend(name.removeprefix("magi_"))
    reason = backend.why_not(Problem.of(q, k, v, AttnOptions(q.shape[2] ** -0.5), needs_backward=True))
    if reason is not None:
        raise Unfit(reason)
    return backend


def _our_wheel(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
    """The kernels of a wheel as ``attend`` and ``calc_attn`` call them."""
    return forward_of(our_wheel(name, q, k, v), q, k, v, case)


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
    """The public function, with ranges on the GPU."""
    from magi_attention.functional import flex_flash_attn_func

    ranges = case.mask.slices.tensors(q.device)
    return lambda: flex_flash_attn_func(q, k, v, *ranges)[0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
    """The public function that takes a plan, here of one rank."""
    from magi_attention.api import attend, make_plan

    plan = make_plan(case.mask, 1)
    return lambda: attend(q, k, v, plan)[0]


def batched(x_THD: torch.Tensor) -> torch.Tensor:
    """(1, H, T, D) view."""
    return x_THD.unsqueeze(0).transpose(1, 2)


def tokens_first(x_BHTD: torch.Tensor) -> torch.Tensor:
    """(T, H, D) view of one sequence. No indexing: the gradient of ``x[0]`` fills and copies a tensor of x's size."""
    return x_BHTD.squeeze(0).transpose(0, 1)


def _sdpa(backend: str) -> Make:
    """torch's own attention by one of its kernels: "CUDNN_ATTENTION", or "FLASH_ATTENTION", which is
    FlashAttention-2."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as attend

        if case.name not in ("full", "causal"):
            raise Unfit("torch calls these kernels for full and causal masks only.")
        q_BHTD, k_BHTD, v_BHTD = map(batched, (q, k, v))

        def run() -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = attend(q_BHTD, k_BHTD, v_BHTD, is_causal=case.is_causal, enable_gqa=True)
            return tokens_first(out)

        return run

    return make


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Compiled per shape: dynamic shapes would be unfair to it.
    compiled = torch.compile(flex_attention, dynamic=False)
    predicate = case.predicate(lambda a: torch.from_numpy(a).to(q.device))
    block_mask = None
    if predicate is not None:
        block_mask = torch.compile(create_block_mask)(
            predicate, None, None, case.seqlen, case.seqlen, device=q.device.type
        )
    q_BHTD, k_BHTD, v_BHTD = map(batched, (q, k, v))

    def run() -> torch.Tensor:
        out = compiled(q_BHTD, k_BHTD, v_BHTD, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return tokens_first(out)

    run()
    return run


def _flash_attention(fixed: Callable, varlen: Callable) -> Make:
    """FlashAttention 2, 3 and 4 have the same two functions."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
        if case.name == "varlen_block_causal":
            raise Unfit("FlashAttention has no block-causal mask.")
        if case.name == SHARED_KEYS:
            raise Unfit("FlashAttention has no mask of documents and queries that see all of them.")
        first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
        if case.is_varlen:
            cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=q.device)
            longest = max(case.documents)
            return lambda: first(
                varlen(
                    q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
                    causal=case.is_causal,
                )
            )  # fmt: skip
        extra = {} if case.window is None else {"window_size": (case.window - 1, 0)}
        q_BTHD, k_BTHD, v_BTHD = q[None], k[None], v[None]
        return lambda: first(fixed(q_BTHD, k_BTHD, v_BTHD, causal=case.is_causal, **extra)).squeeze(0)

    return make


def _cudnn_flex(is_thd: bool) -> Make:
    """``cudnn.flex_attention``. It takes masks with documents in two forms: ``is_thd``, as sequences of their own with
    ``cu_seqlens``, or as one sequence (BSHD). Other masks have the second form only."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> Run:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        dims = (q.shape[2], v.shape[2])
        if is_thd and not case.is_varlen:
            raise Unfit("The mask has no documents, so BSHD is its only form.")
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise Unfit(f"cudnn.flex_attention takes float16 and bfloat16, not {q.dtype}.")
        if dims not in ((192, 128), (256, 256)) and any(d % 8 or not 8 <= d <= 128 for d in dims):
            raise Unfit(f"cudnn.flex_attention has no kernels for head dims {dims} of q and v.")
        slices, documents, first_key = case.mask.slices.array, {}, None
        if is_thd:
            cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=q.device)
            longest = max(case.documents)
            documents = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
            first_key = np.repeat(case.cu_seqlens[:-1], case.documents)
        endpoints = torch.from_numpy(key_endpoints(slices, case.seqlen, first_key)).to(q.device)
        tensors = (q, k, v) if is_thd else (q[None], k[None], v[None])
        has_backward = any(x.requires_grad for x in tensors)
        try:
            plan = create_mask_plan(endpoints, *tensors, build_backward=has_backward, **documents)
        except NotImplementedError as refusal:  # what it says of GPUs that it has no kernels for
            raise Unfit(str(refusal)) from refusal
        if is_thd:
            return lambda: flex_attn_func(q, k, v, mask_plan=plan)
        return lambda: flex_attn_func(*tensors, mask_plan=plan).squeeze(0)

    return make


@dataclass(frozen=True)
class Origin:
    """What an implementation is called, and how it is had where ``module`` is not there. Without ``install`` it comes
    with torch."""

    label: str
    module: str = ""
    install: str = ""


# In the order in which they are shown.
PEERS = {
    "cudnn": Origin("cuDNN of torch"),
    "fa2": Origin("FlashAttention-2 of torch"),
    "fa2_wheel": Origin("FlashAttention-2", "flash_attn.flash_attn_interface", "pip install flash-attn"),
    "flex": Origin("FlexAttention of torch"),
    "fa3": Origin(
        "FlashAttention-3", "flash_attn_interface",
        'pip install "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"',
    ),
    "fa4": Origin("FlashAttention-4", "flash_attn.cute", 'pip install --pre "flash-attn-4[cu13]"'),
    "cudnn_flex": Origin(
        "cudnn.flex_attention", "cudnn.flex_attention", 'pip install "nvidia-cudnn-frontend[cutedsl]"'
    ),
    "cudnn_flex_thd": Origin("cudnn.flex_attention, documents as sequences", "cudnn.flex_attention"),
}  # fmt: skip
# Only over several ranks. The last one has no call here: no release has it, so there is nothing stable to call.
CP_PEERS = {
    "torch_cudnn": Origin("context parallelism of torch, cuDNN"),
    "selective_gather": Origin(
        "selective gather of torchtitan",
        install="no release has it; magi_a2av_0, which gathers the needed rows alone, does the same",
    ),
}


def missing(peers: Mapping[str, Origin]) -> dict[str, str]:
    """Label of each peer that is not installed -> how it is had."""
    return {p.label: p.install for p in peers.values() if p.install and not (p.module and _has(p.module))}


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Distributions whose versions say which public kernels were timed.
_DISTRIBUTIONS = ("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl")


def installed_peers() -> dict[str, str]:
    """Versions of the peers that do not come with torch, of those that are installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def available(no_peers: bool = False) -> dict[str, Make]:
    """Implementations by name, ours first. Nothing of a peer is imported unless it is there; ``PEERS`` says how it is
    had. cudnn.flex_attention has two names, one for each form of documents."""
    found: dict[str, Make] = {"magi": _ours, "magi_host": _ours_host, "magi_attend": _attend}
    if no_peers:
        return found
    found["cudnn"] = _sdpa("CUDNN_ATTENTION")
    found["fa2"] = _sdpa("FLASH_ATTENTION")
    found["flex"] = _flex
    if _has("flash_attn.flash_attn_interface"):
        import flash_attn as fa2

        found["fa2_wheel"] = _flash_attention(fa2.flash_attn_func, fa2.flash_attn_varlen_func)
    if _has("flash_attn_interface"):
        import flash_attn_interface as fa3

        found["fa3"] = _flash_attention(fa3.flash_attn_func, fa3.flash_attn_varlen_func)
    if _has("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        found["fa4"] = _flash_attention(flash_attn_func, flash_attn_varlen_func)
        found["magi_fa4"] = partial(_our_wheel, "magi_fa4")
    if _has("cudnn.flex_attention"):
        found["cudnn_flex"] = _cudnn_flex(is_thd=False)
        found["cudnn_flex_thd"] = _cudnn_flex(is_thd=True)
        found["magi_cudnn_flex"] = partial(_our_wheel, "magi_cudnn_flex")
    return found
