/* SPDX-License-Identifier: Apache-2.0 */
/* Fractional pooling through the C API on buffers of exactly their size, with samples and indices
 * that are no such thing: under AddressSanitizer nothing may be touched outside. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <baracuda/baracuda.h>

static uint64_t state = 88172645463325252u;

static uint64_t random_word(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static int64_t below(int64_t limit) { return (int64_t)(random_word() >> 1) % limit; }

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

static void one_problem(void) {
  const int torch = (int)below(2);
  int64_t in[4] = {1 + below(3), 1 + below(3), 2 + below(20), 2 + below(20)};
  int64_t out[4] = {in[0], in[1], 0, 0};
  int64_t window[2];
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t n = in[2 + axis];
    window[axis] = 1 + below(n);
    out[2 + axis] = 1 + below(torch ? n - window[axis] + 1 : 30);
  }
  int64_t samples_shape[3] = {in[0], in[1], 2};
  const int64_t planes = in[0] * in[1];
  const int64_t cells = planes * in[2] * in[3];
  const int64_t outputs = planes * out[2] * out[3];
  float *x = malloc((size_t)cells * sizeof *x);
  float *dx = malloc((size_t)cells * sizeof *dx);
  float *y = malloc((size_t)outputs * sizeof *y);
  int64_t *indices = malloc((size_t)outputs * sizeof *indices);
  float *samples = malloc((size_t)planes * 2 * sizeof *samples);
  require(x && dx && y && indices && samples, "malloc");
  for (int64_t i = 0; i < cells; ++i) x[i] = (float)below(9);
  const float garbage[6] = {-1.0f, 1.0f, 1e30f, INFINITY, -INFINITY, NAN};
  for (int64_t i = 0; i < planes * 2; ++i) samples[i] = below(3) ? (float)below(1 << 24) * 0x1p-24f : garbage[below(6)];

  const baracuda_plan_options options = {sizeof options, {kDLCPU, 0}, 1, NULL, -1};
  baracuda_fractional_max_pool2d_desc forward;
  memset(&forward, 0, sizeof forward);
  forward.struct_size = sizeof forward;
  forward.batch = in[0];
  forward.channels = in[1];
  forward.h_in = in[2];
  forward.w_in = in[3];
  forward.window_h = window[0];
  forward.window_w = window[1];
  forward.h_out = out[2];
  forward.w_out = out[3];
  forward.dtype = kFloat32;
  forward.index_dtype = kInt64;
  forward.placement = torch ? BARACUDA_PLACEMENT_TORCH : BARACUDA_PLACEMENT_EVEN;
  forward.samples = 1;
  baracuda_plan *plan = NULL;
  require(baracuda_fractional_max_pool2d_plan_create(&forward, &options, &plan) == BARACUDA_SUCCESS, "create");
  DLTensor of_x = tensor(x, kFloat32, 4, in);
  DLTensor of_samples = tensor(samples, kFloat32, 3, samples_shape);
  DLTensor of_y = tensor(y, kFloat32, 4, out);
  DLTensor of_indices = tensor(indices, kInt64, 4, out);
  DLTensor *operands[4] = {&of_x, &of_samples, &of_y, &of_indices};
  require(baracuda_plan_run(plan, operands, NULL, 4, NULL, 0, NULL) == BARACUDA_SUCCESS, "forward");
  baracuda_plan_destroy(plan);
  for (int64_t i = 0; i < outputs; ++i) {
    require(indices[i] >= 0 && indices[i] < cells, "an index is outside");
    require(x[indices[i]] == y[i], "a value is not where its index says");
  }

  baracuda_fractional_max_pool2d_backward_desc backward;
  memset(&backward, 0, sizeof backward);
  backward.struct_size = sizeof backward;
  backward.batch = in[0];
  backward.channels = in[1];
  backward.h_in = in[2];
  backward.w_in = in[3];
  backward.window_h = window[0];
  backward.window_w = window[1];
  backward.h_out = out[2];
  backward.w_out = out[3];
  backward.dtype = kFloat32;
  backward.index_dtype = kInt64;
  backward.placement = forward.placement;
  plan = NULL;
  require(baracuda_fractional_max_pool2d_backward_plan_create(&backward, &options, &plan) == BARACUDA_SUCCESS,
          "create backward");
  DLTensor of_dx = tensor(dx, kFloat32, 4, in);
  DLTensor *backward_operands[3] = {&of_y, &of_indices, &of_dx};
  for (int64_t i = 0; i < outputs; ++i) y[i] = 1.0f;
  require(baracuda_plan_run(plan, backward_operands, NULL, 3, NULL, 0, NULL) == BARACUDA_SUCCESS, "backward");
  double sum = 0;
  for (int64_t i = 0; i < cells; ++i) sum += dx[i];
  require(sum == (double)outputs, "a gradient was lost");

  for (int64_t i = 0; i < outputs; ++i)
    if (below(2)) indices[i] = below(2) ? (int64_t)random_word() : below(cells + 4) - 2;
  require(baracuda_plan_run(plan, backward_operands, NULL, 3, NULL, 0, NULL) == BARACUDA_SUCCESS, "bad indices");
  baracuda_plan_destroy(plan);
  free(x);
  free(dx);
  free(y);
  free(indices);
  free(samples);
}

int main(void) {
  for (int round = 0; round < 2000; ++round) one_problem();
  return EXIT_SUCCESS;
}
