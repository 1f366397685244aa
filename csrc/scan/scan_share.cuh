// SPDX-License-Identifier: Apache-2.0
// A warp's share of a row, or of several: how its elements come into registers, and its results to memory.
#pragma once

#include "scan/scan_run.cuh"

namespace baracuda::scan {

// The value before a row's first element.
template <class Op>
__device__ __forceinline__ typename Op::Value initial_value(const Op &op, const Geometry &g, int64_t row) {
  if constexpr (Op::kInitial) {
    using T = at<0, typename Op::Inputs>;
    constexpr int slot = Layout<Op>::kInitialSlot;
    if (g.data[slot]) return widen<typename Op::Acc>(*row_start<T>(g, slot, row));
  }
  return op.start();
}

// The value before a row's first step that was given to an operator with kFinal, or 0. `place(slot)` is where the row
// is in an operand of one element for each.
template <class Op, class Place>
__device__ __forceinline__ typename Op::Acc given_value(const Geometry &g, const Place &place) {
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Inputs>;
    constexpr int slot = Layout<Op>::kInitialSlot;
    if (g.data[slot]) return widen<typename Op::Acc>(reinterpret_cast<const T *>(g.data[slot])[place(slot)]);
  }
  return typename Op::Acc(0);
}
// What an operator finds behind the last element of a row, as its neighbour.
template <class Op>
__device__ __forceinline__ typename Op::Acc behind_last(const Op &op, [[maybe_unused]] typename Op::Acc last,
                                                        [[maybe_unused]] typename Op::Acc given) {
  if constexpr (Op::kFinal) {
    return given;
  } else {
    return op.behind(last);
  }
}

template <class Op, class Place>
__device__ __forceinline__ void store_final(const Geometry &g, const Place &place, typename Op::Value value) {
  if constexpr (Op::kFinal) {
    using T = at<0, typename Op::Outputs>;
    constexpr int slot = Layout<Op>::kFinalSlot;
    if (g.data[slot]) reinterpret_cast<T *>(g.data[slot])[place(slot)] = narrow<T>(value);
  }
}

// Puts an element's outputs among those of its lane, where `kBack` from the far end. In ascending order; narrow ones
// wait in `pending` for the next, so that two are rounded by one instruction.
template <class Op, int kCount, bool kBack = false>
__device__ __forceinline__ void keep(Held<typename Op::Outputs, kCount> &outputs, int i,
                                     const typename Op::Result &result,
                                     typename Op::Acc (&pending)[Op::Outputs::size]) {
  for_each<Op::Outputs::size>([&](auto k) {
    using U = at<k(), typename Op::Outputs>;
    static_assert(!kBack || (sizeof(U) >= 2 && !Op::kPosition));
    const int to = kBack ? kCount - 1 - i : i;
    if constexpr (Op::kPosition && k() == 1) {
      held<k()>(outputs).put(to, U(index_of(result)));
    } else if constexpr (kIsHalf<U> && kCount % 2 == 0) {
      if (i % 2 == 0) {
        pending[k()] = result.out[k()];
      } else {
        const float earlier = float(pending[k()]);
        const float later = float(result.out[k()]);
        held<k()>(outputs).put_pair(to & ~1, kBack ? later : earlier, kBack ? earlier : later);
      }
    } else {
      held<k()>(outputs).put(to, narrow<U>(result.out[k()]));
    }
  });
}

struct Accesses {
  int of[kMaxScanOperands];
  bool vectors;  // no input is strided
};

// Pieces are kept in shared memory with their low address bits mixed, so that neither reading
// consecutive pieces nor reading a lane's run of kPieces has bank conflicts.
template <int kPieces>
__device__ __forceinline__ int mixed(int piece) {
  constexpr int kShift = kPieces > 8 ? 4 : 3;
  return kPieces == 1 ? piece : piece ^ ((piece >> kShift) & 7);
}

// Where the elements of a warp are: slot s of its 32 * kRun holds element `first + s % width` of row
// `row + s / width`, if there is such. `width` is a power of two, and all slots where the row is
// longer.
struct Slots {
  int64_t row;
  int64_t first;
  int shift;  // log2(width)
  int rows;   // that there are
  int left;   // elements of a row from `first` on; at most width + 1, which tells that more follow

