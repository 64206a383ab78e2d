// SPDX-License-Identifier: Apache-2.0
// Addresses and strides of q, k and v, for kernels that read them without tensor maps.
#pragma once

namespace magi {

template <typename Params, typename KernelParams>
void qkv_operands(const Params& a, KernelParams* k) {
  k->q = a.q;
  k->k = a.k;
  k->v = a.v;
  k->q_stride_token = a.q_stride_token;
  k->q_stride_head = a.q_stride_head;
  k->k_stride_token = a.k_stride_token;
  k->k_stride_head = a.k_stride_head;
  k->v_stride_token = a.v_stride_token;
  k->v_stride_head = a.v_stride_head;
}

}  // namespace magi
