/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_KV_CACHE_H_
#define BARACUDA_KV_CACHE_H_

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Appends tokens to a paged key/value cache: slot s of a cache is [s / block_size, s % block_size].
 * Slots below 0 or not below blocks * block_size are skipped; of tokens with the same slot the last
 * one stays.
 * Operands: key, value (in, [tokens, heads, dim]), key_cache, value_cache (inout, [blocks,
 * block_size, heads, dim]), slot_mapping (in, [tokens]). With a cache_dtype, which is float8_e4m3fn
 * or float8_e5m2 for a dtype of float16, bfloat16 or float32, also key_scale, value_scale (in,
 * float32, [1]): the cache gets x / scale in float32, rounded to nearest even, saturated to the
 * largest finite number; NaN stays NaN. */
typedef struct baracuda_kv_cache_append_desc {
  size_t struct_size; /* sizeof(baracuda_kv_cache_append_desc) */
  int64_t tokens;
  int64_t heads;
  int64_t dim;
  int64_t blocks;
  int64_t block_size;
  DLDataType dtype;       /* of key and value; not int4 or uint4 */
  DLDataType cache_dtype; /* bits 0: the same, no conversion */
  DLDataType index_dtype; /* int32 or int64 */
} baracuda_kv_cache_append_desc;

baracuda_status baracuda_kv_cache_append_plan_create(const baracuda_kv_cache_append_desc *desc,
                                                     const baracuda_plan_options *options, baracuda_plan **plan);

/* The inverse: reads the slots of a paged cache back. A token whose slot is outside gets zeros.
 * Operands: key_cache, value_cache (in), slot_mapping (in), with a cache_dtype key_scale,
 * value_scale (in), then key, value (out). A converted element is cache * scale in float32, rounded
 * once. */
typedef struct baracuda_kv_cache_gather_desc {
  size_t struct_size; /* sizeof(baracuda_kv_cache_gather_desc) */
  int64_t tokens;
  int64_t heads;
  int64_t dim;
  int64_t blocks;
  int64_t block_size;
  DLDataType dtype;
  DLDataType cache_dtype;
  DLDataType index_dtype;
} baracuda_kv_cache_gather_desc;

baracuda_status baracuda_kv_cache_gather_plan_create(const baracuda_kv_cache_gather_desc *desc,
                                                     const baracuda_plan_options *options, baracuda_plan **plan);

#ifdef __cplusplus
}
#endif

#endif