  __device__ __forceinline__ Slots(const Geometry &g, int64_t row, int64_t first, int shift, int slots)
      : row(row),
        first(first),
        shift(shift),
        rows(int(min(max(g.rows - row, int64_t(0)), int64_t(slots >> shift)))),
        left(int(min(max(g.length - first, int64_t(0)), int64_t(1 << shift) + 1))) {}
  __device__ __forceinline__ int place(int slot) const { return slot & ((1 << shift) - 1); }
  __device__ __forceinline__ bool exists(int slot) const { return (slot >> shift) < rows && place(slot) < left; }
};

// Whether an operator's rows are mostly scanned from the far end of memory: gradients of forward scans. Runs are then
// kept in the order of memory, which saves turning them.
template <class Op, int kRun>
constexpr bool kFromFarEnd = Op::kNeighbour && kRun * Bytes<typename Op::Inputs>::widest() > 16;

// `kKeeps`: whether the sums of kKeepsSums are kept from reduce() to finish(). `kBack`: whether a lane's run lies in
// its registers from the far end on.
template <class Op, int kRun, bool kKeeps = false, bool kBack = kFromFarEnd<Op, kRun>>
struct Share {
  using A = typename Op::Acc;
  using Map = typename Op::Map;
  static constexpr int kItems = kWarp * kRun;
  static constexpr int kInputs = Op::Inputs::size;
  static constexpr int kLast = kInputs - 1;
  static constexpr int kWidest = Bytes<typename Op::Inputs>::widest() > Bytes<typename Op::Outputs>::widest()
                                     ? Bytes<typename Op::Inputs>::widest()
                                     : Bytes<typename Op::Outputs>::widest();
  // A warp's room for one operand.
  static constexpr int kStageBytes = kItems * kWidest;
  // Runs of one piece: some may be there and others not. Of longer ones all are, or elements are taken one by one.
  static constexpr bool kShort = kRun * Bytes<typename Op::Inputs>::widest() <= 16;
  // Of a warp that has no more than one row, which may hold other numbers than powers of two.
  static constexpr int kShift = std::bit_width(unsigned(kItems - 1));
  __device__ __forceinline__ static Slots one_row(const Geometry &g, int64_t row, int64_t first) {
    return Slots(g, row, first, kShift, 1 << kShift);
  }

  // Where element i of the run is in the registers.
  __device__ __forceinline__ static constexpr int spot(int i) { return kBack ? kRun - 1 - i : i; }

  Held<typename Op::Inputs, kRun> raw;
  A next;                                // what follows the lane's run
  Common<Op, kKeeps ? kRun : 0> common;  // of the run
  bool steady = false;                   // for operators with kRestarts: there is none in the run

