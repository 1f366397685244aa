/* SPDX-License-Identifier: Apache-2.0 */
/* The functions that are the same for every plan, on a write_slice plan for the CPU. Built with
 * AddressSanitizer and UBSan, so reads and writes outside what was given end the program. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <baracuda/baracuda.h>

static int failures = 0;

static void expect(int condition, const char *text, int line) {
  if (condition) return;
  fprintf(stderr, "line %d: not so: %s (last error: %s)\n", line, text, baracuda_last_error_message());
  ++failures;
}

#define CHECK(condition) expect((condition), #condition, __LINE__)

/* The call fails with this status, and its one-line sentence names this. */
static void expect_error(baracuda_status got, baracuda_status status, const char *names, int line) {
  const char *message = baracuda_last_error_message();
  if (got == status && strstr(message, names) && !strchr(message, '\n')) return;
  fprintf(stderr, "line %d: expected status %d naming \"%s\", got %d: %s\n", line, status, names, got, message);
  ++failures;
}

#define CHECK_ERROR(call, status, names) expect_error((call), (status), (names), __LINE__)

static const DLDevice kCpu = {kDLCPU, 0};
static const DLDataType kInt16 = {kDLInt, 16, 1};

static baracuda_plan_options cpu_options(void) {
  baracuda_plan_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.device = kCpu;
  options.deterministic = 1;
  options.max_workspace = -1;
  return options;
}

/* dest [3, 4] of int16, source [2, 2] at [1:3, 1:3]. */
static baracuda_write_slice_desc small_problem(void) {
  baracuda_write_slice_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.struct_size = sizeof desc;
  desc.dest_shape.rank = 2;
  desc.dest_shape.extent[0] = 3;
  desc.dest_shape.extent[1] = 4;
  desc.ranges.rank = 2;
  desc.ranges.start[0] = desc.ranges.start[1] = 1;
  desc.ranges.end[0] = desc.ranges.end[1] = 3;
  desc.dtype = kInt16;
  return desc;
}

static baracuda_plan *create(baracuda_write_slice_desc desc) {
  const baracuda_plan_options options = cpu_options();
  baracuda_plan *plan = NULL;
  CHECK(baracuda_write_slice_plan_create(&desc, &options, &plan) == BARACUDA_SUCCESS);
  if (!plan) exit(1);
  return plan;
}

static DLTensor tensor(void *data, int32_t ndim, int64_t *shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device = kCpu;
  t.ndim = ndim;
  t.dtype = kInt16;
  t.shape = shape;
  return t;
}

static void test_library(void) {
  CHECK(strcmp(baracuda_version(), BARACUDA_EXPECTED_VERSION) == 0);
  CHECK(baracuda_cuda_device_count() == 0);
  CHECK(strlen(baracuda_last_error_message()) > 0);

  size_t count = 0;
  const baracuda_operator *operators = baracuda_operators(&count);
  int found = 0;
  for (size_t i = 0; i < count; ++i) {
    CHECK(operators[i].create != NULL);
    CHECK(operators[i].descriptor_size >= sizeof(size_t));
    for (size_t f = 0; f < operators[i].field_count; ++f) {
      CHECK(operators[i].fields[f].offset < operators[i].descriptor_size);
      CHECK((operators[i].fields[f].choices != NULL) == (operators[i].fields[f].kind == BARACUDA_FIELD_CHOICE));
    }
    if (strcmp(operators[i].name, "write_slice") != 0) continue;
    found = 1;
    CHECK(strcmp(operators[i].plan_name, "WriteSlicePlan") == 0);
    CHECK(strcmp(operators[i].category, "layout") == 0);
    CHECK(operators[i].descriptor_size == sizeof(baracuda_write_slice_desc));
    baracuda_write_slice_desc desc = small_problem();
    const baracuda_plan_options options = cpu_options();
    baracuda_plan *plan = NULL;
    CHECK(operators[i].create(&desc, &options, &plan) == BARACUDA_SUCCESS);
    baracuda_plan_destroy(plan);
  }
  CHECK(found);
}

