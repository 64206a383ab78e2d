/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of moves of rows, in libmagi_ffa_<arch>.so: copy (gather, scatter), fill, reduce, merge
 * by lse. One launch each, nothing is allocated or waited for. Statuses and messages as in abi.h.
 *
 * A row is consecutive memory; rows of a tensor are a constant number of bytes apart. Row numbers
 * are below 2^31, addresses are computed in 64 bits. Any alignment and any row length will do; 16
 * bytes at a time move where all addresses, strides and lengths allow. Rows that are written must
 * be distinct, and none may be read by the same call as another row.
 */
#ifndef MAGI_ROWS_H
#define MAGI_ROWS_H

#include "magi/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MAGI_ROW_PARTS 4
#define MAGI_ROW_RANGES 2048
#define MAGI_RAW -1 /* in place of a magi_dtype: bytes, which nobody interprets */

enum { MAGI_ROWS_ALL = 0, MAGI_ROWS_INT32 = 1, MAGI_RANGES_INT32 = 2, MAGI_RANGES_INT64 = 3 };

/* Which rows take part, in order. `data` is in device memory. */
typedef struct {
  int32_t kind;  /* MAGI_ROWS_ALL: 0, 1, 2 ...; MAGI_ROWS_INT32: row numbers; MAGI_RANGES_*: (count,
                    2) half-open ranges */
  int32_t count; /* of ranges, at most MAGI_ROW_RANGES */
  const void* data;
} magi_row_list;

/* One tensor on each side. Strides in bytes. */
typedef struct {
  int32_t in_dtype, out_dtype; /* magi_dtype */
  int64_t elements;            /* of a row */
  int64_t in_stride, out_stride;
  const void* in;
  void* out;
} magi_row_part;

/* out[out_rows[i]] = in[in_rows[i]] for i < num_rows, in every part. dtypes are both MAGI_RAW
 * (elements are bytes then), or float32 to a 16-bit one. At most one of the lists may be ranges;
 * rows beyond the last range are left out. */
typedef struct {
  int32_t version, num_parts;
  int64_t num_rows;
  magi_row_list in_rows, out_rows;
  void* stream;
  magi_row_part part[MAGI_ROW_PARTS];
} magi_row_copy_params;
MAGI_EXPORT magi_status magi_row_copy(const magi_row_copy_params* params);

/* The rows of the list become copies of `value`, which repeats every `value_bytes`: 1, 2, 4 or 8.
 */
typedef struct {
  int32_t version, value_bytes;
  uint64_t value;
  int64_t num_rows, row_bytes, stride;
  magi_row_list rows;
  void* out;
  void* stream;
} magi_row_fill_params;
MAGI_EXPORT magi_status magi_row_fill(const magi_row_fill_params* params);

/* out[rows[i]] = (accumulate ? out[rows[i]] : 0) + sum over j in [begin[i], begin[i + 1]) of
 * in[sources[j]], added in float32 in this order and rounded once; divided by the number of terms
 * if `average`. Each dtype is bf16, fp16 or float32. */
typedef struct {
  int32_t version, num_parts;
  int64_t num_rows; /* of the list */
  int32_t accumulate, average;
  const int32_t* rows;    /* (num_rows,), or NULL: 0, 1, 2 ... */
  const int32_t* begin;   /* (num_rows + 1,) */
  const int32_t* sources; /* (begin[num_rows],) */
  void* stream;
  magi_row_part part[MAGI_ROW_PARTS];
} magi_row_reduce_params;
MAGI_EXPORT magi_status magi_row_reduce(const magi_row_reduce_params* params);

/* Partial attention results become one: lse = log sum exp(lse_j), out = sum exp(lse_j - lse) in_j,
 * over the sources and, if `accumulate`, what out and out_lse hold. Rows of a part are (heads,
 * elements / heads); lse (rows, heads) float32, strides in bytes. A term with lse -inf counts
 * nothing, whatever its row holds; without any other term out is 0 and lse -inf. */
typedef struct {
  int32_t version, heads;
  int64_t num_rows;
  int32_t accumulate;
  int32_t write_lse; /* 0: out_lse is only read */
  const int32_t* rows;
  const int32_t* begin;
  const int32_t* sources;
  void* stream;
  const float* in_lse;
  float* out_lse;
  int64_t in_lse_stride, out_lse_stride;
  magi_row_part part;
} magi_row_merge_params;
MAGI_EXPORT magi_status magi_row_merge(const magi_row_merge_params* params);

#ifdef __cplusplus
}
#endif

#endif /* MAGI_ROWS_H */
