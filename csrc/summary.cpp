// Summaries of the nodes of the tree of blocks: the mean of the members, and their variance per column.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <numeric>

#include "index.h"

namespace {

using namespace manyclass;

// mean: (nodes, columns)   spread: (nodes,): written for `blocks`, which are leaves, and for all nodes above them
// weight: (num_classes, width)   bias: (num_classes,) or (0,), then columns = width + 1   order: (num_classes,), int32
void summarise_(const Tensor& mean, const Tensor& spread, const Tensor& weight, const Tensor& bias, const Tensor& order,
                const Tensor& blocks, int64_t outliers, int64_t num_blocks, int64_t top) {
  const char* op = "summarise_";
  check(mean, ScalarType::Float, 2, op, "mean");
  check(spread, ScalarType::Float, 1, op, "spread");
  check(weight, ScalarType::Float, 2, op, "weight");
  check(bias, ScalarType::Float, 1, op, "bias");
  check(order, ScalarType::Int, 1, op, "order");
  check(blocks, ScalarType::Long, 1, op, "blocks");
  const int64_t classes = weight.size(0), width = weight.size(1), columns = mean.size(1);
  const bool offsets = bias.numel() > 0;
  const Layout layout{classes, outliers, num_blocks};
  check_layout(layout, top, mean.size(0), op);
  require(columns > 0 && columns == width + offsets && (!offsets || bias.numel() == classes), op,
          ": mean must have the columns of weight, and one more for a bias with one entry per class");
  require(spread.numel() == mean.size(0) && order.numel() == classes, op,
          ": spread must have one entry per row of mean, and order must name every class once");
  check_ascending(blocks, num_blocks, op, "blocks");
  const auto* block_data = blocks.const_data_ptr<int64_t>();
  const auto* order_data = order.const_data_ptr<int32_t>();
  const auto* weight_data = weight.const_data_ptr<float>();
  const auto* bias_data = offsets ? bias.const_data_ptr<float>() : nullptr;
  auto* mean_data = mean.mutable_data_ptr<float>();
  auto* spread_data = spread.mutable_data_ptr<float>();
  const auto levels = levels_of(layout, top);

  std::atomic<bool> sound{true};  // exceptions must not leave a thread
  torch::stable::parallel_for(0, blocks.numel(), 32, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t block = block_data[at], first = layout.border(block), size = layout.size(block);
      const int32_t* ids = order_data + first;
      if (!within(ids, size, classes)) {
        sound = false;
        continue;
      }
      if (at + 1 < end) {  // the rows of the next block, while this one is summed up
        const int64_t next = layout.border(block_data[at + 1]), count = layout.size(block_data[at + 1]);
        for (int64_t j = 0; j < count; ++j) {
          const int64_t id = std::clamp<int64_t>(order_data[next + j], 0, classes - 1);
          prefetch_row(weight_data + id * width, width);
        }
      }
      const int64_t node = levels.back().first + block;
      float* centre = mean_data + node * columns;
      std::fill(centre, centre + columns, 0.0f);
      double square = 0;
      for (int64_t j = 0; j < size; ++j) {
        const float* row = weight_data + ids[j] * width;
        square += add_row(row, width, centre);
        if (offsets) {
          centre[width] += bias_data[ids[j]];
          square += static_cast<double>(bias_data[ids[j]]) * bias_data[ids[j]];
        }
      }
      const float scale = 1 / static_cast<float>(size);
      double length = 0;
      for (int64_t i = 0; i < columns; ++i) centre[i] *= scale, length += static_cast<double>(centre[i]) * centre[i];
      spread_data[node] = static_cast<float>(std::max(0.0, square * scale - length) / static_cast<double>(columns));
    }
  });
  require(sound, op, ": order must hold classes in [0, ", classes, ")");

  // Upwards, level by level: a node from its children.
  std::vector<int64_t> nodes(block_data, block_data + blocks.numel());
  for (size_t level = levels.size() - 1; level > 0; --level) {
    for (int64_t& node : nodes) node /= kBranching;
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    const Level here = levels[level - 1], below = levels[level];
    torch::stable::parallel_for(0, static_cast<int64_t>(nodes.size()), 32, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t node = here.first + nodes[at];
        float* centre = mean_data + node * columns;
        std::fill(centre, centre + columns, 0.0f);
        double square = 0, members = 0;
        for (int64_t child = kBranching * nodes[at]; child < kBranching * (nodes[at] + 1); ++child) {
          const auto size = static_cast<double>(node_border(layout, below.nodes, child + 1) -
                                                node_border(layout, below.nodes, child));
          const float* row = mean_data + (below.first + child) * columns;
          const float share = static_cast<float>(size);
          double length = 0;
          for (int64_t i = 0; i < columns; ++i) {
            centre[i] += share * row[i];
            length += static_cast<double>(row[i]) * row[i];
          }
          members += size;
          square += size * (length + static_cast<double>(columns) * spread_data[below.first + child]);
        }
        const auto scale = static_cast<float>(1 / members);
        double length = 0;
        for (int64_t i = 0; i < columns; ++i) centre[i] *= scale, length += static_cast<double>(centre[i]) * centre[i];
        spread_data[node] = static_cast<float>(std::max(0.0, square / members - length) / static_cast<double>(columns));
      }
    });
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "summarise_(Tensor(a!) mean, Tensor(b!) spread, Tensor weight, Tensor bias, Tensor order, Tensor blocks, "
      "int outliers, int num_blocks, int top) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("summarise_", TORCH_BOX(&summarise_)); }