static void test_what_a_plan_tells(void) {
  baracuda_plan *plan = create(small_problem());
  CHECK(strcmp(baracuda_plan_name(plan), "WriteSlicePlan") == 0);
  CHECK(strlen(baracuda_plan_path(plan)) > 0);
  CHECK(baracuda_plan_device(plan).device_type == kDLCPU);
  CHECK(baracuda_plan_workspace_size(plan) == 0);
  CHECK(baracuda_plan_operand_count(plan) == 2);

  baracuda_operand_info info;
  CHECK(baracuda_plan_operand(plan, 0, &info) == BARACUDA_SUCCESS);
  CHECK(strcmp(info.name, "dest") == 0 && info.role == BARACUDA_INOUT && !info.optional);
  CHECK(info.rank == 2 && info.shape[0] == 3 && info.shape[1] == 4);
  CHECK(info.dtype.code == kDLInt && info.dtype.bits == 16 && info.dtype.lanes == 1);
  CHECK(baracuda_plan_operand(plan, 1, &info) == BARACUDA_SUCCESS);
  CHECK(strcmp(info.name, "source") == 0 && info.role == BARACUDA_IN);
  CHECK(info.rank == 2 && info.shape[0] == 2 && info.shape[1] == 2);
  CHECK(baracuda_plan_operand(plan, 2, &info) == BARACUDA_INVALID_PROBLEM);

  baracuda_sku sku;
  baracuda_plan_sku(plan, &sku);
  CHECK(strcmp(sku.category, "layout") == 0 && strcmp(sku.op, "write_slice") == 0);
  CHECK(strcmp(sku.dtype, "int16") == 0 && strcmp(sku.arch, "cpu") == 0 && strcmp(sku.backend, "cpu") == 0);
  CHECK(sku.deterministic && sku.bit_stable_on_same_hardware);

  baracuda_cost cost;
  baracuda_plan_cost(plan, &cost);
  CHECK(cost.bytes == 2 * 4 * 2 && cost.operations == 0);
  baracuda_plan_destroy(plan);
  baracuda_plan_destroy(NULL);
}

static void test_options(void) {
  baracuda_write_slice_desc desc = small_problem();
  baracuda_plan_options options = cpu_options();
  baracuda_plan *plan = NULL;
#define CREATE() baracuda_write_slice_plan_create(&desc, &options, &plan)
  options.backend = "cpu";
  CHECK(CREATE() == BARACUDA_SUCCESS);
  baracuda_plan_destroy(plan);
  plan = NULL;
  options.backend = "cublas";
  CHECK_ERROR(CREATE(), BARACUDA_UNSUPPORTED, "cublas");
  options.backend = NULL;

  desc.overlap = BARACUDA_OVERLAP_STAGE;
  options.max_workspace = 7; /* the stage takes 8 bytes and more */
  CHECK_ERROR(CREATE(), BARACUDA_UNSUPPORTED, "max_workspace");
  options.max_workspace = -1;
  desc.overlap = 17;
  CHECK_ERROR(CREATE(), BARACUDA_INVALID_PROBLEM, "overlap");
  desc.overlap = BARACUDA_OVERLAP_REFUSE;

  options.device.device_type = kDLCUDA;
  CHECK(CREATE() == BARACUDA_CUDA_ERROR); /* this is a build without CUDA */
  options.device.device_type = kDLMetal;
  CHECK(CREATE() != BARACUDA_SUCCESS);
  options.device = kCpu;

  options.struct_size = 0;
  CHECK(CREATE() == BARACUDA_INVALID_PROBLEM);
  options.struct_size = sizeof options;
  desc.struct_size = 0;
  CHECK(CREATE() == BARACUDA_INVALID_PROBLEM);
  desc.struct_size = sizeof desc;
  CHECK(baracuda_write_slice_plan_create(NULL, &options, &plan) == BARACUDA_INVALID_PROBLEM);
  CHECK(baracuda_write_slice_plan_create(&desc, NULL, &plan) == BARACUDA_INVALID_PROBLEM);

  desc.dest_shape.rank = BARACUDA_MAX_RANK + 1;
  CHECK_ERROR(CREATE(), BARACUDA_UNSUPPORTED, "dest_shape");
  desc.dest_shape.rank = INT32_MIN;
  CHECK_ERROR(CREATE(), BARACUDA_INVALID_PROBLEM, "dest_shape");
  desc = small_problem();
  desc.dest_shape.extent[0] = desc.dest_shape.extent[1] = INT64_MAX;
  CHECK_ERROR(CREATE(), BARACUDA_INVALID_PROBLEM, "dest_shape");
  desc = small_problem();
  desc.ranges.start[0] = INT64_MIN;
  CHECK_ERROR(CREATE(), BARACUDA_INVALID_PROBLEM, "ranges");
  desc = small_problem();
  desc.dtype.lanes = 4;
  CHECK_ERROR(CREATE(), BARACUDA_UNSUPPORTED, "dtype");
  CHECK(plan == NULL);
#undef CREATE
}

