// SPDX-License-Identifier: Apache-2.0
#include "runtime/overlap.h"

#include <algorithm>
#include <numeric>

#include "runtime/hash.h"

namespace baracuda {
namespace {

// Both questions are one: has  sum c_i x_i = target,  0 <= x_i <= b_i,  c_i > 0,  a solution in
// integers? It is NP-complete in the number of terms, but after terms that are multiples of one
// another are merged (which leaves one term of a dense block), two or three terms are the rule.
struct Term {
  int64_t coefficient;
  int64_t bound;
};

constexpr int kMaxTerms = 2 * kMaxRank + 2;
constexpr int64_t kWorkBound = 1 << 14;
// Two slices of one array leave the same few remainders for its inner axes, whatever the outer ones
// are. The latest that had no solution are kept, so that the work is a sum over the axes rather
// than a product.
constexpr int kRememberedBits = 9;
constexpr int kRemembered = 1 << kRememberedBits;

using Wide = __int128;

int64_t floor_div(Wide a, int64_t b) { return int64_t(a >= 0 ? a / b : -((-a + b - 1) / b)); }
int64_t ceil_div(Wide a, int64_t b) { return -floor_div(-a, b); }

// The inverse of a modulo m, for coprime a and m.
int64_t inverse_modulo(int64_t a, int64_t m) {
  int64_t r0 = m, r1 = a % m, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const int64_t q = r0 / r1;
    const int64_t r2 = r0 - q * r1;
    const int64_t t2 = t0 - q * t1;
    r0 = r1, r1 = r2, t0 = t1, t1 = t2;
  }
  return t0 < 0 ? t0 + m : t0;
}

class Equation {
 public:
  void add(int64_t coefficient, int64_t bound) {
    if (coefficient != 0 && bound > 0) terms_[count_++] = {coefficient, bound};
  }

  Overlap has_solution(Wide target) {
    if (target < 0) return Overlap::none;
    merge();
    Wide reach = 0;
    int64_t common = 0;
    for (int i = 0; i < count_; ++i) {
      reach += Wide(terms_[i].coefficient) * terms_[i].bound;
      common = std::gcd(common, terms_[i].coefficient);
      reach_[i] = reach;
      gcd_[i] = common;
    }
    work_ = 0;
    if (count_ > 2) std::fill(failed_, failed_ + kRemembered, Failed{});
    return solve(count_ - 1, target);
  }

 private:
  // {c1 x} + {c2 y} is again an unbroken run of multiples of c1 when c2 is one that starts within
  // the first run.
  void merge() {
    std::sort(terms_, terms_ + count_, [](Term a, Term b) { return a.coefficient < b.coefficient; });
    int kept = 0;
    for (int i = 0; i < count_; ++i) {
      bool merged = false;
      for (int k = 0; k < kept && !merged; ++k) {
        Term &low = terms_[k];
        const int64_t factor = terms_[i].coefficient / low.coefficient;
        if (terms_[i].coefficient % low.coefficient == 0 && factor <= low.bound + 1) {
          low.bound += factor * terms_[i].bound;
          merged = true;
        }
      }
      if (!merged) terms_[kept++] = terms_[i];
    }
    count_ = kept;
  }

  // Terms 0..last, the largest coefficient first, because it leaves the fewest choices.
  Overlap solve(int last, Wide target) {
    if (target == 0) return Overlap::some;
    if (last < 0 || target > reach_[last] || target % gcd_[last] != 0) return Overlap::none;
    if (last == 0) return Overlap::some;
    if (last == 1) return solve_two(target);
    const uint64_t key = uint64_t(target) * kMaxTerms + uint64_t(last);
    Failed &failed = failed_[fibonacci_hash(key, kRememberedBits)];
    if (failed.last == last && failed.target == target) return Overlap::none;
    const Term &term = terms_[last];
    const int64_t low = std::max<int64_t>(0, ceil_div(target - reach_[last - 1], term.coefficient));
    const int64_t high = std::min<int64_t>(term.bound, floor_div(target, term.coefficient));
    for (int64_t x = low; x <= high; ++x) {
      if (++work_ > kWorkBound) return Overlap::undecided;
      const Overlap found = solve(last - 1, target - Wide(x) * term.coefficient);
      if (found != Overlap::none) return found;
    }
    failed = {target, last};
    return Overlap::none;
  }

