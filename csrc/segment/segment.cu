// SPDX-License-Identifier: Apache-2.0
#include "segment/segment.cuh"

namespace baracuda {
namespace {

constexpr int64_t kNarrowLimit = int64_t(1) << 31;

template <class Visit>
size_t with_floating_type(DLDataType dtype, const Visit &visit) {
  if (dtype == DTypeOf<double>::value) return visit(TypeTag<double>{}, TypeTag<uint64_t>{});
  return visit(TypeTag<float>{}, TypeTag<uint32_t>{});
}

// Of what is kept for each column of a segment.
size_t forward_state(const SegmentProblem &problem, bool with_arg) {
  const bool wide = problem.dtype.bits == 64;
  if (problem.extreme() && with_arg)
    return wide ? sizeof(SegmentArgMax<uint64_t, uint32_t>::State) : sizeof(SegmentArgMax<uint32_t, uint32_t>::State);
  if (problem.extreme()) return wide ? sizeof(uint64_t) : sizeof(uint32_t);
  const bool integers = problem.dtype.code == kDLInt || problem.dtype.code == kDLUInt;
  return wide || integers ? sizeof(uint64_t) : sizeof(float);
}

size_t backward_state(const SegmentProblem &problem) {
  return with_floating_type(problem.dtype, [&](auto real, auto bits) {
    using Real = typename decltype(real)::type;
    using Bits = typename decltype(bits)::type;
    if (problem.kind == SegmentKind::prod) return sizeof(SegmentProduct<Real>);
    if (problem.even) return sizeof(typename SegmentTally<Bits, uint32_t>::State);
    return sizeof(typename SegmentArgMax<Bits, uint32_t>::State);
  });
}

size_t packed_product(const SegmentProblem &problem) {
  return with_floating_type(
      problem.dtype, [](auto real, auto) { return sizeof(SegmentPackedProduct<typename decltype(real)::type>); });
}

SegmentNumbers take_numbers(Workspace &workspace, int64_t count, bool wide) {
  if (wide) return {workspace.take<int64_t>(count), true};
  return {workspace.take<int32_t>(count), false};
}

// Whether there are kernels that don't sort.
bool has_cells(const SegmentProblem &problem) {
  const bool floats = problem.dtype.code != kDLInt && problem.dtype.code != kDLUInt;
  return floats && problem.dtype.bits < 64 && problem.kind != SegmentKind::prod;
}

// Pieces of the workspace that are all -1 in the beginning.
template <class Take>
void take_bounds(Workspace &workspace, SegmentSpace &space, const Take &take) {
  const size_t before = workspace.size();
  space.bounds.data = workspace.take<uint4>(0);
  take();
  space.bounds.count = int64_t((workspace.size() - before) / sizeof(uint4));
}

// Whether rows are where they are, and there are kernels in which a lane has several of their elements.
bool has_wide_rows(const SegmentProblem &problem) {
  const bool integers = problem.dtype.code == kDLInt || problem.dtype.code == kDLUInt;
  return problem.ids != SegmentIds::unsorted && problem.rows > 0 && problem.segments <= kSegmentMostRows &&
         segment_vector(problem) > 1 && (!integers || (problem.extreme() && problem.dtype.bits > 8));
}

// The longer segments are on the average, the more lanes have one, and the longer are pieces. Measured on Hopper.
SegmentPieces pieces_of(const SegmentProblem &problem) {
  constexpr int kFewestRows = 128;
  constexpr int kMostPartBits = 2;
  SegmentPieces pieces;
  while (pieces.part_bits < kMostPartBits && problem.rows / problem.segments >= (kFewestRows << pieces.part_bits) / 2)
    ++pieces.part_bits;
  pieces.rows = kFewestRows << pieces.part_bits;
  pieces.count = ceil_div(problem.rows, int64_t(pieces.rows));
  return pieces;
}

// What bringing rows together and reducing them takes.
void take_reduction(Workspace &workspace, const SegmentProblem &problem, size_t state, const SegmentChunks &chunks,
                    SegmentSpace &space) {
  space.chunks = chunks;
  if (problem.ids == SegmentIds::unsorted) {
    space.sort = segment_sort_of(problem);
    for (int i = 0; i < std::min(space.sort.passes, 2); ++i) {
      space.keys[i] = workspace.take<uint32_t>(problem.rows);
      space.values[i] = workspace.take<uint32_t>(problem.rows);
    }
    space.digits = workspace.take<uint32_t>((space.sort.tiles + 1) << space.sort.bits);
  }
  take_bounds(workspace, space, [&] {
    if (space.owned) space.longs.count = workspace.take<uint32_t>(1);
    if (problem.ids != SegmentIds::offsets)
      space.offsets = take_numbers(workspace, problem.segments + 1, problem.rows >= kNarrowLimit);
    space.first = take_numbers(workspace, space.chunks.count + 1, problem.segments >= kNarrowLimit);
  });
  if (space.owned) segment_take_longs(workspace, problem, space.longs);
  int64_t partial = problem.rows > space.chunks.chunk ? space.chunks.count : 0;
  if (has_wide_rows(problem)) {
    space.pieces = pieces_of(problem);
    space.pieces.owners = workspace.take<uint32_t>(space.pieces.count);
    partial = std::max(partial, space.pieces.count);
  }
  if (partial > 0) space.partial = workspace.take<std::byte>(2 * partial * problem.columns * int64_t(state));
}

SegmentChunks owned_chunks(const SegmentProblem &problem) {
  // Longer segments are shared out.
  constexpr int32_t kRows = 512;
  return {kRows, ceil_div(problem.rows + problem.segments, int64_t(kRows))};
}

// Whether those who have a segment each are faster than chunks of equally many rows. Chunks cut segments that are about
// as long as they are, and keep a state of each element; owners are left waiting where segments are long or nearly
// empty. Measured on Hopper.
bool owners_pay(const SegmentProblem &problem, bool gradient) {
  if (!segment_has_owners(problem)) return false;
  const bool narrow = problem.dtype.bits == 16;
  const auto rows_of_each = [&](int64_t count) { return problem.rows >= count * problem.segments; };
  if (gradient) return (narrow || rows_of_each(2)) && !rows_of_each(512);
  return narrow && rows_of_each(24) && !rows_of_each(128);
}

SegmentSpace forward_space(Workspace &workspace, const SegmentProblem &problem, bool with_arg) {
  SegmentSpace space;
  if (problem.segments * problem.columns == 0) return space;
  const size_t state = forward_state(problem, with_arg);
  if (!with_arg && segment_has_tiles(problem)) segment_take_tiles(workspace, problem, space.tiles);
  // Where pointers or strides don't allow tiles, too.
  if (has_cells(problem)) segment_take_cells(workspace, problem, state, space);
  if (space.cells == SegmentCells::none) {
    space.owned = !with_arg && problem.ids == SegmentIds::unsorted && owners_pay(problem, false);
    take_reduction(workspace, problem, state, space.owned ? owned_chunks(problem) : segment_chunks(problem), space);
  }
  return space;
}

// Whether sums need not be the same bits in every run, and are faster so: few segments would wait for one another.
bool adds_atomically(const SegmentProblem &problem, const SegmentSpace &space) {
  const bool floats = problem.dtype.code != kDLInt && problem.dtype.code != kDLUInt;
  return problem.any_order && floats && problem.ids == SegmentIds::unsorted &&
         (problem.kind == SegmentKind::sum || problem.kind == SegmentKind::mean) &&
         problem.segments * problem.columns > 0 && space.cells != SegmentCells::few;
}

// Whether a row first learns which of its columns take the gradient. Otherwise it reads its segment's d_output and arg,
// which costs less only where segments have few rows; or arg is scattered into zeros, which does where they have many.
// Measured on Hopper.
bool marks_pay(const SegmentProblem &problem) {
  return segment_vector(problem) > 1 && problem.rows <= kSegmentMostRows && problem.rows >= 2 * problem.segments &&
         problem.rows < 512 * problem.segments;
}

SegmentSpace backward_space(Workspace &workspace, const SegmentProblem &problem, bool from_arg) {
  SegmentSpace space;
  if (problem.rows * problem.columns == 0) return space;
  if (problem.ids == SegmentIds::offsets)
    space.ids = take_numbers(workspace, problem.rows, problem.segments >= kNarrowLimit);
  if (problem.kind == SegmentKind::mean) {
    if (problem.ids == SegmentIds::unsorted) space.counts = workspace.take<uint32_t>(problem.segments);
    if (problem.ids == SegmentIds::sorted)
      space.offsets = take_numbers(workspace, problem.segments + 1, problem.rows >= kNarrowLimit);
    // Otherwise rows of d_output are read once, if at all.
    if (problem.segments > 0 && problem.rows >= 2 * problem.segments)
      space.states = workspace.take<std::byte>(problem.segments * problem.columns * (problem.dtype.bits / 8));
  }
  if (problem.segments > 0 && (problem.kind == SegmentKind::prod || (problem.extreme() && !from_arg))) {
    const bool chosen = problem.extreme() && !problem.even;
    const size_t state = backward_state(problem);
    if (chosen && has_cells(problem)) segment_take_cells(workspace, problem, state, space);
    if (space.cells == SegmentCells::none) {
      space.owned = chosen && problem.ids != SegmentIds::offsets && owners_pay(problem, true);
      take_reduction(workspace, problem, state, space.owned ? owned_chunks(problem) : segment_chunks(problem), space);
    }
    const size_t kept = chosen ? sizeof(uint32_t) : problem.kind == SegmentKind::prod ? packed_product(problem) : state;
    space.states = workspace.take<std::byte>(problem.segments * problem.columns * int64_t(kept));
  }
  if (problem.extreme() && !problem.even && !space.owned && marks_pay(problem))
    // A few at once are zeroed.
    space.marks = workspace.take<uint32_t>(ceil_div(problem.rows * ceil_div(problem.columns, kSegmentMarked), 4) * 4);
  return space;
}

SegmentWay way_of(const SegmentProblem &problem, const SegmentSpace &space, size_t workspace) {
  const char *path = problem.ids == SegmentIds::unsorted ? "sort" : space.pieces.count > 0 ? "rows" : "chunks";
  if (space.tiles.parts > 0) return {"tiles", workspace};
  if (space.cells == SegmentCells::few) path = "few";
  if (space.cells == SegmentCells::shared) path = "shared";
  if (space.cells == SegmentCells::buckets) path = "buckets";
  if (space.cells == SegmentCells::runs) path = "runs";
  return {path, workspace};
}

}  // namespace

SegmentWay segment_reduce_way(const SegmentProblem &problem, bool with_arg) {
  Workspace counter(nullptr);
  const SegmentSpace space = forward_space(counter, problem, with_arg);
  if (adds_atomically(problem, space)) return {"atomic", segment_atomic_bytes(problem), false};
  return way_of(problem, space, counter.size());
}

SegmentWay segment_reduce_backward_way(const SegmentProblem &problem, bool from_arg) {
  Workspace counter(nullptr);
  const SegmentSpace space = backward_space(counter, problem, from_arg);
  SegmentWay way = way_of(problem, space, counter.size());
  if (from_arg || problem.kind == SegmentKind::sum || problem.kind == SegmentKind::mean) way.path = "spread";
  return way;
}

void segment_reduce_cuda(const SegmentForward &call, std::byte *workspace, Stream stream) {
  Workspace pieces(workspace);
  const SegmentProblem &problem = call.problem;
  const SegmentSpace space = forward_space(pieces, problem, call.arg.data != nullptr);
  if (adds_atomically(problem, space)) {
    segment_add_atomically(call, workspace, stream);
  } else if (problem.extreme()) {
    if (call.arg.data) {
      segment_places(call, space, stream);
    } else if (!(space.tiles.parts > 0 && segment_reduce_tiles(call, space.tiles, stream)) &&
               !(space.owned && segment_reduce_owned(call, space, stream))) {
      segment_extremes(call, space, stream);
    }
  } else if (problem.kind == SegmentKind::prod) {
    segment_products(call, space, stream);
  } else if (problem.dtype.code == kDLInt || problem.dtype.code == kDLUInt) {
    segment_integer_sums(call, space, stream);
  } else {
    segment_sums(call, space, stream);
  }
}

void segment_reduce_backward_cuda(const SegmentBackward &call, std::byte *workspace, Stream stream) {
  Workspace pieces(workspace);
  const SegmentProblem &problem = call.problem;
  const SegmentSpace space = backward_space(pieces, problem, call.arg.data != nullptr);
  if (space.owned && segment_spread_owned(call, space, stream)) return;
  if (space.cells == SegmentCells::shared && segment_spread_shared(call, space, stream)) return;
  if (problem.segments > 0) {
    if (problem.kind == SegmentKind::prod) {
      segment_factors(call, space, stream);
    } else if (problem.extreme() && problem.even) {
      segment_tallies(call, space, stream);
    } else if (problem.extreme() && !call.arg.data) {
      SegmentForward places = {};
      places.problem = problem;
      places.problem.wide_index = false;
      places.input = call.input;
      places.ids = call.ids;
      places.arg = {space.states, problem.columns, 1};
      segment_places(places, space, stream);
    }
  }
  segment_spread(call, space, stream);
}

}  // namespace baracuda