/* A descriptor of a later version may be longer, as long as what is new is zero. */
static void test_longer_descriptor(void) {
  struct {
    baracuda_write_slice_desc known;
    uint64_t later;
  } desc;
  memset(&desc, 0, sizeof desc);
  desc.known = small_problem();
  desc.known.struct_size = sizeof desc;
  const baracuda_plan_options options = cpu_options();
  baracuda_plan *plan = NULL;
  CHECK(baracuda_write_slice_plan_create(&desc.known, &options, &plan) == BARACUDA_SUCCESS);
  baracuda_plan_destroy(plan);
  plan = NULL;
  desc.later = 1;
  CHECK(baracuda_write_slice_plan_create(&desc.known, &options, &plan) == BARACUDA_UNSUPPORTED);
  CHECK(plan == NULL);
}

static void test_run_and_bind(void) {
  baracuda_plan *plan = create(small_problem());
  /* On the heap and of the exact size, so that the sanitizer sees a step over the end. */
  int16_t *dest = malloc(12 * sizeof *dest);
  int16_t *source = malloc(4 * sizeof *source);
  for (int i = 0; i < 12; ++i) dest[i] = (int16_t)i;
  for (int i = 0; i < 4; ++i) source[i] = (int16_t)(100 + i);
  const int16_t written[12] = {0, 1, 2, 3, 4, 100, 101, 7, 8, 102, 103, 11};

  int64_t dest_shape[2] = {3, 4}, source_shape[2] = {2, 2};
  DLTensor to = tensor(dest, 2, dest_shape), from = tensor(source, 2, source_shape);
  DLTensor *operands[2] = {&to, &from};
  CHECK(baracuda_plan_can_implement(plan, operands, NULL, 2) == BARACUDA_SUCCESS);
  CHECK(dest[5] == 5);
  CHECK(baracuda_plan_run(plan, operands, NULL, 2, NULL, 0, NULL) == BARACUDA_SUCCESS);
  CHECK(memcmp(dest, written, sizeof written) == 0);

  /* Bound: shapes and strides are copied, the memory isn't. */
  int64_t turned[2] = {1, 2}; /* source as its transpose */
  from.strides = turned;
  baracuda_bound *bound = NULL;
  CHECK(baracuda_plan_bind(plan, operands, NULL, 2, &bound) == BARACUDA_SUCCESS);
  turned[0] = turned[1] = 1000000;
  source_shape[0] = 0;
  memset(&from, 0xff, sizeof from);
  memset(&to, 0xff, sizeof to);
  CHECK(baracuda_bound_run(bound, NULL, 0, NULL) == BARACUDA_SUCCESS);
  CHECK(dest[5] == 100 && dest[6] == 102 && dest[9] == 101 && dest[10] == 103);
  source[3] = -1;
  CHECK(baracuda_bound_run(bound, NULL, 0, NULL) == BARACUDA_SUCCESS);
  CHECK(dest[10] == -1 && dest[11] == 11 && dest[4] == 4);
  baracuda_bound_destroy(bound);
  baracuda_bound_destroy(NULL);
  baracuda_plan_destroy(plan);
  free(source);
  free(dest);
}

static void test_operands_refused(void) {
  baracuda_plan *plan = create(small_problem());
  int16_t dest[12] = {0}, source[4] = {1, 2, 3, 4};
  const int16_t untouched[12] = {0};
  int64_t dest_shape[2] = {3, 4}, source_shape[2] = {2, 2};
  const DLTensor good_dest = tensor(dest, 2, dest_shape), good_source = tensor(source, 2, source_shape);
  DLTensor to = good_dest, from = good_source;
  DLTensor *operands[2] = {&to, &from};
#define RUN() baracuda_plan_run(plan, operands, NULL, 2, NULL, 0, NULL)
  CHECK(baracuda_plan_run(plan, operands, NULL, 1, NULL, 0, NULL) == BARACUDA_INVALID_PROBLEM);
  CHECK(baracuda_plan_run(plan, operands, NULL, 3, NULL, 0, NULL) == BARACUDA_INVALID_PROBLEM);
  CHECK(baracuda_plan_run(plan, NULL, NULL, 2, NULL, 0, NULL) == BARACUDA_INVALID_PROBLEM);

  operands[1] = NULL;
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "source");
  operands[1] = &from;

  from.data = NULL;
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "source");
  from = good_source;
  from.dtype.code = kDLUInt;
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "source");
  from = good_source;
  from.device.device_type = kDLCUDA;
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "source");
  from = good_source;
  from.ndim = 1;
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "source");
  from = good_source;
  from.byte_offset = 1;
  CHECK_ERROR(RUN(), BARACUDA_MISALIGNED_OPERAND, "source");
  from = good_source;

  uint64_t flags[2] = {DLPACK_FLAG_BITMASK_READ_ONLY, 0};
  CHECK_ERROR(baracuda_plan_run(plan, operands, flags, 2, NULL, 0, NULL), BARACUDA_INVALID_PROBLEM, "dest");
  flags[0] = 0;
  flags[1] = DLPACK_FLAG_BITMASK_READ_ONLY;
  CHECK(baracuda_plan_can_implement(plan, operands, flags, 2) == BARACUDA_SUCCESS);

  int64_t folded[2] = {0, 1}; /* all rows of dest are one */
  to.strides = folded;
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "dest");
  to = good_dest;
  from.data = dest + 6; /* shares an element with the window */
  CHECK_ERROR(RUN(), BARACUDA_INVALID_PROBLEM, "source");
  from = good_source;

  baracuda_bound *bound = NULL;
  source_shape[0] = 3;
  CHECK(baracuda_plan_bind(plan, operands, NULL, 2, &bound) == BARACUDA_INVALID_PROBLEM);
  CHECK(bound == NULL);
  CHECK(memcmp(dest, untouched, sizeof dest) == 0);