  Overlap solve_two(Wide target) const {
    const Term &small = terms_[0];
    const Term &large = terms_[1];
    const int64_t common = gcd_[1];
    const int64_t modulus = small.coefficient / common;
    // large.x = target (mod small.coefficient) fixes x modulo `modulus`.
    const int64_t residue =
        int64_t((target / common) % modulus * Wide(inverse_modulo(large.coefficient / common, modulus)) % modulus);
    const int64_t low =
        std::max<int64_t>(0, ceil_div(target - Wide(small.coefficient) * small.bound, large.coefficient));
    const int64_t x = low + ((residue - low) % modulus + modulus) % modulus;
    return x <= large.bound && Wide(x) * large.coefficient <= target ? Overlap::some : Overlap::none;
  }

  struct Failed {
    Wide target;
    int last;  // 0: none, because only longer sums are kept
  };

  Failed failed_[kRemembered];
  Term terms_[kMaxTerms];
  Wide reach_[kMaxTerms];
  int64_t gcd_[kMaxTerms];
  int count_ = 0;
  int64_t work_ = 0;
};

// A view in half bytes: addresses low + sum stride.x + 0..width-1 with positive strides.
struct Extent {
  Wide low;
  Wide high;  // one past the last half byte
  int64_t width;
  int rank = 0;
  int64_t stride[kMaxRank];
  int64_t bound[kMaxRank];  // extent - 1 > 0
};

// False when the view has no elements.
bool describe(const Tensor &tensor, Extent &view) {
  view.width = nibbles(tensor.dtype);
  view.low = Wide(reinterpret_cast<uintptr_t>(tensor.data)) * kNibblesPerByte + tensor.phase;
  Wide span = 0;
  for (int axis = 0; axis < tensor.rank(); ++axis) {
    const int64_t bound = tensor.shape[axis] - 1;
    if (bound < 0) return false;
    if (bound == 0) continue;
    const int64_t stride = tensor.stride[axis] * view.width;
    if (stride < 0) view.low += Wide(stride) * bound;
    view.stride[view.rank] = stride < 0 ? -stride : stride;
    view.bound[view.rank] = bound;
    span += Wide(view.stride[view.rank]) * bound;
    ++view.rank;
  }
  view.high = view.low + span + view.width;
  return true;
}

}  // namespace

Overlap shared_memory(const Tensor &a, const Tensor &b) {
  Extent first;
  Extent second;
  if (!describe(a, first) || !describe(b, second)) return Overlap::none;
  if (first.high <= second.low || second.high <= first.low) return Overlap::none;
  // first.low + sum s x + u = second.high - 1 - (sum t y + v), the second view counted from its end.
  Equation equation;
  for (const Extent *view : {&first, &second}) {
    for (int axis = 0; axis < view->rank; ++axis) equation.add(view->stride[axis], view->bound[axis]);
    equation.add(1, view->width - 1);
  }
  return equation.has_solution(second.high - 1 - first.low);
}

Overlap self_overlap(const Tensor &tensor) {
  Extent view;
  if (!describe(tensor, view)) return Overlap::none;
  int order[kMaxRank];
  for (int axis = 0; axis < view.rank; ++axis) {
    int place = axis;
    for (; place > 0 && view.stride[order[place - 1]] > view.stride[axis]; --place) order[place] = order[place - 1];
    order[place] = axis;
  }
  // Nested strides, each at least as long as all that lies within it, need no search.
  bool nested = true;
  Wide inner = view.width;
  for (int i = 0; i < view.rank && nested; ++i) {
    nested = view.stride[order[i]] >= inner;
    inner += Wide(view.stride[order[i]]) * view.bound[order[i]];
  }
  if (nested) return Overlap::none;
  // Two elements differ by d; of d and -d take the one whose first non-zero entry, at axis k, is
  // positive. Entries after k and the places within the elements may have either sign, so they
  // are counted from their least value.
  Overlap worst = Overlap::none;
  for (int k = 0; k < view.rank; ++k) {
    Equation equation;
    Wide target = view.width - 1 - view.stride[k];
    equation.add(view.stride[k], view.bound[k] - 1);
    for (int axis = k + 1; axis < view.rank; ++axis) {
      equation.add(view.stride[axis], 2 * view.bound[axis]);
      target += Wide(view.stride[axis]) * view.bound[axis];
    }
    equation.add(1, 2 * (view.width - 1));
    const Overlap found = equation.has_solution(target);
    if (found == Overlap::some) return Overlap::some;
    if (found == Overlap::undecided) worst = Overlap::undecided;
  }
  return worst;
}

bool same_elements(const Tensor &a, const Tensor &b) {
  if (a.data != b.data || a.phase != b.phase || !(a.dtype == b.dtype) || a.rank() != b.rank()) return false;
  for (int axis = 0; axis < a.rank(); ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
    if (a.shape[axis] > 1 && a.stride[axis] != b.stride[axis]) return false;
  }
  return true;
}

}  // namespace baracuda
