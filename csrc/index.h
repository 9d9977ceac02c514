// The tree of blocks: its layout, and the beam of a search.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "simd.h"

namespace manyclass {

// Children of a stored node: three bisections separate two stored levels.
constexpr int64_t kBranching = 8;

// Positions of the classes: the first `outliers` belong to no block, the others to `blocks` blocks that differ in size
// by at most one.
// `blocks` is a power of two.
struct Layout {
  int64_t classes, outliers, blocks;
  int shift = shift_of(blocks);  // a division would be slow in a search

  static int shift_of(int64_t blocks) {
    int shift = 0;
    while (shift < 62 && int64_t{1} << shift < blocks) ++shift;
    return shift;
  }
  int64_t border(int64_t block) const { return outliers + (block * (classes - outliers) >> shift); }
  int64_t size(int64_t block) const { return border(block + 1) - border(block); }
};

// Levels of the tree, from the top to the leaves: the first node of each, their number, and the log of their members' number.
struct Level {
  int64_t first, nodes;
  float log_size;
};

inline std::vector<Level> levels_of(const Layout& layout, int64_t top) {
  std::vector<Level> levels;
  for (int64_t nodes = layout.blocks; nodes >= top; nodes /= kBranching) {
    const double size = static_cast<double>(layout.classes - layout.outliers) / static_cast<double>(nodes);
    levels.push_back({0, nodes, static_cast<float>(std::log(size))});
  }
  std::reverse(levels.begin(), levels.end());
  for (size_t i = 1; i < levels.size(); ++i) levels[i].first = levels[i - 1].first + levels[i - 1].nodes;
  return levels;
}

// Beam width on a level in a search for `width` blocks. Above the leaves half the width does nearly as well, if it keeps at
// least the same share of its level.
inline int64_t beam_width(const Layout& layout, const Level& level, int64_t width) {
  if (level.nodes == layout.blocks) return width;
  return std::max((width + 1) / 2, (std::min(width, layout.blocks) * level.nodes + layout.blocks - 1) / layout.blocks);
}

// The members of a node of `nodes` on its level, as positions in the order of the classes.
inline int64_t node_border(const Layout& layout, int64_t nodes, int64_t node) {
  return layout.border(node * (layout.blocks / nodes));
}

inline void check_sizes(const Layout& layout, const char* op) {
  check_range<int64_t>(layout.classes, 1, kMostClasses, op, "classes");
  check_range<int64_t>(layout.outliers, 0, layout.classes - 1, op, "outliers");
  check_range<int64_t>(layout.blocks, 1, layout.classes - layout.outliers, op, "blocks");
  require((layout.blocks & (layout.blocks - 1)) == 0, op, ": blocks must be a power of two, got ", layout.blocks);
}

// The tree of sums over the blocks, (2 · blocks,). The sum at the root is the total.
inline void check_sums(const Tensor& sums, const char* op) {
  check(sums, ScalarType::Double, 1, op, "sums");
  const int64_t blocks = sums.numel() / 2;
  require(blocks > 0 && sums.numel() == 2 * blocks && (blocks & (blocks - 1)) == 0, op,
          ": sums must hold twice a power of two, got ", sums.numel());
}

// The summaries of the nodes of a tree: a mean in codes, its scale, and a variance each.
inline void check_nodes(const Tensor& mean, const Tensor& mean_scale, const Tensor& spread, int64_t stride, const char* op) {
  check(mean, ScalarType::Char, 2, op, "mean");
  check(mean_scale, ScalarType::Float, 1, op, "mean_scale");
  check(spread, ScalarType::Float, 1, op, "spread");
  require(mean.size(1) == stride && mean_scale.numel() == mean.size(0) && spread.numel() == mean.size(0), op,
          ": mean must have ", stride, " columns, and one mean_scale and spread per row");
}

inline void check_layout(const Layout& layout, int64_t top, int64_t nodes, const char* op) {
  check_sizes(layout, op);
  check_range<int64_t>(top, 1, layout.blocks, op, "top");
  int64_t width = layout.blocks, total = layout.blocks;
  while (width > top && width % kBranching == 0) total += width /= kBranching;
  require(width == top, op, ": blocks must be top times a power of ", kBranching);
  require(nodes == total, op, ": mean must have one row per node of the tree, ", total, ", got ", nodes);
}

// The share of the pool that the blocks `first` … `first + width − 1`, all below `node` of the tree of sums, draw: `uniform`
// of the pool is spread evenly over the classes, the rest follows the sums, if there are any.
inline double pool_share(const Layout& layout, const double* sums, int64_t node, int64_t first, int64_t width,
                         double uniform) {
  const auto members = static_cast<double>(layout.border(first + width) - layout.border(first));
  const double even = members / static_cast<double>(layout.classes - layout.outliers);
  return sums[1] > 0 ? uniform * even + (1 - uniform) * sums[node] / sums[1] : even;
}

// How often each class of a block is expected in a pool of `samples`; a pool of all classes has each once.
inline double pool_count(const Layout& layout, const double* sums, int64_t block, int64_t size, int64_t samples,
                         double uniform) {
  const auto inside = static_cast<double>(layout.classes - layout.outliers);
  if (samples >= layout.classes - layout.outliers) return 1;
  const double share = sums[1] > 0 ? sums[layout.blocks + block] / sums[1] / static_cast<double>(size) : 1 / inside;
  return static_cast<double>(samples) * (uniform / inside + (1 - uniform) * share);
}

inline bool within(const int32_t* data, int64_t count, int64_t limit) {
  return std::all_of(data, data + count, [&](int32_t id) { return 0 <= id && id < limit; });
}

}  // namespace manyclass
