// The shared pool: classes drawn systematically, block by block, by shares that a binary tree of sums holds.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <tuple>

#include "codes.h"
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

// The blocks that a draw looks through one by one: their sums fill a cache line.
constexpr int64_t kNeighbours = 8;

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
    // Points ascend, so most of a path equals that of the previous point, and the share of each left child is kept. The last
    // few levels would be read from memory one after the other; their blocks are neighbours and are read at once.
    std::vector<int64_t> path(64, 0);
    std::vector<double> lefts(64, 0.0);
    for (int64_t k = begin; k < end; ++k) {
      double point = (offset + static_cast<double>(k)) / static_cast<double>(samples);
      int64_t first = 0, width = blocks, node = 1;  // blocks below the node
      for (int64_t level = 0; width > kNeighbours; ++level) {
        width /= 2;
        if (path[level] != node) {
          path[level] = node, lefts[level] = pool_share(layout, data, 2 * node, first, width, share);
        }
        const double left = lefts[level];
        const bool right = point >= left;
        if (right) point -= left, first += width;
        node = 2 * node + right;
      }
      int64_t block = first;
      double total = pool_share(layout, data, blocks + block, block, 1, share);
      while (block + 1 < first + width && point >= total) {
        point -= total, ++block;
        total = pool_share(layout, data, blocks + block, block, 1, share);
      }
      const int64_t begin_of = layout.border(block), size = layout.size(block);
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

// The root mean square over queries of exp(min(mass, cutoff) − log_total), which is at most 1, for the nodes `nodes` of the
// tree: what share of each query's mass they hold. 0 where a mass is not finite.
// query: (queries, columns)   cutoff, log_total: (queries,)   size: members of a node   -> (nodes,)
Tensor node_shares(const Tensor& query, const Tensor& cutoff, const Tensor& log_total, const Tensor& mean,
                   const Tensor& mean_scale, const Tensor& spread, const Tensor& nodes, double size, bool absolute) {
  const char* op = "node_shares";
  check(query, ScalarType::Float, 2, op, "query");
  check(cutoff, ScalarType::Float, 1, op, "cutoff");
  check(log_total, ScalarType::Float, 1, op, "log_total");
  check(nodes, ScalarType::Long, 1, op, "nodes");
  const int64_t queries = query.size(0), columns = query.size(1), stride = code_stride(columns), number = nodes.numel();
  require(queries > 0 && columns > 0, op, ": query must have a row and a column");
  require(cutoff.numel() == queries && log_total.numel() == queries, op, ": cutoff and log_total must be (queries,)");
  check_nodes(mean, mean_scale, spread, stride, op);
  check_ids(nodes, 0, mean.size(0), op, "nodes");
  check_range(size, 1.0, static_cast<double>(kMostClasses), op, "size");
  Tensor shares = torch::stable::new_empty(query, {number});
  const auto *query_data = query.const_data_ptr<float>(), *cutoff_data = cutoff.const_data_ptr<float>();
  const auto *total_data = log_total.const_data_ptr<float>(), *scale_data = mean_scale.const_data_ptr<float>();
  const auto *spread_data = spread.const_data_ptr<float>();
  const auto* mean_data = mean.const_data_ptr<int8_t>();
  const auto* node_data = nodes.const_data_ptr<int64_t>();
  auto* share_data = shares.mutable_data_ptr<float>();
  const auto log_size = static_cast<float>(std::log(size));
  torch::stable::parallel_for(0, number, 64, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    const std::vector<int32_t> ids(node_data + begin, node_data + end);
    std::vector<int16_t> codes(stride);
    std::vector<int32_t> sums(count);
    std::vector<float> scales(count), spreads(count), of_query(count), masses_of(count), total(count, 0.0f);
    for (int64_t i = 0; i < count; ++i) scales[i] = scale_data[ids[i]], spreads[i] = spread_data[ids[i]];
    for (int64_t row = 0; row < queries; ++row) {
      const float* one = query_data + row * columns;
      float norm = 0;
      dots(one, one, 1, columns, &norm);
      const float scale = encode_query(one, columns, codes.data());
      code_dots_at(codes.data(), mean_data, ids.data(), count, stride, sums.data());
      scale_sums(sums.data(), scales.data(), scale, count, masses_of.data());
      of_query = spreads;
      masses(masses_of.data(), of_query.data(), count, norm, log_size, absolute);
      add_squared_shares(masses_of.data(), count, cutoff_data[row], total_data[row], total.data());
    }
    for (int64_t i = 0; i < count; ++i) {
      const float share = std::sqrt(total[i] / static_cast<float>(queries));
      share_data[begin + i] = std::isfinite(share) ? share : 0.0f;
    }
  });
  return shares;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "node_shares(Tensor query, Tensor cutoff, Tensor log_total, Tensor mean, Tensor mean_scale, Tensor spread, "
      "Tensor nodes, float size, bool absolute) -> Tensor");
  library.def("sum_up_(Tensor(a!) sums, Tensor leaves) -> ()");
  library.def(
      "pool_draw(Tensor sums, Tensor uniform, int classes, int outliers, int samples, float share) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("node_shares", TORCH_BOX(&node_shares));
  library.impl("sum_up_", TORCH_BOX(&sum_up_));
  library.impl("pool_draw", TORCH_BOX(&pool_draw));
}