  // The lane's own row, or one that there is.
  __device__ __forceinline__ static int64_t row_of(const Slots &slots, int lane) {
    return slots.row + max(min((lane * kRun) >> slots.shift, slots.rows - 1), 0);
  }
  __device__ __forceinline__ static bool whole_run(const Slots &slots, int lane) {
    return ((lane * kRun) >> slots.shift) < slots.rows && slots.place(lane * kRun) + kRun <= slots.left;
  }
  // Whether runs go to memory and back in whole pieces.
  __device__ __forceinline__ static bool pieces(const Slots &slots, int lane) {
    return __all_sync(kAll, whole_run(slots, lane) || (kShort && left_of(slots, lane) <= 0));
  }
  // From the first slots of each lane's row, where a slot's element is in memory.
  template <class T>
  __device__ __forceinline__ static T *address(const Slots &slots, T *own, int64_t step, int slot) {
    T *start = own;
    if ((1 << slots.shift) < kItems)
      start = reinterpret_cast<T *>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(own), slot / kRun));
    return start + slots.place(slot) * step;
  }
  // Where the lane's row begins in the operands.
  using Rows = int64_t[Layout<Op>::kLines];
  __device__ __forceinline__ static void rows_of(const Geometry &g, const Slots &slots, int lane, Rows &rows) {
    row_offsets(g, row_of(slots, lane), 0, rows);
  }
  // And in operands of one element for each row.
  __device__ __forceinline__ static auto place_of(const Geometry &g, const Slots &slots, int lane) {
    return [&g, &slots, lane](int slot) { return row_offset(g, slot, row_of(slots, lane)); };
  }
  template <class T>
  __device__ __forceinline__ static T *own_row(const Geometry &g, int operand, const Slots &slots, const Rows &rows) {
    return reinterpret_cast<T *>(g.data[operand]) + (rows[operand] + slots.first * g.step[operand]);
  }

  // One by one, neighbouring lanes neighbouring elements, into memory that the warp shares.
  template <class T>
  __device__ __forceinline__ static void store_staged(const Slots &slots, const T *own, int64_t step, std::byte *stage,
                                                      int lane) {
    constexpr int kAtOnce = kRun % 8 == 0 ? 8 : kRun % 4 == 0 ? 4 : kRun % 2 == 0 ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < kRun; i += kAtOnce) {
      T value[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int slot = (i + j) * kWarp + lane;
        const T *from = address(slots, own, step, slot);
        value[j] = slots.exists(slot) ? *from : T{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) *staged<T>(stage, (i + j) * kWarp + lane) = value[j];
    }
  }
  template <class T>
  __device__ __forceinline__ static void load_run(Packed<T, kRun> &run, std::byte *stage, int lane) {
    using P = Packed<T, kRun>;
#pragma unroll
    for (int p = 0; p < P::kPieces; ++p)
      run.load_piece(p, stage + mixed<P::kPieces>(lane * P::kPieces + p) * P::kPieceBytes);
  }
  template <class T>
  __device__ __forceinline__ static T *staged(std::byte *stage, int slot) {
    using P = Packed<T, kRun>;
    return reinterpret_cast<T *>(stage + mixed<P::kPieces>(slot / P::kPieceItems) * P::kPieceBytes) +
           slot % P::kPieceItems;
  }

  // All at once.
  __device__ __forceinline__ void load(const Op &op, const Geometry &g, const Accesses &access, const Slots &slots,
                                       const Rows &rows, std::byte *stage, int lane) {
    const bool whole = pieces(slots, lane);
    const A behind = behind_share(g, slots, rows, lane);
    if (whole && access.vectors) {
      // All loads are under way before the first is waited for.
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        const T *own = own_row<const T>(g, k(), slots, rows);
        const int place = slots.place(lane * kRun);
        if (kShort) held<k()>(raw) = {};
        if (!kShort || whole_run(slots, lane))
          held<k()>(raw).load(access.of[k()] == kBackward ? own - (place + kRun - 1) : own + place);
      });
      for_each<kInputs>([&](auto k) { held<k()>(raw).turn_if((access.of[k()] == kBackward) != kBack); });
    } else {
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        store_staged(slots, own_row<const T>(g, k(), slots, rows), g.step[k()], stage, lane);
        __syncwarp();
        load_run<T>(held<k()>(raw), stage, lane);
        if (kBack) held<k()>(raw) = held<k()>(raw).turned();
        __syncwarp();
      });
    }
    find_next(op, g, slots, behind, lane);
    find_restarts();
  }

  // For the last lane, the neighbour behind the share.
  __device__ __forceinline__ static A behind_share(const Geometry &g, const Slots &slots, const Rows &rows, int lane) {
    if constexpr (Op::kNeighbour) {
      using T = at<kLast, typename Op::Inputs>;
      if (lane == kWarp - 1 && left_of(slots, lane) > kRun)
        return widen<A>(own_row<const T>(g, kLast, slots, rows)[kItems * g.step[kLast]]);
    }
    return A(0);
  }
  __device__ __forceinline__ static int left_of(const Slots &slots, int lane) {
    return ((lane * kRun) >> slots.shift) < slots.rows ? slots.left - slots.place(lane * kRun) : 0;
  }
  __device__ __forceinline__ void find_next(const Op &op, const Geometry &g, const Slots &slots, A behind, int lane) {
    if constexpr (Op::kNeighbour) {
      using T = at<kLast, typename Op::Inputs>;
      auto &last = held<kLast>(raw);
      const A following = shuffle_down(last.template widened<A>(spot(0)), 1);
      const int left = left_of(slots, lane);
      next = lane < kWarp - 1 ? following : behind;
      A given = A(0);
      if constexpr (Op::kFinal) {
        if (left > 0 && left <= kRun) given = given_value<Op>(g, place_of(g, slots, lane));
      }
      if (left == kRun) {
        next = behind_last(op, last.template widened<A>(spot(kRun - 1)), given);
      } else if (left > 0 && left < kRun) {
#pragma unroll
        for (int i = 1; i < kRun; ++i)
          if (i == left)
            last.replace(spot(i), narrow<T>(behind_last(op, last.template widened<A>(spot(i - 1)), given)));
      }
    }
  }

  // Element i of the lane's run.
  __device__ __forceinline__ typename Op::Item item(int i, uint32_t position, uint32_t onward) {
    typename Op::Item item = {};
    for_each<kInputs>([&](auto k) { item.in[k()] = held<k()>(raw).template widened<A>(spot(i)); });
    if constexpr (kRestarts<Op>) {
      // Any two numbers that differ where the sum starts again.
      item.in[kLast] = A(held<kLast>(raw).word[spot(i) / 2] & (spot(i) % 2 ? 0xffff0000u : 0xffffu) ? 1 : 0);
      item.next = A(0);
    } else if constexpr (Op::kNeighbour) {
      item.next = i + 1 < kRun ? held<kLast>(raw).template widened<A>(spot(i + 1 < kRun ? i + 1 : i)) : next;
    }
    if constexpr (Op::kPosition) item.position = position + uint32_t(i) * onward;
    return item;
  }
  __device__ __forceinline__ static uint32_t position_of(const Op &op, const Geometry &g, const Slots &slots,
                                                         int lane) {
    const int64_t place = slots.first + slots.place(lane * kRun);
    return uint32_t(op.flags.reverse ? g.length - 1 - place : place);
  }
  __device__ __forceinline__ static uint32_t onward(const Op &op) { return op.flags.reverse ? 0xffffffffu : 1u; }
  // Lanes that hold a row.
  __device__ __forceinline__ static int lanes(const Slots &slots) {
    return slots.shift >= kShift ? kWarp : max((1 << slots.shift) / kRun, 1);
  }

  // For operators with kInPairs.
  template <bool kSmaller>
  __device__ __forceinline__ A extreme_of_run() {
    using T = at<0, typename Op::Inputs>;
    Packed<T, 2> pair = {{held<0>(raw).word[0]}};
#pragma unroll
    for (int i = 1; i < kRun / 2; ++i) pair.word[0] = extreme_pair<T, kSmaller>(pair.word[0], held<0>(raw).word[i]);
    pair.word[0] = extreme_pair<T, kSmaller>(pair.word[0], twice_high(pair.word[0]));
    return pair.template widened<A>(0);
  }
  template <bool kSmaller>
  __device__ __forceinline__ uint32_t extremes(uint32_t carry, Packed<at<0, typename Op::Inputs>, kRun> &run) {
    using T = at<0, typename Op::Inputs>;
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      const uint32_t pair = held<0>(raw).word[i];
      run.word[i] = extreme_pair<T, kSmaller>(extreme_pair<T, kSmaller>(pair, twice_low(pair)), carry);
      carry = twice_high(run.word[i]);
    }
    return carry;
  }
  // Of the run and another pair.
  __device__ __forceinline__ bool zeros_of_both_signs(uint32_t pair) {
    ZerosSeen zeros;
    zeros.see(pair);
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) zeros.see(held<0>(raw).word[i]);
    return zeros.both();
  }
  // The run's outputs; false where pairs don't do.
  __device__ __forceinline__ bool scan_pairs(const Op &op, A value, Packed<at<0, typename Op::Inputs>, kRun> &run) {
    using T = at<0, typename Op::Inputs>;
    const bool smallest = op.flags.smallest;
    Packed<T, 2> pair;
    pair.put_pair(0, turned(value, smallest), turned(value, smallest));
    const uint32_t carry = pair.word[0];
    pair.word[0] = smallest ? extremes<true>(carry, run) : extremes<false>(carry, run);
    if (value <= A(0) && !(turned(pair.template widened<A>(0), smallest) < A(0)) && zeros_of_both_signs(carry))
      return false;
    if (op.flags.exclusive) {
#pragma unroll
      for (int i = kRun / 2 - 1; i >= 0; --i)
        run.word[i] = __byte_perm(i > 0 ? run.word[i > 0 ? i - 1 : 0] : carry, run.word[i], 0x5432);
    }
    return true;
  }
  // For operators with kRestarts: puts in the place of the last input where elements and their neighbours differ.
  __device__ __forceinline__ void find_restarts() {
    if constexpr (kRestarts<Op>) {
      using T = at<kLast, typename Op::Inputs>;
      auto &last = held<kLast>(raw);
      Packed<T, 2> behind;
      behind.put_pair(0, float(next), float(next));
      uint32_t differ = 0;
      for (const uint32_t word : last.word) differ |= word ^ behind.word[0];
      steady = differ == 0;
      if (steady) return;
      uint32_t behind_pair = one_zero_one_nan<T>(behind.word[0]);
#pragma unroll
      for (int i = kRun / 2 - 1; i >= 0; --i) {
        uint32_t &word = last.word[spot(2 * i) / 2];
        const uint32_t pair = one_zero_one_nan<T>(word);
        word = pair ^ (kBack ? __byte_perm(behind_pair, pair, 0x5432) : __byte_perm(pair, behind_pair, 0x5432));
        behind_pair = pair;
      }
    }
  }

  // The maps up to the end of each lane's run, within its row.
  template <class Again>
  __device__ __forceinline__ Map reduce(const Op &op, const Geometry &g, const Slots &slots, int lane,
                                        const Again &again) {
    const uint32_t position = position_of(op, g, slots, lane);
    const auto get = [&](int i) { return item(i, position, onward(op)); };
    const auto fold_run = [&](const auto &largest) { return fold<kRun>(op, common, get, again, largest); };
    Map own;
    if constexpr (kInPairs<Op>) {
      own = turned(op.flags.smallest ? extreme_of_run<true>() : extreme_of_run<false>(), op.flags.smallest);
      if (own == A(0) && zeros_of_both_signs(kNoZeros)) own = fold_run(nullptr);
    } else if constexpr (kRestarts<Op>) {
      if (steady) {
        own = op.map_of(get(0).in[0], false);
#pragma unroll
        for (int i = 1; i < kRun; ++i) own.sum = add(own.sum, get(i).in[0]);
      } else {
        own = fold_run(nullptr);
      }
    } else {
      own = fold_run([&] {
        if constexpr (kKeysInPairs<Op> && kRun > 1) {
          using T = at<0, typename Op::Inputs>;
          Packed<T, 2> pair = {{held<0>(raw).word[0]}};
#pragma unroll
          for (int i = 1; i < kRun / 2; ++i) pair.word[0] = larger_pair<T>(pair.word[0], held<0>(raw).word[i]);
          return larger_of(pair.template widened<A>(0), pair.template widened<A>(1));
        } else {
          return largest_key<kRun, Op>(get);
        }
      });
    }
    return warp_scan(op, own, lane, lanes(slots));
  }

  __device__ __forceinline__ Map reduce(const Op &op, const Geometry &g, const Slots &slots, int lane) {
    static_assert(!kKeeps);
    return reduce(op, g, slots, lane, [](int) { return typename Op::Item{}; });
  }
  // Element i of the lane's run once more, from memory, as long as no output has been stored.
  __device__ __forceinline__ static auto reader(const Geometry &g, const Slots &slots, const Rows &rows, int lane) {
    return [&g, &slots, &rows, lane](int i) {
      typename Op::Item item = {};
      for_each<kInputs>([&](auto k) {
        using T = at<k(), typename Op::Inputs>;
        const int slot = lane * kRun + i;
        const T *own = own_row<const T>(g, k(), slots, rows);
        if (slots.exists(slot)) item.in[k()] = widen<A>(own[slots.place(slot) * g.step[k()]]);
      });
      return item;
    };
  }

  template <class U>
  __device__ __forceinline__ static void store_one(const Slots &slots, U *own, int64_t step, bool vectors,
                                                   bool backward, Packed<U, kRun> &run, std::byte *stage, int lane) {
    using P = Packed<U, kRun>;
    if constexpr (P::kPieces == 1) {
      if (vectors) {
        run.turn_if(backward != kBack);
        const int place = slots.place(lane * kRun);
        if (!kShort || whole_run(slots, lane)) run.store(backward ? own - (place + kRun - 1) : own + place);
        return;
      }
    }
    // Runs from the far end make rows in the order of memory.
    const bool mirrored = kBack && vectors && backward;
    if constexpr (kBack) run.turn_if(!mirrored);
    const int first_piece = (mirrored ? lane ^ (lanes(slots) - 1) : lane) * P::kPieces;
    const int first = mixed<P::kPieces>(first_piece);
#pragma unroll
    for (int p = 0; p < P::kPieces; ++p) {
      const int piece = std::has_single_bit(unsigned(P::kPieces)) ? first ^ p : mixed<P::kPieces>(first_piece + p);
      run.store_piece(p, stage + piece * P::kPieceBytes);
    }
    __syncwarp();
    if (vectors) {
      Packed<U, P::kPieceItems> piece[P::kPieces];
#pragma unroll
      for (int p = 0; p < P::kPieces; ++p) piece[p].load(stage + mixed<P::kPieces>(p * kWarp + lane) * P::kPieceBytes);
      if ((1 << slots.shift) >= kItems) {
        const bool down = backward && !mirrored;
        const int onward = down ? -kWarp * P::kPieceItems : kWarp * P::kPieceItems;
        U *to = own + (down ? 1 - (lane + 1) * P::kPieceItems : lane * P::kPieceItems) - (mirrored ? kItems - 1 : 0);
#pragma unroll
        for (int p = 0; p < P::kPieces; ++p) {
          if constexpr (!kBack) piece[p].turn_if(backward);
          if (!kShort || slots.exists((p * kWarp + lane) * P::kPieceItems)) piece[p].store(to + p * onward);
        }
      } else {
#pragma unroll
        for (int p = 0; p < P::kPieces; ++p) {
          const int slot = (p * kWarp + lane) * P::kPieceItems;
          U *to = kBack ? address(slots, mirrored ? own - ((1 << slots.shift) - 1) : own, 1, slot)
                        : address(slots, own, step, slot) - (backward ? P::kPieceItems - 1 : 0);
          if constexpr (!kBack) piece[p].turn_if(backward);
          if (!kShort || slots.exists(slot)) piece[p].store(to);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kRun; ++i) {
        const int slot = i * kWarp + lane;
        U *to = address(slots, own, step, slot);
        if (slots.exists(slot)) *to = *staged<U>(stage, slot);
      }
    }
    __syncwarp();
  }

  // The lane's outputs, with `value` before its run.
  template <class Again>
  __device__ __forceinline__ void outputs(const Op &op, const Geometry &g, const Slots &slots, typename Op::Value value,
                                          int lane, Held<typename Op::Outputs, kRun> &outputs, const Again &again) {
    if constexpr (kInPairs<Op>) {
      if (scan_pairs(op, value, held<0>(outputs))) return;
    }
    if constexpr (kRestarts<Op>) {
      if (steady) {
        for (uint32_t &word : held<0>(outputs).word) word = 0;
        return;
      }
    }
    const uint32_t position = position_of(op, g, slots, lane);
    A pending[Op::Outputs::size];
    // After the row's last element: stored once, not in each element's code.
    [[maybe_unused]] const int left = left_of(slots, lane);
    [[maybe_unused]] typename Op::Value final_value = value;
    run<kRun>(
        op, value, common, [&](int i) { return item(i, position, onward(op)); }, again,
        [&](int i, const typename Op::Result &result, const typename Op::Value &after) {
          keep<Op, kRun, kBack>(outputs, i, result, pending);
          if constexpr (Op::kFinal) {
            if (i + 1 == left) final_value = after;
          }
        });
    if constexpr (Op::kFinal) {
      if (left > 0 && left <= kRun) store_final<Op>(g, place_of(g, slots, lane), final_value);
    }
  }
  __device__ __forceinline__ void outputs(const Op &op, const Geometry &g, const Slots &slots, typename Op::Value value,
                                          int lane, Held<typename Op::Outputs, kRun> &outputs) {
    static_assert(!kKeeps);
    this->outputs(op, g, slots, value, lane, outputs, [](int) { return typename Op::Item{}; });
  }
  __device__ __forceinline__ void finish(const Op &op, const Geometry &g, const Accesses &access, const Slots &slots,
                                         const Rows &rows, typename Op::Value value, std::byte *stage, int lane) {
    const bool whole = pieces(slots, lane);
    if constexpr (kAnew<Op>) {
      const uint32_t nothing = uint32_t(g.rank) >> 31;
      for_each<kInputs>([&](auto k) { held<k()>(raw).forget(nothing); });
    }
    Held<typename Op::Outputs, kRun> outputs;
    this->outputs(op, g, slots, value, lane, outputs, reader(g, slots, rows, lane));
    for_each<Op::Outputs::size>([&](auto k) {
      using U = at<k(), typename Op::Outputs>;
      constexpr int slot = kInputs + k();
      if (Op::Outputs::size == 1 || g.data[slot])
        store_one(slots, own_row<U>(g, slot, slots, rows), g.step[slot], whole && access.of[slot] != kStrided,
                  access.of[slot] == kBackward, held<k()>(outputs), stage, lane);
    });
  }
};

}  // namespace baracuda::scan
