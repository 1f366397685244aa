/* SPDX-License-Identifier: Apache-2.0 */
/* A program of another project: plain C, built against the installed package by a C compiler.
 * Writes a 2 x 3 block into a 4 x 5 matrix on the CPU and looks at every byte, then at an error. */
#include <stdio.h>
#include <string.h>

#include <baracuda/baracuda.h>

static int failures = 0;

#define CHECK(condition)                                                                                          \
  do {                                                                                                            \
    if (!(condition)) {                                                                                           \
      fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, baracuda_last_error_message()); \
      ++failures;                                                                                                 \
    }                                                                                                             \
  } while (0)

int main(void) {
  const DLDevice cpu = {kDLCPU, 0};
  const DLDataType float32 = {kDLFloat, 32, 1};

  baracuda_plan_options options = {0};
  options.struct_size = sizeof(options);
  options.device = cpu;
  options.deterministic = 1;
  options.max_workspace = -1;

  baracuda_write_slice_desc desc = {0};
  desc.struct_size = sizeof(desc);
  desc.dest_shape = (baracuda_shape){2, {4, 5}};
  desc.ranges = (baracuda_ranges){2, {1, 2}, {3, 5}};
  desc.dtype = float32;
  desc.overlap = BARACUDA_OVERLAP_REFUSE;

  baracuda_plan *plan = NULL;
  CHECK(baracuda_write_slice_plan_create(&desc, &options, &plan) == BARACUDA_SUCCESS);
  if (plan == NULL) return 1;
  CHECK(strcmp(baracuda_plan_name(plan), "WriteSlicePlan") == 0);
  CHECK(baracuda_plan_operand_count(plan) == 2);

  float dest[4][5], expected[4][5], source[2][3];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 5; ++j) dest[i][j] = expected[i][j] = (float)(10 * i + j);
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) expected[1 + i][2 + j] = source[i][j] = (float)-(3 * i + j + 1);
  }

  int64_t dest_shape[] = {4, 5}, source_shape[] = {2, 3};
  DLTensor dest_tensor = {.data = dest, .device = cpu, .ndim = 2, .dtype = float32, .shape = dest_shape};
  DLTensor source_tensor = {.data = source, .device = cpu, .ndim = 2, .dtype = float32, .shape = source_shape};
  DLTensor *operands[] = {&dest_tensor, &source_tensor};
  CHECK(baracuda_plan_run(plan, operands, NULL, 2, NULL, 0, NULL) == BARACUDA_SUCCESS);
  CHECK(memcmp(dest, expected, sizeof(dest)) == 0);

  /* A source of the wrong shape: refused with a sentence, and nothing is written. */
  source_shape[1] = 2;
  CHECK(baracuda_plan_run(plan, operands, NULL, 2, NULL, 0, NULL) == BARACUDA_INVALID_PROBLEM);
  CHECK(strstr(baracuda_last_error_message(), "WriteSlicePlan") != NULL);
  CHECK(strstr(baracuda_last_error_message(), "source") != NULL);
  CHECK(memcmp(dest, expected, sizeof(dest)) == 0);
  baracuda_plan_destroy(plan);

  /* A range outside the destination: refused when the plan is created. */
  plan = NULL;
  desc.ranges.end[1] = 6;
  CHECK(baracuda_write_slice_plan_create(&desc, &options, &plan) == BARACUDA_INVALID_PROBLEM);
  CHECK(plan == NULL);

  if (failures == 0) printf("baracuda %s from C: the bytes and the errors are right\n", baracuda_version());
  return failures != 0;
}
