# SPDX-License-Identifier: Apache-2.0
"""A source tree of the native libraries that compiles in seconds and computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from magi_attention.errors import BuildError
from magi_attention.native import abi

ROOT = Path(__file__).resolve().parents[2]
HOST_SOURCE = """
#include "magi/schedule.h"
#include <cstdio>
static int hidden_helper() { return 3; }
extern "C" {
int64_t magi_tile_plan_words(int32_t, int32_t, int64_t) { return hidden_helper(); }
magi_status magi_tile_plan_host(const int32_t*, int64_t, int32_t, int32_t, int32_t, int32_t, int32_t*, int64_t,
                                int64_t*) { return MAGI_CAPACITY; }
magi_status magi_tile_plan_check(const int32_t*, int64_t, const int32_t*, int64_t) { return MAGI_OK; }
magi_status magi_tile_transpose_host(const int32_t*, int64_t, int32_t*) { return MAGI_OK; }
magi_status magi_tile_strips_host(const int32_t*, int64_t, int32_t, int32_t*, int64_t*) { return MAGI_OK; }
magi_status magi_vertex_cover(int32_t, int32_t, const int64_t*, const int64_t*, int64_t, const int32_t*,
                              const int32_t*, uint8_t*, uint8_t*) { return MAGI_OK; }
magi_status magi_balance_pairs(const magi_pairs*, int64_t, int64_t, int64_t*) { return MAGI_OK; }
magi_status magi_improve_pairs(const magi_pairs*, int64_t, int64_t*) { return MAGI_OK; }
magi_status magi_schedule(const int32_t*, int64_t, const magi_schedule_problem*, magi_schedule_choice*, const double*,
                          int32_t*, int64_t, int64_t*) { return MAGI_OK; }
int64_t magi_schedule_room(const int32_t*, int64_t, const magi_schedule_problem*) { return 0; }
magi_status magi_schedule_check(const int32_t*, int64_t, int64_t, int32_t, int32_t) { return MAGI_OK; }
magi_status magi_waits_check(const magi_waits*) { return MAGI_OK; }
const char* magi_last_error(void) { return "too small"; }
int32_t magi_abi_version(void) { return VERSION; }
int not_exported(void) { return 1; }
}
"""
KERNEL_SOURCE = """
#include "magi/symm.h"
__global__ void fill(float* x, int n) { int i = blockIdx.x * 256 + threadIdx.x; if (i < n) x[i] = SCALE; }
namespace magi {
struct bf16 {}; struct fp16 {};
template <typename T, int D, int DV> magi_status launch_variant(const magi_ffa_fwd_params&);
template <typename T, int D, int DV> magi_status launch_variant(const magi_ffa_bwd_params&);
}
#define MAGI_VARIANT(KIND, TYPE, D, DV) \\
  if (kind == (#KIND[0] == 'b') && dtype == (#TYPE[0] == 'f') && d <= D && dv <= DV) return 1;
extern "C" int32_t magi_ffa_has_variant(int32_t kind, int32_t dtype, int32_t d, int32_t dv) {
#include "inst/variants.inc"
  return 0; }
#undef MAGI_VARIANT
extern "C" {
magi_status magi_ffa_fwd_tile(int32_t, int32_t, int32_t, int32_t, int32_t, int32_t* t, int32_t* g, int32_t* p) {
  *t = *g = *p = 2; return MAGI_OK; }
magi_status magi_ffa_fwd_workspace(const magi_ffa_fwd_params*, int64_t* bytes) { *bytes = 16; return MAGI_OK; }
magi_status magi_ffa_bwd_tile(int32_t, int32_t, int32_t* t, int32_t* g) { *t = *g = 2; return MAGI_OK; }
magi_status magi_ffa_bwd_workspace(const magi_ffa_bwd_params*, int64_t* bytes) { *bytes = 32; return MAGI_OK; }
}
template <class A> magi_status call(magi_status (*f)(const A&), const A* p) { return f(*p); }
template <class A, class B> magi_status call(magi_status (*)(const A&), const B*) { return MAGI_CAPACITY; }
#define MAGI_VARIANT(KIND, TYPE, D, DV) call<magi_ffa_##KIND##_params>(magi::launch_variant<magi::TYPE, D, DV>, p),
template <class P> magi_status first(const P* p) {
  for (magi_status s : {
#include "inst/variants.inc"
  }) if (s != MAGI_CAPACITY) return s;
  return MAGI_INVALID_ARGUMENT; }
extern "C" {
magi_status magi_ffa_fwd(const magi_ffa_fwd_params* p) { return first(p); }
magi_status magi_ffa_bwd(const magi_ffa_bwd_params* p) { return first(p); }
magi_status magi_ffa_fwd_remote(const magi_ffa_fwd_params* p, const magi_ffa_remote*, const magi_symm_put_params*,
                                void*) { return first(p); }
magi_status magi_ffa_bwd_remote(const magi_ffa_bwd_params* p, const magi_ffa_remote*, const magi_symm_put_params*) {
  return first(p); }
int64_t magi_symm_control_bytes(int32_t) { return 1024; }
magi_status magi_symm_put(const magi_symm_put_params*) { return MAGI_OK; }
magi_status magi_symm_unpack(const magi_symm_unpack_params*) { return MAGI_OK; }
magi_status magi_symm_recv_reduce(const magi_symm_recv_reduce_params*) { return MAGI_OK; }
magi_status magi_symm_reduce(const magi_symm_reduce_params*) { return MAGI_OK; }
magi_status magi_tile_transpose_device(const int32_t*, const int32_t*, const int32_t*, int32_t, int32_t, int32_t,
                                       int32_t*, int32_t*, int32_t*, void*) { return MAGI_OK; }
magi_status magi_tile_plan_device(const int32_t*, const int32_t*, const int32_t*, int32_t, int32_t, int32_t, int32_t,
                                  int32_t, int32_t*, int64_t, void*) { return MAGI_OK; }
const char* magi_last_error(void) { return ""; }
int32_t magi_abi_version(void) { return MAGI_ABI_VERSION; }
}
"""
LAUNCH_SOURCE = """
#include "magi/abi.h"
template <int D> __global__ void twice(float* x) { x[threadIdx.x] *= D; }
namespace magi {
struct bf16 {}; struct fp16 {};
template <typename T, int D, int DV> magi_status launch_variant(const magi_ffa_KIND_params& p) {
  if (p.version < 0) twice<D><<<1, 32>>>((float*)p.out);
  return (magi_status)(D == 64 ? MAGI_UNSUPPORTED : MAGI_OK); }
}
#define MAGI_FFA_INSTANCE(WHICH, TYPE, D, DV) \\
  template magi_status magi::launch_variant<TYPE, D, DV>(const magi_ffa_##WHICH##_params&);
"""


def make_tree(csrc: Path) -> Path:
    """Fills ``csrc`` as in a checkout, with the real header and manifest and trivial sources."""
    for name in ("include/magi/abi.h", "include/magi/schedule.h", "include/magi/symm.h", "ffa/variants.py"):
        target = csrc / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / "csrc" / name).read_text())
    (csrc / "planner").mkdir()
    (csrc / "planner" / "plan.cpp").write_text(HOST_SOURCE.replace("VERSION", str(abi.ABI_VERSION)))
    (csrc / "ffa" / "sm90").mkdir()
    (csrc / "ffa" / "sm90" / "main.cu").write_text(KERNEL_SOURCE.replace("SCALE", "2.f"))
    for kind in ("fwd", "bwd"):
        text = LAUNCH_SOURCE.replace("KIND", kind)
        launcher = csrc / "ffa" / "sm90" / kind / "launch.cuh"
        launcher.parent.mkdir(parents=True, exist_ok=True)
        launcher.write_text(text)
    return csrc


def need(*finders) -> None:
    for find in finders:
        try:
            find()
        except BuildError as error:
            pytest.skip(str(error))
