/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_PLAN_H_
#define BARACUDA_PLAN_H_

#include <stddef.h>
#include <stdint.h>

#include <dlpack/dlpack.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BARACUDA_MAX_RANK 8

/* A plan is one problem, described once and bound to a kernel for one device. It is immutable:
 * any number of threads may run it at once. Each operator has a creator of its own
 * (baracuda_write_slice_plan_create, ...); all that follows is the same for every operator. */
typedef struct baracuda_plan baracuda_plan;

/* A plan with its operands checked once; only launching is left. */
typedef struct baracuda_bound baracuda_bound;

/* The extents of a tensor, outermost axis first. A rank over BARACUDA_MAX_RANK is refused when
 * the plan is created. */
typedef struct baracuda_shape {
  int32_t rank;
  int64_t extent[BARACUDA_MAX_RANK];
} baracuda_shape;

/* One half-open range [start, end) for each axis. */
typedef struct baracuda_ranges {
  int32_t rank;
  int64_t start[BARACUDA_MAX_RANK];
  int64_t end[BARACUDA_MAX_RANK];
} baracuda_ranges;

/* A number that may be left out. */
typedef struct baracuda_optional_double {
  int32_t present;
  double value;
} baracuda_optional_double;

/* How a plan is to be selected. A preference is obeyed or refused, never ignored. */
typedef struct baracuda_plan_options {
  size_t struct_size;    /* sizeof(baracuda_plan_options) */
  DLDevice device;       /* kDLCPU, or kDLCUDA with an ordinal, -1 for the calling thread's current device */
  int32_t deterministic; /* non-zero: only kernels whose bits do not depend on timing */
  const char *backend;   /* NULL: the fastest; else the SKU's backend must be this one */
  int64_t max_workspace; /* bytes; negative: no limit */
} baracuda_plan_options;

typedef enum baracuda_role { BARACUDA_IN = 0, BARACUDA_OUT = 1, BARACUDA_INOUT = 2 } baracuda_role;

/* An argument of run. Pointers are valid as long as the plan is. */
typedef struct baracuda_operand_info {
  const char *name;
  baracuda_role role;
  DLDataType dtype;
  int32_t rank;
  const int64_t *shape;
  int32_t optional;
  int32_t in_place_with; /* the index of the operand whose elements it may be, or -1 */
} baracuda_operand_info;

/* The identity of the selected kernel. NULL strings do not apply. */
typedef struct baracuda_sku {
  const char *category;
  const char *op;
  const char *dtype;
  const char *aux_dtype;
  const char *layout;
  const char *epilogue;
  const char *arch;    /* what runs: "sm_90", "cpu" */
  const char *backend; /* "bespoke", "cub", "memcpy", "cpu" or a library's name */
  /* The guarantee of precision. */
  const char *math_precision;
  const char *accumulator;
  int32_t bit_stable_on_same_hardware;
  int32_t deterministic;
} baracuda_sku;

/* The fewest bytes the operation must move (each input read once, each output written once) and
 * the arithmetic operations it must do. */
typedef struct baracuda_cost {
  int64_t bytes;
  int64_t operations;
} baracuda_cost;

const char *baracuda_plan_name(const baracuda_plan *plan);
/* The access path of row-major operands, as the operator's documentation names it. */
const char *baracuda_plan_path(const baracuda_plan *plan);
DLDevice baracuda_plan_device(const baracuda_plan *plan);
size_t baracuda_plan_operand_count(const baracuda_plan *plan);
baracuda_status baracuda_plan_operand(const baracuda_plan *plan, size_t index, baracuda_operand_info *info);
size_t baracuda_plan_workspace_size(const baracuda_plan *plan);
void baracuda_plan_sku(const baracuda_plan *plan, baracuda_sku *sku);
void baracuda_plan_cost(const baracuda_plan *plan, baracuda_cost *cost);

/* Operands come in the order of the operand list, one slot each, NULL where an optional one is
 * absent. `flags` holds the DLPACK_FLAG_BITMASK_* of each operand's exchange, or is NULL for all
 * zero. Tensors are borrowed for the call. Strides may be NULL for row-major.
 *
 * can_implement answers what run would, and launches nothing. */
baracuda_status baracuda_plan_can_implement(const baracuda_plan *plan, DLTensor *const operands[],
                                            const uint64_t flags[], size_t operand_count);

/* Checks the operands, then enqueues the work on `stream` (a cudaStream_t; ignored on the CPU,
 * where run returns when the work is done). Allocates nothing and never synchronises. Outputs are
 * fully overwritten. The workspace is device memory of at least baracuda_plan_workspace_size
 * bytes, aligned to 256; its contents are undefined before and after. Nothing is written when a
 * status other than BARACUDA_SUCCESS or BARACUDA_CUDA_ERROR is returned. */
baracuda_status baracuda_plan_run(const baracuda_plan *plan, DLTensor *const operands[], const uint64_t flags[],
                                  size_t operand_count, void *workspace, size_t workspace_size, void *stream);

/* Checks once; afterwards baracuda_bound_run only launches. Shapes and strides are copied; the
 * memory of the operands stays the caller's and must outlive the bound plan, as must the plan. */
baracuda_status baracuda_plan_bind(const baracuda_plan *plan, DLTensor *const operands[], const uint64_t flags[],
                                   size_t operand_count, baracuda_bound **bound);
baracuda_status baracuda_bound_run(const baracuda_bound *bound, void *workspace, size_t workspace_size, void *stream);
void baracuda_bound_destroy(baracuda_bound *bound);

void baracuda_plan_destroy(baracuda_plan *plan);

#ifdef __cplusplus
}
#endif

#endif
