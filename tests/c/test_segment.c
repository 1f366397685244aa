/* SPDX-License-Identifier: Apache-2.0 */
/* Segment reductions through the C API on buffers of exactly their size, with ids, offsets and args that are
 * no such thing: under AddressSanitizer nothing may be touched outside. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <baracuda/baracuda.h>

enum { kRows = 23, kColumns = 3, kSegments = 7 };

static uint64_t state = 88172645463325252u;

static uint64_t random_word(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static void require(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "%s: %s\n", what, baracuda_last_error_message());
  exit(EXIT_FAILURE);
}

static const DLDataType kFloat32 = {kDLFloat, 32, 1};
static const DLDataType kInt64 = {kDLInt, 64, 1};

static DLTensor tensor(void *data, DLDataType dtype, int32_t rank, int64_t *shape) {
  DLTensor made;
  memset(&made, 0, sizeof made);
  made.data = data;
  made.device.device_type = kDLCPU;
  made.ndim = rank;
  made.dtype = dtype;
  made.shape = shape;
  return made;
}

static baracuda_plan_options cpu_options(void) {
  baracuda_plan_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.device.device_type = kDLCPU;
  options.deterministic = 1;
  options.max_workspace = -1;
  return options;
}

/* Mostly near what is allowed, now and then anything. */
static void fill_indices(int64_t *indices, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    indices[i] = (int64_t)random_word();
    if (random_word() % 4 != 0) indices[i] = (int64_t)(random_word() % (uint64_t)(limit + 4)) - 2;
  }
}

static void run_reduction(int32_t kind, int32_t ids) {
  const baracuda_plan_options options = cpu_options();
  baracuda_segment_reduce_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.struct_size = sizeof desc;
  desc.kind = kind;
  desc.ids = ids;
  desc.num_inputs = kRows;
  desc.embedding_dim = kColumns;
  desc.num_segments = kSegments;
  desc.dtype = kFloat32;
  desc.index_dtype = kInt64;
  desc.return_arg = kind == BARACUDA_SEGMENT_MAX || kind == BARACUDA_SEGMENT_MIN;
  baracuda_plan *plan = NULL;
  require(baracuda_segment_reduce_plan_create(&desc, &options, &plan) == BARACUDA_SUCCESS, "plan");

  int64_t rows_shape[2] = {kRows, kColumns};
  int64_t segments_shape[2] = {kSegments, kColumns};
  int64_t count = ids == BARACUDA_SEGMENT_OFFSETS ? kSegments + 1 : kRows;
  float *input = malloc(kRows * kColumns * sizeof(float));
  float *output = malloc(kSegments * kColumns * sizeof(float));
  float *gradient = malloc(kRows * kColumns * sizeof(float));
  int64_t *indices = malloc((size_t)count * sizeof(int64_t));
  int64_t *arg = malloc(kSegments * kColumns * sizeof(int64_t));
  require(input && output && gradient && indices && arg, "memory");
  for (int i = 0; i < kRows * kColumns; ++i) input[i] = (float)(random_word() % 16) - 8;
  fill_indices(indices, count, ids == BARACUDA_SEGMENT_OFFSETS ? kRows : kSegments);

  DLTensor in = tensor(input, kFloat32, 2, rows_shape);
  DLTensor groups = tensor(indices, kInt64, 1, &count);
  DLTensor out = tensor(output, kFloat32, 2, segments_shape);
  DLTensor named = tensor(arg, kInt64, 2, segments_shape);
  DLTensor grad = tensor(gradient, kFloat32, 2, rows_shape);
  DLTensor *forward[] = {&in, &groups, &out, &named};
  require(baracuda_plan_run(plan, forward, NULL, desc.return_arg ? 4 : 3, NULL, 0, NULL) == BARACUDA_SUCCESS, "run");
  baracuda_plan_destroy(plan);

  for (int from_arg = 0; from_arg <= desc.return_arg; ++from_arg) {
    for (int32_t ties = BARACUDA_TIES_FIRST; ties <= (from_arg ? BARACUDA_TIES_FIRST : BARACUDA_TIES_EVEN); ++ties) {
      baracuda_segment_reduce_backward_desc back;
      memset(&back, 0, sizeof back);
      back.struct_size = sizeof back;
      back.kind = kind;
      back.ids = ids;
      back.num_inputs = kRows;
      back.embedding_dim = kColumns;
      back.num_segments = kSegments;
      back.dtype = kFloat32;
      back.index_dtype = kInt64;
      back.ties = ties;
      back.saved = from_arg ? BARACUDA_SAVED_ARG : BARACUDA_SAVED_INPUT;
      require(baracuda_segment_reduce_backward_plan_create(&back, &options, &plan) == BARACUDA_SUCCESS, "backward");
      DLTensor *with_arg[] = {&out, &groups, &named, &grad};
      DLTensor *with_input[] = {&out, &groups, &in, &grad};
      DLTensor *plain[] = {&out, &groups, &grad};
      const int takes_input = desc.return_arg || kind == BARACUDA_SEGMENT_PROD;
      if (from_arg) fill_indices(arg, kSegments * kColumns, kRows);
      require(baracuda_plan_run(plan,
                                from_arg      ? with_arg
                                : takes_input ? with_input
                                              : plain,
                                NULL, from_arg || takes_input ? 4 : 3, NULL, 0, NULL) == BARACUDA_SUCCESS,
              "run backward");
      baracuda_plan_destroy(plan);
    }
  }
  free(input);
  free(output);
  free(gradient);
  free(indices);
  free(arg);
}

int main(void) {
  for (int round = 0; round < 200; ++round)
    for (int32_t kind = BARACUDA_SEGMENT_SUM; kind <= BARACUDA_SEGMENT_PROD; ++kind)
      for (int32_t ids = BARACUDA_SEGMENT_UNSORTED; ids <= BARACUDA_SEGMENT_OFFSETS; ++ids) run_reduction(kind, ids);
  return EXIT_SUCCESS;
}
