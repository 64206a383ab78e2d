# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own context parallelism, ``torch.distributed.tensor.experimental.context_parallel``: it is a prototype."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from cp_kernel import PeerBase, Setting, State
from peers import Unfit, batched, tokens_first
from torch.distributed.device_mesh import init_device_mesh


class TorchContextParallel(PeerBase):
    """``scaled_dot_product_attention`` inside ``context_parallel``, with one of torch's kernels.

    Full and causal masks only. From making to ``close`` the function is torch's distributed one for the whole process.
    """

    uses_autograd = True

    def __init__(self, setting: Setting, kernel: str) -> None:
        if setting.case.name not in ("full", "causal"):
            raise Unfit("torch's context parallelism takes full and causal masks only.")
        if setting.device.type != "cuda":
            raise Unfit("torch's context parallelism has kernels for CUDA only.")
        if setting.case.seqlen % (2 * setting.world):
            raise Unfit(f"{setting.case.seqlen} tokens are no multiple of {2 * setting.world}.")
        try:
            from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel
        except ImportError as missing:
            raise Unfit(f"This torch has no context parallelism: {missing}.") from None
        from torch.nn.attention import SDPBackend

        self._sdpa_kernel = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[kernel]
        self._is_causal = setting.case.is_causal
        mesh = init_device_mesh(setting.device.type, (setting.world,))
        # A buffer of token numbers comes back cut to this rank's rows. Only causal masks may be balanced (zigzag).
        tokens = torch.arange(setting.case.seqlen, device=setting.device)[None]
        was_balanced = _cp_options.enable_load_balance
        _cp_options.enable_load_balance = self._is_causal
        with ExitStack() as stack:
            stack.callback(setattr, _cp_options, "enable_load_balance", was_balanced)
            stack.enter_context(context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]))
            super().__init__(setting, tokens[0].cpu().numpy().copy())
            self._stack = stack.pop_all()

    def forward(self, q, k, v) -> State:
        from torch.nn.attention import sdpa_kernel

        q_BHTD, k_BHTD, v_BHTD = map(batched, (q, k, v))
        with sdpa_kernel(self._sdpa_kernel):
            # Looked up at each call: entering context_parallel replaced it.
            out = F.scaled_dot_product_attention(
                q_BHTD, k_BHTD, v_BHTD, is_causal=self._is_causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return State(tokens_first(out))

    def kernel_calls(self, dout, q, k, v) -> None:
        """torch's kernels are called inside torch."""
        return None

    def close(self) -> None:
        self._stack.close()
