// SPDX-License-Identifier: Apache-2.0
// Where the windows of fractional pooling lie: every axis of up to 64 cells, and random large ones.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "pooling/window.h"

using namespace baracuda;

namespace {

int failures = 0;

void expect(bool holds, const char *what, const PoolAxis &axis, Placement placement, int64_t at, double u) {
  if (holds || ++failures > 20) return;
  std::fprintf(stderr, "%s: n = %d, k = %d, o = %d, placement %d, at %lld, u = %.9g\n", what, axis.in, axis.window,
               axis.out, int(placement), static_cast<long long>(at), u);
}

template <class Real>
std::vector<Real> samples() {
  const Real inf = std::numeric_limits<Real>::infinity();
  return {Real(0),
          Real(0x1p-24),
          Real(0.1),
          Real(0.25),
          Real(1) / Real(3),
          Real(0.5),
          Real(0.7),
          Real(0.9),
          std::nextafter(Real(1), Real(0)),
          Real(-1),
          Real(1),
          Real(2),
          Real(1e30),
          inf,
          -inf,
          std::numeric_limits<Real>::quiet_NaN()};
}

bool inside(double u) { return u >= 0 && u < 1; }

// floor(i a / b + u) in integers; u is a multiple of 2^-24. False where the sum is so near an
// integer that the rule's rounding may decide.
bool exact_start(const PoolAxis &axis, int32_t i, double u, int64_t &start) {
  const __int128 scale = __int128(1) << 24;
  const __int128 sample = __int128(u * 0x1p24);
  if (double(int64_t(sample)) != u * 0x1p24) return false;
  const int64_t steps = axis.out > 1 ? axis.out - 1 : 1;
  const __int128 numerator =
      axis.out == 1 ? sample * axis.last_start() : __int128(i) * axis.last_start() * scale + sample * steps;
  const __int128 denominator = axis.out == 1 ? scale : scale * steps;
  const __int128 rest = numerator % denominator;
  // Within a few units of the 24th bit, as a fraction of the denominator.
  const __int128 near = denominator >> (axis.out == 1 ? 16 : 22);
  if (axis.last_start() > 0 && rest != 0 && (rest <= near || denominator - rest <= near)) return false;
  start = int64_t(numerator / denominator);
  if (start > axis.last_start()) start = axis.last_start();
  return true;
}

template <class Real>
void check_starts(const PoolAxis &axis, Placement placement, int32_t i, const std::vector<Real> &grid) {
  const int32_t low = axis.earliest(i);
  const int32_t high = axis.latest(i);
  expect(0 <= low && low <= high && high <= axis.last_start(), "span", axis, placement, i, 0);
  expect(high + axis.window - low <= window_reach(axis), "reach", axis, placement, i, 0);
  for (const Real u : grid) {
    const int32_t start = window_start(axis, placement, i, u);
    expect(0 <= start && start <= axis.last_start(), "outside", axis, placement, i, double(u));
    expect(low <= start && start <= high, "start out of its span", axis, placement, i, double(u));
    int64_t exact = 0;
    if (placement == Placement::even && inside(double(u)) && exact_start(axis, i, double(u), exact))
      expect(start == exact, "not the exact start", axis, placement, i, double(u));
  }
}

void check_cell(const PoolAxis &axis, Placement placement, int32_t cell) {
  const PoolRange over = windows_over(axis, cell);
  const auto may_hold = [&](int32_t i) { return axis.earliest(i) <= cell && cell < axis.latest(i) + axis.window; };
  expect(0 <= over.begin && over.begin <= over.end && over.end <= axis.out, "range", axis, placement, cell, 0);
  // Spans never go back, so the ends of the range decide.
  if (over.begin < over.end) {
    expect(may_hold(over.begin) && may_hold(over.end - 1), "range too long", axis, placement, cell, 0);
    expect(over.begin == 0 || !may_hold(over.begin - 1), "begins late", axis, placement, cell, 0);
    expect(over.end == axis.out || !may_hold(over.end), "ends early", axis, placement, cell, 0);
  } else {
    for (int32_t i = 0; i < axis.out && axis.out <= 64; ++i)
      expect(!may_hold(i), "empty range", axis, placement, cell, 0);
  }
}

// The windows over some cells that begin with this one.
void check_cells(const PoolAxis &axis, Placement placement, int32_t cell) {
  for (const int32_t cells : {1, 2, 3, 4, 16}) {
    if (cell > axis.in - cells) break;
    const int64_t windows = int64_t(windows_over(axis, cell + cells - 1).end) - windows_over(axis, cell).begin;
    expect(windows <= windows_over_most(axis, cells), "more windows than said", axis, placement, cell, cells);
  }
}

template <class Real>
void check_small(int bits) {
  const std::vector<Real> grid = samples<Real>();
  for (const Placement placement : {Placement::even, Placement::torch}) {
    for (int32_t n = 1; n <= 64; ++n) {
      for (int32_t k = 1; k <= n; ++k) {
        const int32_t most = placement == Placement::torch ? n - k + 1 : 64;
        for (int32_t o = 1; o <= most; ++o) {
          const PoolAxis axis = make_pool_axis(n, k, o, placement, bits);
          for (int32_t i = 0; i < o; ++i) {
            check_starts(axis, placement, i, grid);
            if (i > 0)
              expect(axis.earliest(i - 1) <= axis.earliest(i) && axis.latest(i - 1) <= axis.latest(i), "order", axis,
                     placement, i, 0);
          }
          for (int32_t cell = 0; cell < n; ++cell) {
            check_cell(axis, placement, cell);
            check_cells(axis, placement, cell);
          }
        }
      }
    }
  }
}

template <class Real>
void check_large(int bits) {
  std::mt19937_64 random(7);
  const auto below = [&](int64_t limit) { return int64_t(random() % uint64_t(limit)); };
  std::vector<Real> grid = samples<Real>();
  for (int round = 0; round < 20000; ++round) {
    const int64_t n = 1 + below(int64_t(1) << (1 + round % 31));
    if (n > INT32_MAX) continue;
    const int64_t k = 1 + below(round % 3 ? std::min<int64_t>(n, 8) : n);
    const Placement placement = round % 2 ? Placement::torch : Placement::even;
    const int64_t most = placement == Placement::torch ? n - k + 1 : INT32_MAX;
    const int64_t o = 1 + below(round % 5 ? std::min<int64_t>(most, n) : most);
    const PoolAxis axis = make_pool_axis(int32_t(n), int32_t(k), int32_t(o), placement, bits);
    for (Real &u : grid) u = std::ldexp(Real(below(1 << 24)), -24);
    for (const int64_t i : {int64_t(0), below(o), below(o), o - 1}) check_starts(axis, placement, int32_t(i), grid);
    for (const int64_t cell : {int64_t(0), below(n), below(n), n - 1}) {
      check_cell(axis, placement, int32_t(cell));
      check_cells(axis, placement, int32_t(cell));
    }
  }
}

}  // namespace

int main() {
  check_small<float>(24);
  check_small<double>(53);
  check_large<float>(24);
  check_large<double>(53);
  if (failures > 0) std::fprintf(stderr, "%d failures\n", failures);
  return failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
