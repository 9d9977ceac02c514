// The shared pool: classes drawn systematically, block by block, by shares that a binary tree of sums holds.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <tuple>

#include "index.h"

namespace {

using namespace manyclass;

// sums: (2 · blocks,), float64: node 1 is the root, 2·i and 2·i + 1 are the children of node i, block b is node blocks + b.
// Brings the nodes above `leaves` (blocks) up to date.
void sum_up_(const Tensor& sums, const Tensor& leaves) {
  const char* op = "sum_up_";
  check_sums(sums, op);
  check(leaves, ScalarType::Long, 1, op, "leaves");
  const int64_t blocks = sums.numel() / 2;
  const auto* leaf_data = leaves.const_data_ptr<int64_t>();
  check_ids(leaves, 0, blocks, op, "leaves");
  std::vector<int64_t> nodes(leaf_data, leaf_data + leaves.numel());
  auto* data = sums.mutable_data_ptr<double>();
  std::sort(nodes.begin(), nodes.end());
  for (int64_t& node : nodes) node += blocks;
  for (int64_t width = blocks; width > 1; width /= 2) {
    for (int64_t& node : nodes) node /= 2;
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    for (const int64_t node : nodes) data[node] = data[2 * node] + data[2 * node + 1];
  }
}

// -> positions (samples,), ascending, and the log of the expected count of each (samples,)
std::tuple<Tensor, Tensor> pool_draw(const Tensor& sums, const Tensor& uniform, int64_t classes, int64_t outliers,
                                     int64_t samples, double share) {
  const char* op = "pool_draw";
  check_sums(sums, op);
  check(uniform, ScalarType::Double, 1, op, "uniform");
  const int64_t blocks = sums.numel() / 2;
  const Layout layout{classes, outliers, blocks};
  require(uniform.numel() == 1, op, ": uniform must hold one number");
  check_uniform(uniform, op);
  check_sizes(layout, op);
  check_range<int64_t>(samples, 1, classes - outliers - 1, op, "samples");
  // Above 0, so that every block has a share however its sum was rounded.
  check_range(share, 1e-6, 1.0, op, "share");
  Tensor positions = torch::stable::new_empty(uniform, {samples}, ScalarType::Long);
  Tensor log_count = torch::stable::new_empty(uniform, {samples});
  const auto* data = sums.const_data_ptr<double>();
  auto* position_data = positions.mutable_data_ptr<int64_t>();
  auto* count_data = log_count.mutable_data_ptr<double>();
  const double offset = *uniform.const_data_ptr<double>();
  std::atomic<bool> sound{std::isfinite(data[1]) && data[1] >= 0};  // exceptions must not leave a thread
  torch::stable::parallel_for(0, samples, 256, [&](int64_t begin, int64_t end) {
    // Points ascend, so most of a path equals that of the previous point, and the share of each left child is kept.
    std::vector<int64_t> path(64, 0);
    std::vector<double> lefts(64, 0.0);
    double total = 0;
    for (int64_t k = begin; k < end; ++k) {
      double point = (offset + static_cast<double>(k)) / static_cast<double>(samples);
      int64_t first = 0, width = blocks, node = 1;  // blocks below the node
      for (int64_t level = 0; node < blocks; ++level) {
        width /= 2;
        if (path[level] != node) {
          path[level] = node, lefts[level] = pool_share(layout, data, 2 * node, first, width, share);
        }
        const double left = lefts[level];
        const bool right = point >= left;
        if (right) point -= left, first += width;
        node = 2 * node + right;
      }
      if (path.back() != node) path.back() = node, total = pool_share(layout, data, node, first, 1, share);
      const int64_t begin_of = layout.border(first), size = layout.size(first);
      if (!(total > 0 && total < INFINITY)) {
        sound = false;
        return;
      }
      const double place = std::max(0.0, point / total * static_cast<double>(size));
      position_data[k] = begin_of + static_cast<int64_t>(std::min(place, static_cast<double>(size - 1)));
      count_data[k] = std::log(total * static_cast<double>(samples) / static_cast<double>(size));
    }
  });
  require(sound, op, ": sums must be finite and not negative");
  // Rounding can exchange neighbours at a border.
  if (!std::is_sorted(position_data, position_data + samples)) {
    std::vector<std::pair<int64_t, double>> sorted(samples);
    for (int64_t k = 0; k < samples; ++k) sorted[k] = {position_data[k], count_data[k]};
    std::sort(sorted.begin(), sorted.end());
    for (int64_t k = 0; k < samples; ++k) position_data[k] = sorted[k].first, count_data[k] = sorted[k].second;
  }
  return {positions, log_count};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def("sum_up_(Tensor(a!) sums, Tensor leaves) -> ()");
  library.def(
      "pool_draw(Tensor sums, Tensor uniform, int classes, int outliers, int samples, float share) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("sum_up_", TORCH_BOX(&sum_up_));
  library.impl("pool_draw", TORCH_BOX(&pool_draw));
}