#undef RUN
  baracuda_plan_destroy(plan);
}

static void test_workspace(void) {
  baracuda_write_slice_desc desc = small_problem();
  desc.overlap = BARACUDA_OVERLAP_STAGE;
  baracuda_plan *plan = create(desc);
  const size_t size = baracuda_plan_workspace_size(plan);
  CHECK(size >= 8);

  int16_t dest[12];
  for (int i = 0; i < 12; ++i) dest[i] = (int16_t)i;
  int64_t dest_shape[2] = {3, 4}, source_shape[2] = {2, 2}, strides[2] = {4, 1};
  DLTensor to = tensor(dest, 2, dest_shape), from = tensor(dest, 2, source_shape);
  from.strides = strides; /* dest[0:2, 0:2], which the window shares an element with */
  DLTensor *operands[2] = {&to, &from};

  void *workspace = NULL;
  CHECK(baracuda_allocate(kCpu, size, NULL, &workspace) == BARACUDA_SUCCESS);
  CHECK((uintptr_t)workspace % 256 == 0);
  uint64_t needed = 1, got = 1;
  CHECK_ERROR(baracuda_plan_run(plan, operands, NULL, 2, workspace, size - 1, NULL), BARACUDA_WORKSPACE_TOO_SMALL,
              "workspace");
  baracuda_last_error_sizes(&needed, &got);
  CHECK(needed == size && got == size - 1);
  CHECK_ERROR(baracuda_plan_run(plan, operands, NULL, 2, NULL, size, NULL), BARACUDA_INVALID_PROBLEM, "workspace");
  baracuda_last_error_sizes(&needed, &got);
  CHECK(needed == 0 && got == 0);
  CHECK_ERROR(baracuda_plan_run(plan, operands, NULL, 2, (char *)workspace + 1, size, NULL),
              BARACUDA_MISALIGNED_OPERAND, "workspace");
  CHECK(dest[5] == 5);

  CHECK(baracuda_plan_run(plan, operands, NULL, 2, workspace, size, NULL) == BARACUDA_SUCCESS);
  const int16_t written[12] = {0, 1, 2, 3, 4, 0, 1, 7, 8, 4, 5, 11};
  CHECK(memcmp(dest, written, sizeof written) == 0);
  CHECK(baracuda_free(kCpu, workspace, NULL) == BARACUDA_SUCCESS);
  baracuda_plan_destroy(plan);
}

static void test_memory(void) {
  void *data = NULL;
  CHECK(baracuda_allocate(kCpu, 16, NULL, &data) == BARACUDA_SUCCESS);
  char back[16] = {0};
  CHECK(baracuda_copy(kCpu, data, "fifteen letters", 16, NULL) == BARACUDA_SUCCESS);
  CHECK(baracuda_synchronize(kCpu, NULL) == BARACUDA_SUCCESS);
  CHECK(baracuda_copy(kCpu, back, data, 16, NULL) == BARACUDA_SUCCESS);
  CHECK(strcmp(back, "fifteen letters") == 0);
  CHECK(baracuda_free(kCpu, data, NULL) == BARACUDA_SUCCESS);
  CHECK(baracuda_allocate(kCpu, SIZE_MAX, NULL, &data) == BARACUDA_OUT_OF_MEMORY);
  const DLDevice cuda = {kDLCUDA, 0};
  CHECK(baracuda_allocate(cuda, 16, NULL, &data) == BARACUDA_CUDA_ERROR);
}

int main(void) {
  test_library();
  test_what_a_plan_tells();
  test_options();
  test_longer_descriptor();
  test_run_and_bind();
  test_operands_refused();
  test_workspace();
  test_memory();
  if (failures) fprintf(stderr, "%d checks failed\n", failures);
  return failures != 0;
}
